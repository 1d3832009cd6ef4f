"""Run the app under uvicorn, from a bound socket to the end of the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn

from bitnet_ops.language_model import LanguageModel
from bitnet_ops.server import connection
from bitnet_ops.server.app import make_app
from bitnet_ops.server.catalog import Catalog
from bitnet_ops.server.security import Access
from bitnet_ops.server.service import Service, ServiceOptions
from bitnet_ops.vision.sources import NOTHING, ImageSources

_LOG = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn's, which ends with status 0 when it is told to end, and says so to `on_end`."""

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_end = on_end

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.signal(number, self._end) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:  # the second time is meant at once, and is no failure
            self.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.should_exit = True
        self._on_end()


def serve(
    listener: socket.socket,
    load: Callable[[], Mapping[str, LanguageModel]],
    adapters: Sequence[str],
    on_ready: Callable[[Sequence[str]], None],
    *,
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    any_host: bool = False,
    origins: Sequence[str] = (),
    any_model: bool = False,
    sources: ImageSources = NOTHING,
    drain_s: float = 30.0,
    log_requests: bool = False,
    **limits: Any,
) -> int:
    """Serve on a bound socket until SIGINT or SIGTERM; the exit status.

    Args:
        load: opens the models, by name; the first one has the adapters.
        adapters: names of LoRA adapters of the first model.
        on_ready: called with the names once requests are answered.
        keys, hosts, origins: see security.Access; any_host: Host may be anything.
        any_model: see Catalog.
        sources: what pictures may be fetched from.
        drain_s: seconds that answers have at the end.
        limits: of ServiceOptions.
    Raises what `load` raises.
    """
    # before any: so reading a long text lets other threads go on (see tokenizer_guard.encoding)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="bitnet-ops: %(message)s")
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if log_requests else logging.ERROR)
    failed: list[BaseException] = []

    def catalog() -> Catalog:
        models = load()
        first = next(iter(models))
        of_first = dict.fromkeys(adapters, first)
        return Catalog(models, of_first, any_name=any_model, sources=sources)

    def failure(error: BaseException) -> None:
        failed.append(error)
        server.should_exit = True

    access = Access(
        keys=keys,
        hosts=None if any_host else frozenset(hosts),
        origins=frozenset(origins),
    )
    app = make_app(
        catalog,
        ServiceOptions(**limits),
        access,
        on_ready=lambda service: on_ready([one.name for one in service.catalog]),
        on_failure=failure,
    )
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        loop="asyncio",
        log_config=None,
        access_log=log_requests,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        **connection.options(),
    )
    server = _Server(config, service.refuse)
    asyncio.run(server.serve(sockets=[listener]))
    if failed:
        raise failed[0]
    return 0
