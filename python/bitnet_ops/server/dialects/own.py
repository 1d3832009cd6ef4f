"""Own routes, and llama-server's: /health, /props, /metrics, /tokenize, /detokenize, what /status
shows."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from bitnet_ops.server.catalog import Served
from bitnet_ops.server.dialects.fields import Body
from bitnet_ops.server.http import client_of, service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Any:
    """200 once a request would be answered, 503 before and while it shuts down."""
    service = service_of(request)
    if service.state == "ready":
        return {"status": "ok"}
    return JSONResponse({"status": service.state}, status_code=503, headers={"Retry-After": "1"})


@router.get("/props")
async def props(request: Request, model: str = "") -> Any:
    """In llama-server's form: what its clients look at, above all whether pictures are read."""
    service = service_of(request)
    served = service.catalog.find(model)
    return {
        "model_alias": served.name,
        "total_slots": service.gate.max_running,
        "default_generation_settings": {"n_ctx": served.context_length},
        "modalities": {"vision": "vision" in served.capabilities, "audio": False},
        "chat_template": served.chat_template or "",
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


class TokenizeRequest(Body):
    model: str = ""
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Any:
    """In llama.cpp's form (`content`) and vLLM's (`prompt`)."""
    special = bool(body.add_special)
    if body.prompt is not None:
        special = body.add_special_tokens is not False
    text = body.prompt if body.prompt is not None else body.content or ""

    def read(served: Served, maximum: int) -> Response:
        tokenizer = served.lm.tokenizer
        tokenizer.check_length(text, maximum)
        ids = tokenizer.encode(text, special)
        tokens: list[Any] = list(ids)
        if body.with_pieces:
            tokens = [{"id": i, "piece": tokenizer.decode([i], False)} for i in ids]
        context = served.context_length
        return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": context})

    return await service_of(request).count(body.model, client_of(request), read)


class DetokenizeRequest(Body):
    model: str = ""
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=1 << 20)]


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Any:
    def read(served: Served, maximum: int) -> Response:
        text = served.lm.tokenizer.decode(body.tokens, False)
        return JSONResponse({"content": text, "prompt": text})

    return await service_of(request).count(body.model, client_of(request), read)


@router.get("/status/data")
async def status_data(request: Request) -> Any:
    service = service_of(request)
    models: list[dict[str, Any]] = []
    if service.state != "loading":
        models = [_model_status(one, service.catalog) for one in service.catalog if not one.adapter]
    gate = service.gate
    return {
        "version": metadata.version("bitnet-ops"),
        "uptime_s": round(time.time() - service.metrics.started, 1),
        "state": service.state,
        "models": models,
        "queue": {"running": gate.running, "waiting": gate.waiting, "limit": gate.max_waiting},
        "history": service.metrics.history(),
        "requests": service.metrics.requests,
        "tokens": {
            "generated": service.metrics.generated,
            "prompt": service.metrics.prompt,
            "cached": service.metrics.cached,
        },
    }


def _model_status(served: Served, catalog: Any) -> dict[str, Any]:
    engine = served.lm.engine
    stats = engine.stats()
    block_mib = engine.block_bytes / 2**20
    return {
        "id": served.name,
        "summary": served.lm.model.summary,
        "context_length": served.context_length,
        "adapters": [one.name for one in catalog if one.adapter and one.lm is served.lm],
        "running": stats.running,
        "waiting": stats.waiting,
        "kv": {
            "blocks": stats.blocks,
            "used": stats.used_blocks,
            "cached": stats.cached_blocks,
            "mib_total": round(stats.blocks * block_mib, 1),
            "mib_used": round((stats.used_blocks + stats.cached_blocks) * block_mib, 1),
        },
        "prefix": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "disk_blocks": stats.disk_pieces,
            "disk_mib": round(stats.disk_mb, 1),
        },
        "preemptions": stats.preemptions,
    }
