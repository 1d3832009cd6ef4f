"""Where pictures come from: base64 as clients send it; addresses, refused unless allowed."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet_ops.vision import sources
from bitnet_ops.vision.decode import ImageLimits
from bitnet_ops.vision.errors import ImageError
from bitnet_ops.vision.sources import ImageSources, image_bytes, is_public, read_image_file
from pictures import file_of, photograph

DATA = file_of(photograph(20, 30))
TEXT = base64.b64encode(DATA).decode()
BROKEN = base64.encodebytes(DATA).decode()  # in lines of 76
NAME = "pictures.example"
PUBLIC = "93.184.215.14"


# Base64 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        DATA,
        TEXT,
        f"  {TEXT}\n",
        BROKEN,
        BROKEN.replace("\n", "\r\n  "),
        f"data:image/png;base64,{TEXT}",
        f"\n data:image/png;base64,{BROKEN}",
        f"DATA:IMAGE/PNG;Base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:image/jpeg;name=a.jpg;base64,{TEXT}",  # what it is, its bytes say
        "data:image/png;base64," + TEXT.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    ],
    ids=range(11),
)
def test_bytes_and_base64(source: str | bytes) -> None:
    assert image_bytes(source) == DATA


@pytest.mark.parametrize(
    "source, message",
    [
        ("", "a picture in base64, got nothing"),
        ("data:image/png;base64,", "a picture in base64, got nothing"),
        (TEXT[:40] + "*" + TEXT[40:], r"base64, got '\*' at character 40; encode it with A-Z a-z"),
        (TEXT[:40] + "=" + TEXT[40:], "got 'i' at character 41|got '.' at character 41"),
        (TEXT[:40] + "-" + TEXT[41:], "got '-' at character 40"),
        (TEXT[:40] + "\0" + TEXT[40:], r"got '\\x00' at character 40"),
        (TEXT[:40] + "é" + TEXT[40:], "got 'é' at character 40"),
        (TEXT[:40] + "\u202e" + TEXT[40:], r"got '\\u202e' at character 40"),
        (TEXT.rstrip("=")[:-1], "filled up with = to a multiple of four, got [0-9]+ char"),
        (TEXT[:20] + " " + TEXT[21:], "got a space inside it"),
        (f"data:image/png,{TEXT}", "a data: URI in base64, got another one"),
        (f"data:image/png;base64{TEXT}", "a data: URI with a comma, got none"),
        ("/etc/passwd", "base64 filled up with = to a multiple of four, got 11 characters"),
        ("/etc/host.conf", r"got '\.' at character 9; encode .*and send its bytes, not a path"),
        ("../picture.png", r"got '\.' at character 0"),
        ("C:\\picture.png", "a data: URI, got a c: address"),
        ("ftp://example.org/a.png", "a data: URI, got a ftp: address"),
        ("javascript:alert(1)", "a data: URI, got a javascript: address"),
        (7, "a picture as text, got int"),
        (None, "a picture as text, got NoneType"),
    ],
)
def test_what_is_no_base64(source: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        image_bytes(source)
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)
    assert TEXT[:30] not in str(caught.value)  # no data in messages, thus in no log


@pytest.mark.parametrize("head", ["", "data:image/png;base64,", "data:image/png;base64,%41AAA"])
def test_the_size_is_limited_before_it_is_decoded(head: str) -> None:
    limits = ImageLimits(max_bytes=len(DATA))
    assert image_bytes(TEXT, limits=limits) == DATA
    for source in (head + "A" * (4 * len(DATA)), head + "A" * 100 + TEXT, DATA + b"x"):
        with pytest.raises(ImageError, match="MB of a picture, got more; send a smaller one"):
            image_bytes(source, limits=limits)


# Files --------------------------------------------------------------------------------------------


def test_a_file_that_the_user_names(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(DATA)
    os.mkfifo(tmp_path / "fifo")
    assert read_image_file(path) == DATA
    for wrong, message in [
        (tmp_path / "none.png", "a readable file, got No such file or directory"),
        (tmp_path, "a readable file, got Is a directory|a regular file, got something else"),
        (tmp_path / "fifo", "a regular file, got something else"),
        ("a\0b", "a readable file, got embedded null"),
    ]:
        with pytest.raises(ImageError, match=message):
            read_image_file(wrong)
    with pytest.raises(ImageError, match="MB of a picture, got more"):
        read_image_file(path, ImageLimits(max_bytes=len(DATA) - 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """pictures/ with files and links, a secret beside it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    (folder / "a b.png").write_bytes(DATA)
    (folder / "inner" / "c.png").write_bytes(DATA)
    (folder / "link.png").symlink_to("inner/c.png")
    (folder / "out.png").symlink_to("../secret.png")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "fifo")
    return folder


