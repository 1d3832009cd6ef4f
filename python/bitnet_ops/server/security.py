"""Security: who may ask, from which page, and how much may be sent. A layer around the whole app.

- A key, where there is one, covers every route, the page too: browsers ask for it as the password
  of any user. Keys are compared in constant time.
- A page of another site can make a browser send requests here, and by DNS rebinding under a name of
  its own: so Host has to be a name of this server, and Origin, where it is sent, this server's.
- A body is at most so long, all of them together are, and each has to come within some seconds; the
  key is looked at before. What comes before a body is bounded in connection.py.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bitnet_ops.machine import is_loopback
from bitnet_ops.server.exchange import AskError
from bitnet_ops.server.gate import Client
from bitnet_ops.server.http import error_response

_HALF = re.compile(  # the first one without the second, or the second without the first
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}",
    re.DOTALL,
)
_SMALL = 256 << 10  # a body that always has room
_MAX_VALUES, _MAX_GROUPS = 1 << 20, 100_000
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True)
class Access:
    """What is let in.

    keys: one of which every request has to bring; none: everybody may ask. hosts: names under which
    the server is asked, besides localhost; None: any. origins: of other pages that may ask, such as
    "https://example.org", or "*". max_body_bytes, body_s: of a request's body. max_bodies_bytes: of
    those of all requests that are here, but for short ones.
    """

    keys: Sequence[str] = ()
    hosts: frozenset[str] | None = field(default_factory=frozenset)
    origins: frozenset[str] = frozenset()
    max_body_bytes: int = 16 << 20
    max_bodies_bytes: int = 128 << 20
    body_s: float = 60.0


class Guard:
    """The layer, as ASGI has it. `count` is called with the status of every response."""

    def __init__(
        self, app: Any, access: Access, count: Callable[[int], None] = lambda status: None
    ) -> None:
        self._app, self._access, self._count = app, access, count
        self._bodies = 0  # bytes of all that are here

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin")
        cross = origin is not None and origin in self._allowed(origin)
        more = [*_HEADERS[:2], *_cors(origin)] if cross else list(_HEADERS)
        head = scope["method"] == "HEAD"  # what GET gives, but for the body

        async def say(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
                await send({**message, "headers": [*message.get("headers", ()), *more]})
                if head:
                    await send({"type": "http.response.body", "body": b""})
            elif not head:
                await send(message)

        if head:
            scope = {**scope, "method": "GET"}
        client = Client(scope["client"][0] if scope.get("client") else "")
        try:
            self._check_host(headers.get(b"host", ""))
            self._check_origin(headers, origin)
            if cross and scope["method"] == "OPTIONS":  # a preflight brings no key
                await _preflight(scope, say)
                return
            key = self._check_key(headers)
            if key is not None:
                client.name = f"key {key}"
            body = await self._body(headers.get(b"content-length"), receive, client)
            scope["bitnet.client"] = client
            await self._app(scope, _replayed(body, receive), say)
        except AskError as error:
            response = error_response(scope["path"], error)
            if error.status == 401:
                page = "text/html" in headers.get(b"accept", "")
                challenge = 'Basic realm="bitnet-ops: the key as password"' if page else "Bearer"
                response.headers["WWW-Authenticate"] = challenge
            await response(scope, receive, say)
        finally:
            client.leave()

    def _allowed(self, origin: str) -> Sequence[str]:
        origins = self._access.origins
        return (origin,) if "*" in origins or origin in origins else ()

    def _check_host(self, host: str) -> None:
        if self._access.hosts is None:
            return
        name = _host_name(host)
        if not (is_loopback(name) or name in map(str.lower, self._access.hosts)):
            raise AskError(
                f"server: expected a Host that is this server's, got {host[:80]!r}; start it with "
                "--allow-host NAME if people reach it by that name",
                status=403,
                code="host",
            )

    def _check_origin(self, headers: dict[bytes, str], origin: str | None) -> None:
        if origin is None:
            if headers.get(b"sec-fetch-site") == "cross-site" and (
                headers.get(b"sec-fetch-mode") != "navigate"
            ):
                raise _origin_error("another site's page")
            return
        try:
            own = urlsplit(origin).netloc.lower() == headers.get(b"host", "").lower() != ""
        except ValueError:  # half an address of IPv6
            own = False
        if own or self._allowed(origin):
            return
        raise _origin_error(origin)

    def _check_key(self, headers: dict[bytes, str]) -> int | None:
        """The number of the key that was brought; None where none is needed."""
        keys = self._access.keys
        if not keys:
            return None
        given = _key_of(headers).encode()
        found = [hmac.compare_digest(given, key.encode()) for key in keys]  # all, whatever matches
        if True not in found:
            raise AskError(
                "server: expected an API key as Authorization: Bearer KEY, or x-api-key, got "
                f"{'another one' if given else 'none'}",
                status=401,
                code="invalid_api_key",
            )
        return found.index(True)

    async def _body(self, length: str | None, receive: Any, client: Client) -> bytes:
        """The whole body, before anything else is done for the request."""
        access, parts, size = self._access, list[bytes](), 0
        deadline = time.monotonic() + access.body_s
        if length is not None and length.isdecimal():
            _check_size(int(length[:20]), access.max_body_bytes)

        def give_back() -> None:
            self._bodies -= size

        client.hold(give_back)
        while True:
            try:
                left = deadline - time.monotonic()
                message = await asyncio.wait_for(receive(), max(0.0, left))
            except asyncio.TimeoutError:
                raise AskError(
                    f"server: expected the whole request within {access.body_s:g} s, got a part",
                    status=408,
                ) from None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._bodies += len(parts[-1])
            _check_size(size, access.max_body_bytes)
            if size > _SMALL and self._bodies > access.max_bodies_bytes:
                raise AskError(
                    f"server: expected at most {access.max_bodies_bytes >> 20} MiB of long "
                    "requests at once, got more; try again later",
                    status=503,
                    code="unavailable",
                )
            if not message.get("more_body", False):
                return read_json(b"".join(parts))


def _origin_error(origin: str) -> AskError:
    return AskError(
        f"server: expected a request of this server's own page or of a program, got one of "
        f"{origin[:80]}; start it with --allow-origin ORIGIN if that page may ask",
        status=403,
        code="origin",
    )


def _host_name(host: str) -> str:
    """Host without its port, as names are compared: "" where it is none."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name if "]" in host and (not port or port[0] == ":") else ""
    name = host.rpartition(":")[0] if ":" in host else host
    return name.lower().removesuffix(".")


