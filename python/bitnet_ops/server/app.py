"""The app: routes of all dialects over one service, errors in their forms, start and end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import reprlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, RedirectResponse
from starlette.exceptions import HTTPException

from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.server.catalog import Catalog, Served
from bitnet_ops.server.dialects import anthropic, ollama, openai, own, responses
from bitnet_ops.server.exchange import AskError
from bitnet_ops.server.http import error_response
from bitnet_ops.server.metrics import INTERVAL_S
from bitnet_ops.server.security import Access, Guard
from bitnet_ops.server.service import Service, ServiceOptions

_LOG = logging.getLogger(__name__)
_PAGE = Path(__file__).parent / "page"
_SHORT = reprlib.Repr()  # a value may be as large as a body
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80
# data: for the pictures of messages, which the page holds itself
_POLICY = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_ABOUT_DEMO = (
    "This is the demo model. It has read the King James Bible and nothing else: it goes on with "
    "Biblical English, and answers no questions."
)


def make_app(
    load: Callable[[], Catalog],
    options: ServiceOptions | None = None,
    access: Access | None = None,
    *,
    on_ready: Callable[[Service], None] = lambda service: None,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> FastAPI:
    """The server as an ASGI app.

    Args:
        load: makes the catalog, in a thread of its own; until then requests get 503.
        options, access: limits, and who may ask.
        on_ready, on_failure: called in the event loop when the models are there, or will not be.
    """
    service = Service(options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.ensure_future(_open(service, load, on_ready, on_failure)),
            asyncio.ensure_future(_tick(service)),
        ]
        try:
            yield
        finally:
            service.refuse()
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(service.close)

    app = FastAPI(title="bitnet-ops", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for dialect in (openai, responses, anthropic, ollama, own):
        app.include_router(dialect.router)
    _add_page(app)
    app.add_exception_handler(AskError, _say_error)
    app.add_exception_handler(BitNetError, _say_ours)
    app.add_exception_handler(RequestValidationError, _say_invalid)
    app.add_exception_handler(HTTPException, _say_http)
    app.add_exception_handler(Exception, _say_failure)
    app.add_middleware(Guard, access=access or Access(), count=service.metrics.answered)
    return app


async def _open(
    service: Service,
    load: Callable[[], Catalog],
    on_ready: Callable[[Service], None],
    on_failure: Callable[[BaseException], None],
) -> None:
    try:
        service.open(await asyncio.to_thread(load))
    except Exception as error:
        service.gate.closed = "the model cannot be loaded; see the server's log"
        on_failure(error)
        return
    on_ready(service)


async def _tick(service: Service) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        service.metrics.tick()


# Page --------------------------------------------------------------------------------------------


def _add_page(app: FastAPI) -> None:
    files = {path.name: path for path in sorted(_PAGE.iterdir())} if _PAGE.is_dir() else {}

    def respond(name: str) -> FileResponse:
        path = files.get(name)
        if path is None:
            raise HTTPException(404)
        policy = f"{_POLICY}; script-src 'self'{_inline_hashes(path)}"
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        return FileResponse(path, media_type=_TYPES.get(path.suffix), headers=headers)

    @app.get("/", include_in_schema=False)
    async def page() -> Any:
        return respond("index.html")

    @app.get("/status", include_in_schema=False)
    async def status() -> Any:
        return respond("status.html")

    @app.get("/status/", include_in_schema=False)
    async def status_below() -> Any:
        return RedirectResponse("../status")  # relative: a proxy may have taken a path away

    @app.get("/page/models", include_in_schema=False)
    async def models(request: Request) -> Any:
        service: Service = request.app.state.service
        rows = [_talker(one, service) for one in service.catalog]
        return {"models": [row for row in rows if row is not None]}

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Any:
        return respond(name)


@functools.lru_cache
def _inline_hashes(path: Path) -> str:
    """The sources of a policy that let the scripts run which stand in the page itself."""
    if path.suffix != ".html":
        return ""
    digests = [hashlib.sha256(script).digest() for script in _INLINE.findall(path.read_bytes())]
    return "".join(f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _talker(served: Served, service: Service) -> dict[str, Any] | None:
    """What the page wants to know of a model; None of one that only embeds.

    longest: of an answer, in tokens, where nobody says otherwise: room stays for the next question.
    """
    if "completion" not in served.capabilities:
        return None
    lm = served.lm
    sampling = {**dataclasses.asdict(SamplingParams()), **lm.generation.sampling}
    limit = service.options.max_tokens or served.context_length
    return {
        "id": served.name,
        "context_length": served.context_length,
        "thinks": served.thinks,
        "vision": "vision" in served.capabilities,
        "longest": max(1, min(limit, served.context_length // 4)),
        "sampling": {name: v for name, v in sampling.items() if isinstance(v, int | float)},
        "about": _ABOUT_DEMO if lm.is_demo and served.adapter is None else "",
    }


# Errors ------------------------------------------------------------------------------------------


async def _say_error(request: Request, error: Any) -> Any:
    service: Service = request.app.state.service
    return error_response(request.scope["path"], error, service.gate.retry_after)


async def _say_ours(request: Request, error: Any) -> Any:
    """What the package itself rejects, such as a text that is no Unicode."""
    return await _say_error(request, AskError(str(error)))


async def _say_invalid(request: Request, error: Any) -> Any:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    field = ".".join(place)
    message = f"server: {field or 'body'}: {first['msg']}, got {_SHORT.repr(first.get('input'))}"
    return await _say_error(request, AskError(message, field=field or None))


async def _say_http(request: Request, error: Any) -> Any:
    path = request.scope["path"]
    words = {404: "a route that exists", 405: "another method"}
    expected = words.get(error.status_code, str(error.detail))
    message = f"server: expected {expected}, got {request.method} {path[:80]}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    response = error_response(path, AskError(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})
    return response


async def _say_failure(request: Request, error: Any) -> Any:
    path = request.scope["path"]
    _LOG.error("%s %s failed", request.method, path, exc_info=error)
    message = "server: expected no failure, got one of our own; see the server's log"
    return error_response(path, AskError(message, status=500, code="internal"))