def test_files_are_refused_where_no_folder_is_allowed(folder: Path) -> None:
    for url in (f"file://{folder}/inner/c.png", "file:inner/c.png", "FILE:///etc/passwd"):
        with pytest.raises(ImageError, match="a file: address, which is not read; send the pic"):
            image_bytes(url)


def test_files_of_the_folder_that_is_allowed(folder: Path) -> None:
    allowed = ImageSources(allowed_folder=folder)
    for name in ("a%20b.png", "inner/c.png", "link.png", "inner/../a b.png"):
        assert image_bytes(f"file://{name}", allowed) == DATA
        assert image_bytes(f"file://{folder}/{name}", allowed) == DATA
    for url in [
        "file:///etc/passwd",
        "file://../secret.png",
        "file://%2e%2e/secret.png",
        f"file://{folder}/../secret.png",
        "file://out.png",
        "file://up/secret.png",
        "file://none.png",
        "file://a%00b",
        "file://",
        f"file://{folder}suffix/x",
    ]:
        with pytest.raises(ImageError) as caught:
            image_bytes(url, allowed)
        words = str(caught.value)
        outside = "a picture in the folder that the operator allowed, got another file, or none"
        assert outside in words or "got something else" in words, (url, words)
        assert "secret" not in words
    with pytest.raises(ImageError, match="a regular file, got something else"):
        image_bytes("file://fifo", allowed)
    with pytest.raises(ImageError, match="MB of a picture, got more"):
        image_bytes("file://link.png", allowed, ImageLimits(max_bytes=10))


