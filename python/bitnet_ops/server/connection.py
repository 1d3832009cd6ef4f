"""Connection: uvicorn's, with limits for what comes before a request, and for what stays unread.

uvicorn has neither: a head may grow and take as long as its client likes, whatever the key, one may
never come, and an answer may never be read.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """One client's.

    A request that comes before the one in front of it is answered is not read, and the connection
    ends with that answer: clients are ready for it (RFC 9112, 9.3.2), and with a request behind
    nobody would notice that the client goes.

    Attributes: `head_s`, seconds until a head has to be there, from the beginning or from the
    answer before; `stall_s`, seconds that what was sent may stay unread; `look_s`, between looks.
    """

    head_s, stall_s, look_s = 30.0, 120.0, 5.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head, self._behind = True, False
        self._size = 0  # of the head, or of what of a body is none, such as the sizes of its pieces
        self._waiting_since: float | None = self.loop.time()
        self._unread, self._read_at = 0, self.loop.time()
        if (
            self.limit_concurrency is not None
            and len(self.connections) > self.limit_concurrency + 64
        ):
            transport.abort()  # uvicorn would answer it, once it asks
        self._look()

    def _look(self) -> None:
        """End it where its client is too slow."""
        if self not in self.connections:
            return
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()
        if unread < self._unread or not unread:
            self._read_at = now
        self._unread = unread
        if now - self._read_at > self.stall_s:
            self.transport.abort()
        elif self._waiting_since is not None and now - self._waiting_since > self.head_s:
            self.transport.close()  # which waits for what is unread
        self.loop.call_later(self.look_s, self._look)

    def data_received(self, data: bytes) -> None:
        if self._behind or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._size += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to nothing that is here: it is answered as it is
        except httptools.HttpParserError:
            if not self._behind:
                self._refuse("Expected a request of HTTP/1.1, got something else.")
        if self._size > _HEAD_BYTES:
            self._refuse("Expected a head of at most 64 KiB, got more.")

    def _refuse(self, reason: str) -> None:
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()  # nothing could be said inside an answer
        else:
            self.send_400_response(reason)

    # httptools calls these ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._behind, self.cycle.keep_alive = True, False
            raise ValueError("a request before the answer")  # ends the reading
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not behind a body, where nobody would look at them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._size, self._waiting_since = False, 0, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._size = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._size = True, 0
        super().on_message_complete()

    # uvicorn calls these --------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()


def options() -> dict[str, Any]:
    """What uvicorn.Config has to be given."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = min(2048, files // 2) if files > 0 else 2048  # of the rest the prefix cache has need
    return {"http": Connection, "ws": "none", "limit_concurrency": maximum,
            "timeout_keep_alive": 30}  # fmt: skip