def _key_of(headers: dict[bytes, str]) -> str:
    scheme, _, value = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return headers.get(b"x-api-key", "")


def _check_size(size: int, maximum: int) -> None:
    if size > maximum:
        raise AskError(
            f"server: expected a body of at most {maximum >> 20} MiB, got more", status=413
        )


def read_json(body: bytes) -> bytes:
    """`body`, with U+FFFD for half a character; nothing is parsed for it.

    Programs that cut texts by units of UTF-16 write halves (a surrogate alone), and write them
    again with every later request of a conversation; no answer could repeat one. Raises AskError
    for what would become far larger than it is: values by the million take a hundred bytes each.
    """
    try:
        body.decode()
    except UnicodeDecodeError:
        raise AskError("server: expected a body in UTF-8, got other bytes") from None
    if b"\0" in body:  # JSON has none
        raise AskError("server: expected JSON in UTF-8, got a zero byte")
    plain = body.replace(rb"\\", b"\0\0") if b"\\" in body else body  # what escapes is a letter
    if _HALF.search(plain):
        plain = _HALF.sub(rb"\\ufffd", plain)
        body = plain.replace(b"\0\0", rb"\\")
    if len(body) <= _MAX_GROUPS:
        return body
    pieces = plain.replace(rb"\"", b"").split(b'"', 2 * _MAX_VALUES)  # every other one is a text
    outside = b"".join(pieces[::2])
    values, groups = outside.count(b","), outside.count(b"[") + outside.count(b"{")
    if groups > _MAX_GROUPS or values > _MAX_VALUES or len(pieces) > 2 * _MAX_VALUES:
        raise AskError(
            f"server: expected at most {_MAX_VALUES:,} values in a request, and {_MAX_GROUPS:,} "
            "lists and objects, got more",
            status=413,
        )
    return body


def _replayed(body: bytes, receive: Any) -> Any:
    """`receive` that gives the body first, and then what comes: that the client goes."""
    given = [body]

    async def replay() -> Any:
        if not given:
            return await receive()
        return {"type": "http.request", "body": given.pop(), "more_body": False}

    return replay


def _cors(origin: str | None) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", (origin or "").encode("latin-1")),
        (b"vary", b"Origin"),
    ]


async def _preflight(scope: Any, send: Any) -> None:
    asked = {n.lower(): v for n, v in scope["headers"]}
    headers = [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (
            b"access-control-allow-headers",
            asked.get(b"access-control-request-headers", b"content-type, authorization"),
        ),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