def test_a_link_that_comes_between_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is looked at, then turned into a link, then opened."""
    look = os.path.realpath

    def late(path: Any) -> str:
        found = look(path)
        if str(found).endswith("c.png"):
            (folder / "inner").rename(folder / "other")
            (folder / "inner").symlink_to(folder.parent)
            (folder.parent / "c.png").write_bytes(b"secret")
        return found

    monkeypatch.setattr(os.path, "realpath", late)
    with pytest.raises(ImageError, match="another file, or none"):
        image_bytes("file://inner/c.png", ImageSources(allowed_folder=folder))


# What an operator allows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allowed, scheme, host, port, covered",
    [
        ("example.org", "https", "example.org", 443, True),
        ("Example.ORG", "https", "example.org", 443, True),
        ("example.org", "http", "example.org", 80, False),
        ("example.org", "https", "example.org", 8443, False),
        ("example.org", "https", "a.example.org", 443, False),
        ("example.org", "https", "example.org.evil.net", 443, False),
        (".example.org", "https", "a.b.example.org", 443, True),
        (".example.org", "https", "example.org", 443, False),
        (".example.org", "https", "badexample.org", 443, False),
        ("http://example.org", "http", "example.org", 80, True),
        ("http://example.org:8080", "http", "example.org", 8080, True),
        ("http://example.org:8080", "http", "example.org", 80, False),
    ],
)
def test_hosts(allowed: str, scheme: str, host: str, port: int, covered: bool) -> None:
    assert ImageSources((allowed,)).covers(scheme, host, port) is covered


@pytest.mark.parametrize(
    "host",
    ["", "*", "*.org", "ftp://a.org", "a.org/x", "a b", "a.org:0", "a.org:x", "[::1]", "é.x"],
)
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ValueError, match="images: expected a host such as"):
        ImageSources((host,))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images: expected a folder to read from, got .*/gone"):
        ImageSources(allowed_folder=tmp_path / "gone")


@pytest.mark.parametrize(
    "url, message",
    [
        (f"https://{NAME}/a.png", "an address of the web, which is not fetched; send the picture "),
        (f"http://{NAME}/a.png", "an address of the web, which is not fetched"),
        ("https://", "an address of the web, which is not fetched"),
        ("HTTP://127.0.0.1/", "an address of the web, which is not fetched"),
    ],
)
def test_nothing_is_fetched_by_default(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", unexpected)
    with pytest.raises(ImageError, match=message):
        image_bytes(url)


def unexpected(*args: Any, **more: Any) -> Any:
    raise AssertionError(f"asked for {args}")


@pytest.mark.parametrize(
    "url, message",
    [
        ("https://other.example/a", "an address of other.example, which is not fetched; .*allow"),
        (f"http://{NAME}/a", f"an address of {NAME}, which is not fetched"),
        (f"https://{NAME}:22/a", f"an address of {NAME}, which is not fetched"),
        (f"https://{NAME}@evil.example/a", "an address without a password, got one with"),
        (f"https://me:pass@{NAME}/a", "an address without a password, got one with"),
        (f"https://{NAME}\\@evil.example/a", "without a password|which is not fetched"),
        (f"https://evil.example#{NAME}/", "an address of evil.example"),
        (f"https://{NAME}.evil.example/", "which is not fetched"),
        (f"https://{NAME}:99999/", "an address of the web, got none"),
        (f"https://[{NAME}/", "an address of the web, got none"),
        (f"https://{NAME}/a\r\nHost: x", "8192 ASCII characters, got another one"),
        (f"https://{NAME}/é", "8192 ASCII characters, got another one"),
        (f"https://{NAME}/" + "a" * 9000, "8192 ASCII characters, got another one"),
    ],
)
def test_addresses_beyond_the_host_that_is_allowed(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", unexpected)
    with pytest.raises(ImageError, match=message):
        image_bytes(url, ImageSources((NAME,)))


@pytest.mark.parametrize(
    "address, public",
    [
        (PUBLIC, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("64:ff9b::5db8:d70e", True),  # of that address, behind NAT64
        ("127.0.0.1", False),
        ("127.255.0.9", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # where clouds tell secrets
        ("100.64.0.1", False),
        ("192.0.2.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::1", False),
        ("2002:7f00:1::", False),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("2001:db8::1", False),
        ("example.org", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


# Fetching -----------------------------------------------------------------------------------------


class Host:
    """A server whose answers are bytes, or functions that write to the connection."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Callable[[socket.socket], None]] = {}
        self.asked: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(wire,), daemon=True).start()

    def answer(self, wire: socket.socket) -> None:
        with wire, contextlib.suppress(OSError):
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += wire.recv(4096)
            self.asked.append(request.decode())
            answer = self.answers.get(request.split()[1].decode(), b"HTTP/1.1 404 No\r\n\r\n")
            if callable(answer):
                answer(wire)
            else:
                wire.sendall(answer)

    def url(self, path: str) -> str:
        return f"http://{NAME}:{self.port}{path}"


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def moved(where: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()


class Network:
    """Names and addresses as this test says; every public address is the host's."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.names = {NAME: [PUBLIC], "second.example": ["2606:2800::1"]}
        self.looked_up: list[str] = []
        self.connected: list[str] = []

    def getaddrinfo(self, name: str, port: int, **more: Any) -> list[Any]:
        self.looked_up.append(name)
        if name not in self.names:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.names[name]
        ]

    def connect(self, wire: socket.socket, address: tuple[str, int]) -> None:
        self.connected.append(address[0])
        wire.connect(("127.0.0.1", self.host.port))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    network = Network(Host())
    monkeypatch.setattr(socket, "getaddrinfo", network.getaddrinfo)
    monkeypatch.setattr(sources, "_connect", network.connect)
    yield network
    network.host.listener.close()


def allowing(network: Network, *names: str, **more: Any) -> ImageSources:
    port = network.host.port
    return ImageSources(tuple(f"http://{name}:{port}" for name in (NAME, *names)), **more)


def test_a_fetch(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # neither is asked
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    network.host.answers["/a.png?x=1"] = ok(DATA, "Content-Type: text/html")
    assert image_bytes(network.host.url("/a.png?x=1#part"), allowing(network)) == DATA
    assert network.looked_up == [NAME] and network.connected == [PUBLIC]
    lines = network.host.asked[0].splitlines()
    assert lines[0] == "GET /a.png?x=1 HTTP/1.1" and f"Host: {NAME}:{network.host.port}" in lines
    assert not any(line.lower().startswith(("cookie", "authorization")) for line in lines)


def test_an_answer_without_a_length_and_in_chunks(network: Network) -> None:
    network.host.answers["/plain"] = b"HTTP/1.0 200 OK\r\n\r\n" + DATA
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (DATA[:9], DATA[9:], b""))
    network.host.answers["/chunks"] = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    )
    for path in ("/plain", "/chunks"):
        assert image_bytes(network.host.url(path), allowing(network)) == DATA


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirections_are_followed_where_they_are_allowed(network: Network, status: int) -> None:
    host = network.host
    host.answers |= {
        "/a": moved("/b", status),
        "/b": moved(f"//second.example:{host.port}/c", status),
        "/c": moved(host.url("/d"), status),
        "/d": ok(DATA),
        "/0": moved("/a", status),
    }
    allowed = allowing(network, "second.example")
    assert image_bytes(host.url("/a"), allowed) == DATA
    assert network.looked_up == [NAME, NAME, "second.example", NAME]  # each anew
    assert network.connected[2] == "2606:2800::1"
    with pytest.raises(ImageError, match="at most 3 redirections, got more"):
        image_bytes(host.url("/0"), allowed)
    with pytest.raises(ImageError, match="an address of second.example, which is not fetched"):
        image_bytes(host.url("/b"), allowing(network))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.7", "169.254.169.254", "::1", "::ffff:192.168.0.1", "64:ff9b::a00:1"],
)
def test_a_name_of_a_private_address_is_not_asked(network: Network, address: str) -> None:
    network.host.answers["/"] = ok(DATA)
    for addresses in ([address], [PUBLIC, address]):
        network.names[NAME] = addresses
        with pytest.raises(ImageError, match=f"public addresses, got {NAME} with a private one"):
            image_bytes(network.host.url("/"), allowing(network))
    assert network.connected == [] and network.host.asked == []
    assert image_bytes(network.host.url("/"), allowing(network, private_addresses=True)) == DATA


@pytest.mark.parametrize("where", ["inner.example", "127.0.0.1", "2130706433", "localhost"])
def test_a_redirection_to_a_private_address(network: Network, where: str) -> None:
    network.names |= {where: ["127.0.0.1"]}
    network.host.answers |= {"/": moved(f"http://{where}:{network.host.port}/in"), "/in": ok(DATA)}
    with pytest.raises(ImageError, match=f"an address of {where}, which is not fetched"):
        image_bytes(network.host.url("/"), allowing(network))
    with pytest.raises(ImageError, match=f"public addresses, got {where} with a private one"):
        image_bytes(network.host.url("/"), allowing(network, where))
    assert network.connected == [PUBLIC, PUBLIC]


def test_a_name_that_changes_between_two_requests(network: Network) -> None:
    """DNS rebinding: what was checked is connected to, and a redirection is checked again."""
    network.host.answers |= {"/": moved("/in"), "/in": ok(DATA)}
    answer = network.getaddrinfo

    def changing(name: str, port: int, **more: Any) -> list[Any]:
        found = answer(name, port, **more)
        network.names[NAME] = ["127.0.0.1"]
        return found

    sources.socket.getaddrinfo = changing
    with pytest.raises(ImageError, match="with a private one"):
        image_bytes(network.host.url("/"), allowing(network))
    assert network.connected == [PUBLIC]


@pytest.mark.parametrize("where", ["file:///etc/passwd", "ftp://a/", "gopher://x", "data:,x"])
def test_a_redirection_to_something_else(network: Network, where: str) -> None:
    network.host.answers["/"] = moved(where)
    with pytest.raises(ImageError, match="an http or https address, got a "):
        image_bytes(network.host.url("/"), allowing(network))


def slow_body(wire: socket.socket) -> None:
    wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        wire.sendall(b"x")
        time.sleep(0.05)


def slow_head(wire: socket.socket) -> None:
    wire.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        wire.sendall(b"x")
        time.sleep(0.05)


def endless_informing(wire: socket.socket) -> None:
    while True:
        wire.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.01)


def silent(wire: socket.socket) -> None:
    time.sleep(5)


@pytest.mark.parametrize("answer", [slow_body, slow_head, endless_informing, silent])
def test_the_time_of_a_fetch_is_limited(network: Network, answer: Any) -> None:
    network.host.answers |= {"/": answer, "/moved": moved("/")}
    began = time.monotonic()
    for path in ("/", "/moved"):
        with pytest.raises(ImageError, match=r"the picture within 0\.4 s, got none; send the"):
            image_bytes(network.host.url(path), allowing(network, timeout_s=0.4))
    assert time.monotonic() - began < 4


def test_the_time_of_a_name_is_limited(network: Network) -> None:
    sources.socket.getaddrinfo = lambda *args, **more: time.sleep(5)
    began = time.monotonic()
    with pytest.raises(ImageError, match=r"within 0\.2 s"):
        image_bytes(network.host.url("/"), allowing(network, timeout_s=0.2))
    assert time.monotonic() - began < 2


def test_an_endless_body_is_left_at_the_limit(network: Network) -> None:
    sent = 0

    def endless(wire: socket.socket) -> None:
        nonlocal sent
        wire.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sent += wire.send(b"x" * 65_536)

    network.host.answers["/"] = endless
    limits = ImageLimits(max_bytes=1 << 20)
    with pytest.raises(ImageError, match="MB of a picture, got more"):
        image_bytes(network.host.url("/"), allowing(network), limits)
    assert sent < 64 << 20  # what the system buffers is beyond us


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "MB of a picture, got more"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxx", "a whole picture from its host, got a"),
        (b"HTTP/1.1 404 Not\r\n\r\n", "a picture from its host, got status 404"),
        (b"HTTP/1.1 204 No\r\n\r\n", "got status 204"),
        (b"HTTP/1.1 302 Moved\r\n\r\n", "got status 302"),
        (ok(b"xx", "Content-Encoding: gzip"), "a picture as it is, got a compressed answer"),
        (b"", "a picture from its host, got Remote end closed|BadStatusLine"),
        (b"SSH-2.0-OpenSSH\r\n", "a picture from its host, got SSH-2.0-OpenSSH"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "got more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 99_999, "got got more than 65536 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "a picture from its host, got ",
        ),
    ],
    ids=range(11),
)
def test_answers_that_are_no_picture(network: Network, answer: bytes, message: str) -> None:
    network.host.answers["/"] = answer
    with pytest.raises(ImageError, match=message) as caught:
        image_bytes(network.host.url("/"), allowing(network), ImageLimits(max_bytes=1 << 20))
    assert len(str(caught.value)) < 350


def test_hosts_that_do_not_answer(network: Network) -> None:
    with socket.socket() as unused:  # bound, but not listening
        unused.bind(("127.0.0.1", 0))
        network.host.port = unused.getsockname()[1]
        with pytest.raises(ImageError, match="a picture from its host, got .*refused"):
            image_bytes(network.host.url("/"), allowing(network))
    network.names.clear()
    with pytest.raises(ImageError, match=rf"a host that is known, got none \({NAME}\)"):
        image_bytes(network.host.url("/"), allowing(network))


def test_https_wants_a_certificate_of_the_name(network: Network) -> None:
    """The host speaks plain HTTP: nothing is read from it as https."""
    network.host.answers["/"] = ok(DATA)
    allowed = ImageSources((f"{NAME}:{network.host.port}",), timeout_s=2)
    with pytest.raises(ImageError, match="a picture from its host|the picture within 2 s"):
        image_bytes(f"https://{NAME}:{network.host.port}/", allowed)
    assert network.host.asked == []
