"""Clients that are written by hand: what they send before a request is one, and how they leave."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import Response
from starlette.background import BackgroundTask

from bitnet_ops.server.connection import Connection
from bitnet_ops.server.security import Access, Guard
from served import app_of, scripted_lm, serving

WORDS = " ".join(f"word{i}" for i in range(400))


def until(something: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not something():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


LARGE = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = LARGE.replace(b"large", b"health")


@contextlib.contextmanager
def dialled(address: str, read: int | None = None) -> Iterator[socket.socket]:
    """A connection; read: how many bytes wait at most on this side until they are read."""
    with socket.socket() as found:
        if read is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read)
        url = urlsplit(address)
        found.connect((url.hostname, url.port))
        found.settimeout(30)
        yield found


def ended(found: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := found.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture
def hasty(monkeypatch: Any) -> None:
    for name, seconds in (("head_s", 0.5), ("stall_s", 1.0), ("look_s", 0.05)):
        monkeypatch.setattr(Connection, name, seconds)


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "count"}], "n": 4},
    "/v1/completions": {"prompt": "count", "n": 4, "max_tokens": 400},
    "/v1/responses": {"input": "count"},
    "/v1/messages": {"messages": [{"role": "user", "content": "count"}], "max_tokens": 400},
    "/api/chat": {"messages": [{"role": "user", "content": "count"}]},
    "/api/generate": {"prompt": "count"},
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_whose_head_cannot_be_sent_gives_its_places_back(
    path: str, leaves: bool, hasty: None
) -> None:
    """Behind an answer that is not read; its client stays, or goes at once."""
    lm = scripted_lm({"count": WORDS}, seconds=0.001)
    app, answered = app_of({"scripted": lm}, max_running=4, max_waiting=4), list[int]()
    sent = BackgroundTask(answered.append, 1)
    app.add_api_route("/large", lambda: Response(bytes(32 << 20), background=sent))
    with serving(app) as address, dialled(address, 2048) as found:
        gate = app.state.service.gate
        found.send(LARGE)
        until(lambda: answered)
        found.send(post(path, {**STREAMS[path], "stream": True}))
        until(lambda: gate.running)
        if leaves:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            found.close()
        until(lambda: not (gate.running or gate.waiting or gate._clients))
        until(lambda: not lm.engine.stats().running)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_with_a_request_behind_is_noticed(stream: bool) -> None:
    lm = scripted_lm({"count": WORDS}, seconds=0.05)
    app = app_of({"scripted": lm})
    with serving(app) as address, dialled(address) as found:
        gate = app.state.service.gate
        body = {"messages": [{"role": "user", "content": "count"}], "stream": stream}
        found.send(post("/v1/chat/completions", body) + HEALTH)
        until(lambda: gate.running)
        found.send(HEALTH + bytes(1 << 16))
        time.sleep(0.1)
        found.close()
        until(lambda: not gate.running, 10)
        assert lm.model.steps < 300
        until(lambda: not lm.engine.stats().running)


def test_a_request_before_the_answer_is_not_read_and_can_be_sent_again() -> None:
    with serving(app_of()) as address:
        with dialled(address) as found:
            found.send(post("/v1/completions", {"prompt": "In", "max_tokens": 3}) + HEALTH)
            answer = ended(found)
        assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer
        assert b'"finish_reason"' in answer
        with httpx.Client(base_url=address) as client:  # one after the other is as it was
            assert [client.get("/health").status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\r\n\r\n",
        b"GET / HT",
        HEALTH[:-2],
        HEALTH[:-2] + b"x: " + b"y" * 5000,
        HEALTH + b"GET /health HTTP/1.1\r\n",
        post("/tokenize", {"content": "x"})[:-3],
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: y",
    ],
    ids=str,
)
@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.sampled(5)
def test_a_request_that_does_not_end_is_given_up(start: bytes, drips: bool, hasty: None) -> None:
    """In time, whether nothing more comes or a letter now and then."""
    with serving(app_of(access=Access(body_s=0.5))) as address, dialled(address) as found:
        found.send(start)
        found.settimeout(0.05)
        deadline, there = time.monotonic() + 30, True
        with contextlib.suppress(ConnectionError):
            while there and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    there = found.recv(1 << 16) != b""
                if drips and there:
                    found.send(b"z")
        assert time.monotonic() < deadline, "it is still there"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /", b"x" * 4096),
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 4096),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 1000),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 1000),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;a=", b"x" * 4096),
    ],
    ids=str,
)
def test_a_head_is_bounded_in_bytes(start: bytes, piece: bytes) -> None:
    with serving(app_of()) as address, dialled(address) as found:
        sent = 0
        with contextlib.suppress(ConnectionError):
            found.send(start)
            for _ in range(4096):
                sent += found.send(piece)
        assert sent < 12 << 20, "what lies between the two sides is all that was sent"


def test_bodies_are_bounded_together_but_short_ones_pass() -> None:
    access = Access(max_bodies_bytes=1 << 20)
    app = app_of(access=access)
    with serving(app) as address, contextlib.ExitStack() as stack:
        large = post("/tokenize", {"content": "In the beginning " * 38_000})
        waiting = stack.enter_context(dialled(address))
        waiting.sendall(large[:-9])

        guard: Any = app.middleware_stack
        while not isinstance(guard, Guard):
            guard = guard.app
        until(lambda: guard._bodies > 600_000)  # the server has read what waits
        with dialled(address) as second:
            second.sendall(large)
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 503")
        body = {"content": "x" * 1000}
        assert httpx.post(f"{address}/tokenize", json=body).status_code == 200
        waiting.sendall(large[-9:])
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with dialled(address) as third:  # there is room again
            third.sendall(large)
            assert third.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_what_is_read_slowly_comes_whole(hasty: None) -> None:
    app = app_of()
    app.add_api_route("/large", lambda: Response(bytes(1 << 20) + b"end"))
    with serving(app) as address, dialled(address, 4096) as found:
        found.send(LARGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        got, begin = bytearray(), time.monotonic()
        while part := found.recv(1 << 14):
            got += part
            if time.monotonic() - begin < 4:
                time.sleep(0.1)
        assert got.endswith(b"end")
