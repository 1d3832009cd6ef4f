"""Where a picture may come from: bytes, base64, and what an operator allows besides.

Whoever sends a request must not make this machine open files or connections. So an address, of the
web or of a file, is refused unless the operator named its host, or the folder. A host that is
allowed is asked as follows: its addresses are looked up once, all of them have to be public, and
the connection goes to one of these; no proxy is used, no password sent, no compressed answer taken;
every redirection, of three at most, begins anew with the host's name; the time is limited for all
of it together, and the size while the answer is being read.
"""

from __future__ import annotations

import binascii
import http.client
import io
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from bitnet_ops.vision.decode import LIMITS, ImageLimits
from bitnet_ops.vision.errors import ImageError

_SEND_BYTES = "send the picture itself, as a data: URI in base64"
_MAX_REDIRECTIONS = 3
_MAX_ADDRESS = 8192  # characters of a URL
_CHUNK = 1 << 16
_PIECE = 1 << 16  # characters of base64, a multiple of four
_REDIRECTIONS = (301, 302, 303, 307, 308)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}):")
_HOST = re.compile(r"\.?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


# What an operator allows --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Host:
    scheme: str
    name: str  # with a dot in front: every name below it
    port: int

    def covers(self, scheme: str, host: str, port: int) -> bool:
        same = host.endswith(self.name) if self.name.startswith(".") else host == self.name
        return same and (scheme, port) == (self.scheme, self.port)


@dataclass(frozen=True)
class ImageSources:
    """What pictures may be fetched from; nothing by default.

    allowed_hosts: names such as "images.example.org", or ".example.org" for every name below it;
    asked by https, or by http where it says "http://images.example.org"; a port may follow.
    allowed_folder: whose files a file: URL may name, by an absolute path or one inside it.
    private_addresses: whether an allowed host may be inside the own network. timeout_s: for a
    whole fetch.

    Raises ValueError for a host that is none, or a folder that is not there.
    """

    allowed_hosts: tuple[str, ...] = ()
    allowed_folder: Path | None = None
    private_addresses: bool = False
    timeout_s: float = 10.0
    _hosts: tuple[_Host, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hosts", tuple(map(_host, self.allowed_hosts)))
        if self.allowed_folder is not None and not Path(self.allowed_folder).is_dir():
            raise ValueError(f"images: expected a folder to read from, got {self.allowed_folder}")

    def covers(self, scheme: str, host: str, port: int) -> bool:
        """Whether that host may be asked."""
        return any(one.covers(scheme, host, port) for one in self._hosts)


def _host(text: str) -> _Host:
    scheme, _, rest = text.rpartition("://")
    name, _, port = rest.lower().partition(":")
    scheme = scheme.lower() or "https"
    given = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
    valid = scheme in _DEFAULT_PORTS and _HOST.fullmatch(name) and (not port or 0 < given < 65536)
    if not valid:
        expected = "a host such as images.example.org, .example.org or http://example.org:8080"
        raise ValueError(f"images: expected {expected}, got {text!r}")
    return _Host(scheme, name, given or _DEFAULT_PORTS[scheme])


NOTHING = ImageSources()


# What a request says ------------------------------------------------------------------------------


def image_bytes(
    source: str | bytes, sources: ImageSources = NOTHING, limits: ImageLimits = LIMITS
) -> bytes:
    """The bytes of the file that `source` is or names; whether they are a picture is not looked at.

    source: bytes; a data: URI in base64; base64 by itself, its lines broken or not; or, where
    `sources` allows it, an http, https or file URL.

    Raises ImageError, whose message never shows what came in base64.
    """
    if isinstance(source, bytes):
        return _limited(source, limits)
    if not isinstance(source, str):
        raise ImageError("a picture as text", type(source).__name__, _SEND_BYTES)
    scheme = _SCHEME.match(source[:32].lstrip())
    kind = scheme[1].lower() if scheme else ""
    if kind == "data":
        return _data_uri(source.strip(), limits)
    if kind in ("http", "https"):
        return _fetch(source.strip(), sources, limits)
    if kind == "file":
        return _allowed_file(source.strip(), sources, limits)
    if kind:
        raise ImageError("a data: URI", f"a {kind}: address", _SEND_BYTES)
    return _base64(source, limits)


def read_image_file(path: str | os.PathLike[str], limits: ImageLimits = LIMITS) -> bytes:
    """The bytes of the file that the user of this machine names; not for paths out of requests."""
    try:
        return _read(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), limits)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise _no_file(error) from None


def _limited(data: bytes, limits: ImageLimits) -> bytes:
    if len(data) > limits.max_bytes:
        raise _too_large(limits)
    return data


def _too_large(limits: ImageLimits) -> ImageError:
    most = f"{limits.max_bytes / 1_000_000:.4g}"
    return ImageError(f"at most {most} MB of a picture", "more", "send a smaller one")


def _data_uri(text: str, limits: ImageLimits) -> bytes:
    head, comma, body = text[:1024].partition(",")
    if not comma:
        raise ImageError("a data: URI with a comma", "none", _SEND_BYTES)
    if not head.lower().endswith(";base64"):
        raise ImageError("a data: URI in base64", "another one", _SEND_BYTES)
    body = text[len(head) + 1 :]
    if "%" in body:
        if len(body) > 4 * limits.max_bytes:  # each character as %XX
            raise _too_large(limits)
        body = unquote(body, "latin-1")
    return _base64(body, limits)


def _base64(text: str, limits: ImageLimits) -> bytes:
    """Strictly: what a lenient reader would leave out is an error. Lines may be broken."""
    if len(text) > 2 * limits.max_bytes:
        raise _too_large(limits)
    lines = text.split()
    whole = "".join(lines)
    if not whole:
        raise ImageError("a picture in base64", "nothing", _SEND_BYTES)
    # a space inside a line is a + that was lost on the way
    spaced = len(lines) > 1 and any(" " in line.strip() for line in text.splitlines())
    data, end = _decoded(whole)
    if spaced or end < len(whole):
        got = "a space inside it" if spaced else f"{whole[end]!r} at character {end}"
        remedy = "encode it with A-Z a-z 0-9 + / and send its bytes, not a path"
        raise ImageError("a picture in base64", got, remedy)
    if len(whole) % 4:
        got = f"{len(whole)} characters of it"
        raise ImageError("base64 filled up with = to a multiple of four", got, "send all of it")
    return _limited(data, limits)


def _decoded(text: str) -> tuple[bytes, int]:
    """What base64 stands for, and the place of the first character that does not belong there.

    In pieces: none of these calls lets other threads go on until it is through. What is wrong
    is looked for only where something was left out: a regular expression takes longer.
    """
    data = bytearray()
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        filled = len(piece) - len(piece.rstrip("="))
        most = 2 if start + _PIECE >= len(text) else 0
        try:
            found = binascii.a2b_base64(piece)
        except ValueError:
            found = b""
        if filled > most or len(found) != len(piece) // 4 * 3 - filled or len(piece) % 4:
            end = _BASE64.match(piece).end()  # type: ignore[union-attr]  # it matches nothing, too
            end = end if most else min(end, len(piece) - filled)
            if end < len(piece):
                return b"", start + end
        data += found
    return bytes(data), len(text)


# Files --------------------------------------------------------------------------------------------


def _no_file(error: Exception) -> ImageError:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ImageError("a readable file", words, "check its name and its permissions")


def _read(descriptor: int, limits: ImageLimits) -> bytes:
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ImageError("a regular file", "something else", "name a picture")
        return _limited(file.read(limits.max_bytes + 1), limits)


def _allowed_file(url: str, sources: ImageSources, limits: ImageLimits) -> bytes:
    if sources.allowed_folder is None:
        raise ImageError("a data: URI", "a file: address, which is not read", _SEND_BYTES)
    path = os.fsdecode(unquote_to_bytes(url.partition(":")[2].removeprefix("//")))
    try:
        folder = Path(os.path.realpath(sources.allowed_folder))
        inside = Path(os.path.realpath(folder / path)).relative_to(folder)
        return _read(_open_below(folder, inside.parts), limits)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        # one message: whether a file is there is nobody's business
        expected = "a picture in the folder that the operator allowed"
        raise ImageError(expected, "another file, or none", "check its name") from None


def _open_below(folder: Path, parts: tuple[str, ...]) -> int:
    """Step by step without links: a name could have been turned into one since it was looked at."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            below = os.open(name, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        return os.open(parts[-1] if parts else ".", flags | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


# Fetching -----------------------------------------------------------------------------------------


def _fetch(url: str, sources: ImageSources, limits: ImageLimits) -> bytes:
    until = time.monotonic() + sources.timeout_s
    try:
        for _ in range(_MAX_REDIRECTIONS + 1):
            answer = _ask(url, sources, limits, until)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
    except TimeoutError:
        expected = f"the picture within {sources.timeout_s:g} s"
        raise ImageError(expected, "none", _SEND_BYTES) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        words = str(error) or type(error).__name__
        raise ImageError("a picture from its host", words[:200], _SEND_BYTES) from None
    expected = f"at most {_MAX_REDIRECTIONS} redirections"
    raise ImageError(expected, "more", _SEND_BYTES)


def _ask(url: str, sources: ImageSources, limits: ImageLimits, until: float) -> bytes | str:
    """The body that `url` answers with, or where it redirects to."""
    parts, host, port = _checked(url, sources)
    wire = _connected(parts.scheme, host, port, sources, until)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        shown = host if port == _DEFAULT_PORTS[parts.scheme] else f"{host}:{port}"
        lines = (f"GET {target} HTTP/1.1", f"Host: {shown}", "User-Agent: bitnet-ops",
                 "Accept: image/*", "Accept-Encoding: identity", "Connection: close")  # fmt: skip
        wire.sendall("\r\n".join((*lines, "", "")).encode("ascii"))
        timed: Any = _Timed(wire, until)  # of a socket, http.client uses makefile alone
        answer = http.client.HTTPResponse(timed, method="GET")
        answer.begin()
        if answer.status in _REDIRECTIONS and answer.headers.get("Location"):
            return answer.headers["Location"]
        if answer.status != 200:
            raise ImageError("a picture from its host", f"status {answer.status}", _SEND_BYTES)
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ImageError("a picture as it is", "a compressed answer", _SEND_BYTES)
        return _body(answer, limits)
    finally:
        wire.close()


def _body(answer: http.client.HTTPResponse, limits: ImageLimits) -> bytes:
    if answer.length is not None and answer.length > limits.max_bytes:
        raise _too_large(limits)
    data = bytearray()
    while part := answer.read(_CHUNK):
        data += part
        if len(data) > limits.max_bytes:
            raise _too_large(limits)
    if answer.length:
        raise ImageError("a whole picture from its host", "a part of it", "send it once more")
    return bytes(data)


def _checked(url: str, sources: ImageSources) -> tuple[SplitResult, str, int]:
    """The parts, host and port of a URL that may be asked for."""
    if len(url) > _MAX_ADDRESS or not re.fullmatch("[!-~]+", url):
        expected = f"an address of at most {_MAX_ADDRESS} ASCII characters"
        raise ImageError(expected, "another one", _SEND_BYTES)
    try:
        parts = urlsplit(url)
        host, given = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise ImageError("an address of the web", "none", _SEND_BYTES) from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise ImageError("an http or https address", f"a {parts.scheme}: one", _SEND_BYTES)
    if "@" in parts.netloc:
        raise ImageError("an address without a password", "one with", _SEND_BYTES)
    port = _DEFAULT_PORTS[parts.scheme] if given is None else given
    if not sources.covers(parts.scheme, host, port):
        remedy = f"{_SEND_BYTES}; an operator may allow hosts"
        got = f"an address of {host[:100]}" if sources.allowed_hosts else "an address of the web"
        raise ImageError("a data: URI", f"{got}, which is not fetched", remedy)
    return parts, host, port


def _addresses(host: str, port: int, until: float) -> list[tuple[Any, ...]]:
    """What the name stands for, as `socket.getaddrinfo` says it, within the time."""
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look, daemon=True, name="bitnet-image-host")
    thread.start()
    thread.join(_left(until))
    if not found:
        raise TimeoutError
    if isinstance(found[0], Exception):
        raise ImageError("a host that is known", f"none ({host[:100]})", _SEND_BYTES)
    return list(found[0])


def is_public(address: str) -> bool:
    """Whether it is an address of the internet, also where it is written as IPv6 of another one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.sixtofour is not None or ip.teredo is not None or ip not in _UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")


def _connected(
    scheme: str, host: str, port: int, sources: ImageSources, until: float
) -> socket.socket:
    """A connection to an address of `host` that was checked."""
    found = _addresses(host, port, until)
    if not sources.private_addresses and not all(is_public(where[4][0]) for where in found):
        expected = "a host with public addresses"
        raise ImageError(expected, f"{host[:100]} with a private one", _SEND_BYTES)
    trouble: Exception | None = None
    for family, kind, protocol, _, address in found:
        wire = socket.socket(family, kind, protocol)
        try:
            wire.settimeout(_left(until))
            _connect(wire, address)
            if scheme == "https":
                wire = ssl.create_default_context().wrap_socket(wire, server_hostname=host)
            return wire
        except OSError as error:
            wire.close()
            trouble = error
    raise trouble or OSError("no address")


def _connect(wire: socket.socket, address: tuple[Any, ...]) -> None:
    wire.connect(address)


def _left(until: float) -> float:
    """Seconds; TimeoutError if there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Timed(io.RawIOBase):
    """A connection that is read until a moment in all, however slowly its bytes come."""

    def __init__(self, wire: socket.socket, until: float) -> None:
        self._wire, self._until = wire, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wire.settimeout(_left(self._until))
        return self._wire.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """As `http.client` asks for it."""
        return io.BufferedReader(self, _CHUNK)
