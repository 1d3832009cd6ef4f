"""HTTP: responses that notice when the client has gone, and errors in each dialect's own form."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from bitnet_ops.server.exchange import AskError
from bitnet_ops.server.gate import Client
from bitnet_ops.server.service import Service

T = TypeVar("T")


def service_of(request: Request) -> Service:
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


def client_of(request: Request) -> Client:
    """Who asks. The layer around the app has made it, and ends what it holds with the request."""
    found = request.scope["bitnet.client"]
    assert isinstance(found, Client)
    return found


class EventStream(Response):
    """A stream of chunks that ends when nobody reads it any more."""

    def __init__(self, chunks: AsyncIterator[bytes], media_type: str = "text/event-stream") -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when="FIRST_COMPLETED")
        finally:
            gone.cancel()
            if not pump.done():
                pump.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await pump

    async def _pump(self, send: Callable[[dict[str, Any]], Coroutine[Any, Any, None]]) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """The result of `work`, which is cancelled when the client goes.

    A dict as a response, which FastAPI does not walk through: of many logprobs that takes seconds.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when="FIRST_COMPLETED")
        if not task.done():
            raise AskError("server: the client has gone", status=499, code="cancelled")
        result = task.result()
        return JSONResponse(result) if isinstance(result, dict) else result
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, AskError):
                await task


def json_of(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> Response:
    """`head` with a list `name` of items, which are written one by one: millions of numbers hold up
    other threads, such as the event loop's, for no longer than one item."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    data = ",".join(map(encode, items))
    return Response(f"{encode({**head, name: []})[:-2]}{data}]}}", media_type="application/json")


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(value: object, event: str | None = None) -> bytes:
    """One event of a stream."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data}\n\n".encode()


PING = b": ping\n\n"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(path: str, error: AskError) -> dict[str, Any]:
    """The error as the dialect of `path` says it."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if path.startswith("/api/"):
        return {"error": str(error)}
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    code, field = error.code, error.field
    return {"error": {"message": str(error), "type": kind, "param": field, "code": code}}


def error_response(path: str, error: AskError, retry_after: int = 1) -> Response:
    headers = {"Retry-After": str(retry_after)} if error.status in (429, 503) else {}
    return JSONResponse(error_body(path, error), status_code=error.status, headers=headers)
