"""Who may ask, enumerated over all routes; and what hostile requests get: never a failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import bitnet_ops
from bitnet_ops.cli import main
from bitnet_ops.server.security import Access, read_json
from served import app_of, serving

KEY = "a-long-and-random-key"
SERVER = Path(bitnet_ops.__file__).parent / "server"


def every_route(routes: Iterable[Any]) -> Iterator[Any]:
    """Those of included routers too, which newer versions of FastAPI keep whole."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is None:
            yield route
        else:
            yield from every_route(router.routes)


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of everything that the app answers."""
    return [
        (method, route.path.replace("{name:path}", "demo").replace("{name}", "x"))
        for route in every_route(app.routes)
        for method in sorted(route.methods)
    ]


def ask(app: FastAPI, method: str, path: str, **headers: str) -> httpx.Response:
    """One request without a network; models are not loaded."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            content = b"{}" if method == "POST" else None
            sent = {"content-type": "application/json", **headers}
            return await client.request(method, path, headers=sent, content=content)

    return asyncio.run(once())


ROUTES = routes(app_of())


def test_the_routes_are_all_there() -> None:
    paths = {path for _, path in ROUTES}
    assert {"/", "/status", "/page/x", "/health", "/metrics", "/v1/chat/completions"} <= paths
    assert len(ROUTES) >= 19 and {"/openapi.json"} <= paths
    assert not {"/docs", "/redoc"} & paths, "they load scripts from elsewhere"


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_key_covers_every_route(method: str, path: str) -> None:
    app = app_of(access=Access(keys=("another-key", KEY)))
    wrong = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": KEY},
        {"authorization": "Basic ####"},
        {"x-api-key": ""},
        {"cookie": f"key={KEY}"},
    )
    for headers in wrong:
        response = ask(app, method, path, **headers)
        assert response.status_code == 401, headers
        assert "www-authenticate" in response.headers and KEY not in response.text
    basic = httpx.BasicAuth("anybody", KEY)
    authorization = next(basic.auth_flow(httpx.Request("GET", "http://x"))).headers["authorization"]
    right = (
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"authorization": authorization},
    )
    for headers in right:
        assert ask(app, method, path, **headers).status_code not in (401, 403), headers


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_name_that_is_rebound_to_this_machine_reaches_nothing(method: str, path: str) -> None:
    app = app_of()
    for host in (
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "",
        "[::2]",
        "[::1",
        "[::1]evil.example",
        "localhost..",
        "localhost.evil.example",
        "0.0.0.0",
    ):
        assert ask(app, method, path, host=host).status_code == 403, host
    for host in (
        *("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "127.8.8.8"),
        *("LOCALHOST", "LocalHost:8080", "localhost.", "localhost.:8080"),
    ):
        assert ask(app, method, path, host=host).status_code != 403, host
    named = app_of(access=Access(hosts=frozenset({"Box.lan"})))
    assert ask(named, method, path, host="box.LAN.:8080").status_code != 403


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_page_of_another_site_may_not_ask(method: str, path: str) -> None:
    app = app_of()
    for origin in (
        *("http://evil.example", "null", "http://localhost:1", "https://localhost.evil"),
        *("http://[::1", "http://[", "http://]", "//", ""),
    ):
        response = ask(app, method, path, origin=origin)
        assert response.status_code == 403, origin
        assert "access-control-allow-origin" not in response.headers
    assert ask(app, method, path, origin="http://localhost").status_code != 403
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert ask(app, method, path, **image).status_code == 403
    allowed = app_of(access=Access(origins=frozenset({"https://friend.example"})))
    friend = ask(allowed, method, path, origin="https://friend.example")
    assert friend.status_code != 403
    assert friend.headers["access-control-allow-origin"] == "https://friend.example"
    assert ask(allowed, method, path, origin="https://friend.example.evil").status_code == 403


@pytest.mark.parametrize("path", [path for method, path in ROUTES if method == "GET"])
def test_head_gives_what_get_gives_but_for_the_body(path: str, address: str) -> None:
    with httpx.Client(base_url=address) as client:
        for key in ("/page/x", "/v1/models/demo"):
            path = path.replace(key, {"/page/x": "/page/index.html"}.get(key, key))
        for _ in range(2):  # the connection goes on
            get, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.status_code == (307 if path == "/status/" else 200)
            assert head.headers.get("content-type") == get.headers.get("content-type")
    assert ask(app_of(access=Access(keys=(KEY,))), "HEAD", path).status_code == 401
    assert ask(app_of(), "HEAD", path, host="evil.example").status_code == 403


def test_head_of_what_get_does_not_give(address: str) -> None:
    assert httpx.head(f"{address}/v1/completions").status_code == 405
    assert httpx.head(f"{address}/page/x").status_code == 404


def test_a_preflight_needs_no_key_but_an_allowed_origin() -> None:
    app = app_of(access=Access(keys=(KEY,), origins=frozenset({"https://friend.example"})))
    preflight = {"access-control-request-method": "POST"}
    path = "/v1/chat/completions"
    good = ask(app, "OPTIONS", path, origin="https://friend.example", **preflight)
    assert good.status_code == 204 and "POST" in good.headers["access-control-allow-methods"]
    assert ask(app, "OPTIONS", path, origin="https://evil.example", **preflight).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host: str, capsys: Any) -> None:
    assert main(["serve", "--host", host]) == 2
    assert "expected --api-key-file" in capsys.readouterr().err


def test_short_keys_are_rejected(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "keys"
    for text in ("", "# none\n", "short\n", "long-enough-one\nshort\n"):
        file.write_text(text)
        assert main(["serve", "--api-key-file", str(file), "--port", "0"]) == 1
        assert "expected keys of at least 8 characters" in capsys.readouterr().err


def test_errors_speak_the_dialect_of_their_route() -> None:
    app = app_of(access=Access(keys=(KEY,)))
    assert isinstance(ask(app, "POST", "/v1/chat/completions").json()["error"]["message"], str)
    found = ask(app, "POST", "/v1/messages").json()
    assert found["type"] == "error" and found["error"]["type"] == "authentication_error"
    assert isinstance(ask(app, "POST", "/api/chat").json()["error"], str)


# Hostile requests: CVE-2026-21869, CVE-2026-34756 and their like ---------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    access = Access(max_body_bytes=1 << 20, body_s=1.0)
    with serving(app_of(access=access, max_tokens=3, max_running=8)) as found:
        yield found


@pytest.fixture(scope="module")
def large_bodies() -> Iterator[str]:
    with serving(app_of(max_tokens=3)) as found:
        yield found


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture(scope="module")
def schema(address: str) -> dict[str, Any]:
    return httpx.get(f"{address}/openapi.json").json()


VALID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "In"}],
    "prompt": "In",
    "input": "In",
    "content": "In",
    "tokens": [1, 2],
    "max_tokens": 2,
    "model": "demo",
}
NASTY: list[Any] = [
    -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -1e308, 0.5, True, None, "", "x", "1",
    "\ud800", "\0", [], [[]], [1], ["x"], {}, {"": {}}, {"type": "x"}, [None], [{}], [-1], [2**40],
]  # fmt: skip
UNQUOTED = ["NaN", "Infinity", "-Infinity", "1e999", "-0"]


def bodies(properties: dict[str, Any], required: list[str]) -> Iterator[str]:
    base = {name: VALID[name] for name in properties if name in VALID}
    assert set(required) <= set(base), required
    for name in properties:
        for value in NASTY:
            yield json.dumps({**base, name: value})
        for text in UNQUOTED:
            rest = {k: v for k, v in base.items() if k != name}
            yield json.dumps(rest)[:-1] + f', "{name}": {text}}}'
    for text in ("", "null", "[]", "1", '"x"', "{", '{"a": 1', "\ufeff{}", "[" * 100_000, "\xff"):
        yield text
    yield '{"x":' * 5000 + "1" + "}" * 5000


def test_cve_2026_21869_34756_every_field_at_every_nasty_value(address: str, schema: Any) -> None:
    """Numbers out of range, of other kinds, NaN, huge and deep ones: 4xx, or an answer."""
    asked, statuses = 0, dict[int, int]()
    with httpx.Client(base_url=address, timeout=60) as client:
        for path, methods in schema["paths"].items():
            if "post" not in methods:
                continue
            content = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            body = schema["components"]["schemas"][content["$ref"].rpartition("/")[2]]
            for text in bodies(body["properties"], body.get("required", [])):
                data = text.encode("utf-8", "surrogatepass")
                sent = {"content-type": "application/json"}
                response = client.post(path, content=data, headers=sent)
                status = response.status_code
                assert status < 500, (path, text[:200], response.text[:300])
                statuses[status] = statuses.get(status, 0) + 1
                asked += 1
        assert client.get("/health").status_code == 200
    assert asked > 1500 and statuses[200] > 100 and statuses.get(422, 0) == 0
    assert set(statuses) <= {200, 400, 404, 413, 429}


def test_cve_2026_34756_counts_are_bounded(address: str) -> None:
    messages = VALID["messages"]
    many = {"type": "function", "function": {"name": "f", "parameters": {}}}
    deep: Any = {}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    for body in (
        {"messages": messages, "n": 10**6},
        {"messages": messages, "stop": ["x"] * 100},
        {"messages": messages, "stop": "x" * 10**5},
        {"messages": messages, "logprobs": True, "top_logprobs": 10**6},
        {"messages": messages * 20_000},
        {"messages": messages, "tools": [many] * 2000},
        {"messages": messages, "tools": [{**many, "function": {"name": "f", "parameters": deep}}]},
        {
            "messages": messages,
            "response_format": {"type": "json_schema", "json_schema": {"schema": deep}},
        },
        {
            "messages": messages,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": [f"{i:09}" for i in range(60_000)]}},
            },
        },
    ):
        began = time.monotonic()
        found = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        assert found.status_code in (400, 413), found.text[:200]
        assert time.monotonic() - began < 3


def test_a_body_is_bounded_in_size_and_time(address: str) -> None:
    large = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'
    sent = {"content-type": "application/json"}
    assert httpx.post(f"{address}/v1/completions", content=large, headers=sent).status_code == 413

    def pieces() -> Iterator[bytes]:  # no Content-Length
        for _ in range(40):
            yield b" " * (1 << 16)

    found = httpx.post(f"{address}/v1/completions", content=pieces(), headers=sent)
    assert found.status_code == 413

    def slow() -> Iterator[bytes]:
        yield b'{"prompt": "x"'
        time.sleep(2)
        yield b"}"

    found = httpx.post(f"{address}/v1/completions", content=slow(), headers=sent, timeout=30)
    assert found.status_code == 408


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/detokenize"])
@pytest.mark.parametrize(
    "element", ["0", "-1", '"x"', "null", "[]", "{}", "[-1]", '["x"]', "1.5", '"\\""']
)
@pytest.mark.sampled(10)
def test_a_million_wrong_elements_cost_what_they_weigh(
    path: str, element: str, large_bodies: str
) -> None:
    lists = "[" + ",".join([element] * (1 << 20)) + "]"
    names = "prompt", "input", "tokens", "content", "logit_bias", "stop"
    data = "{" + ",".join(f'"{n}": {lists if n in names[:3] else "null"}' for n in names[:3]) + "}"
    before, began = peak_mib(), time.process_time()
    sent = {"content-type": "application/json"}
    found = httpx.post(f"{large_bodies}{path}", content=data, headers=sent, timeout=120)
    assert found.status_code in (400, 413), found.text[:200]
    assert len(found.content) < 2000
    assert time.process_time() - began < 8 and peak_mib() - before < 500


def test_a_million_wrong_entries_cost_what_they_weigh(large_bodies: str) -> None:
    began = time.process_time()
    for names in ({f"k{i}": "x" for i in range(1 << 18)}, {str(i): "x" for i in range(1 << 18)}):
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"prompt": "x", "messages": VALID["messages"], "logit_bias": names}
            found = httpx.post(f"{large_bodies}{path}", json=body, timeout=120)
            assert found.status_code == 400 and len(found.content) < 2000
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"content": "\xed\xa0\x80"}', 400),  # half a character, in bytes
        ('{"content": "\\ud83d"}'.encode("utf-16"), 400),
        ('{"content": "x"}'.encode("utf-16-le"), 400),
        ('{"content": "x"}'.encode("utf-32"), 400),
        (b'{"content": "\\ud83d\\ude00"}', 200),
        (b'{"content": "\\\\ud83d"}', 200),
        ('{"content": "\U0001f600"}'.encode(), 200),
        (b'\xef\xbb\xbf{"content": "x"}', 200),
        (b'{"content": "' + b"[{,}]" * 40_000 + b'"}', 200),
        (b'{"content": "' + b'\\"[,' * 40_000 + b'"}', 200),
        (b'{"content": "x", "more": [' + b'"\\\\",[],' * 110_000 + b"1]}", 413),
    ],
)
def test_bodies_are_of_whole_characters_and_of_bounded_parts(
    body: bytes, status: int, large_bodies: str
) -> None:
    sent = {"content-type": "application/json"}
    found = httpx.post(f"{large_bodies}/tokenize", content=body, headers=sent, timeout=60)
    assert found.status_code == status, found.text[:200]


@pytest.mark.parametrize(
    ("escaped", "read"),
    [
        ("cut \\ud83d", "cut \ufffd"),
        ("\\ude00\\ud83d", "\ufffd\ufffd"),
        ("\\uD83D\\\\\\uDE00", "\ufffd\\\ufffd"),
        ("\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"),
        ("\\ud83d\\ude00\\ude00", "\U0001f600\ufffd"),
        ("\\\\ud83d", "\\ud83d"),
        ("\\\\\\ud83d", "\\\ufffd"),
        ("\\ud8\\ude00", None),
    ],
)
def test_half_a_character_is_read_as_such(escaped: str, read: str | None) -> None:
    """A text that its program has cut comes back with every later request of a conversation."""
    body = read_json(f'{{"content": "{escaped}"}}'.encode())
    if read is None:
        with pytest.raises(ValueError, match="escape"):
            json.loads(body)
    else:
        assert json.loads(body) == {"content": read}


def test_what_is_turned_away_is_counted() -> None:
    app = app_of(access=Access(keys=(KEY,), max_body_bytes=100))
    with serving(app) as address:
        key = {"x-api-key": KEY}
        with httpx.Client(base_url=address) as client:
            assert client.get("/health").status_code == 401
            assert client.get("/health", headers={"host": "evil"}).status_code == 403
            assert client.get("/nowhere", headers=key).status_code == 404
            assert client.get("/tokenize", headers=key).status_code == 405
            assert (
                client.post("/tokenize", json={"content": "x" * 200}, headers=key).status_code
                == 413
            )
            assert client.post("/tokenize", json={"content": 1}, headers=key).status_code == 400
            requests = client.get("/status/data", headers=key).json()["requests"]
            assert requests == {**dict.fromkeys(requests, 0), "invalid": 6}
            assert (
                'bitnet_requests_total{outcome="invalid"} 6.0'
                in client.get("/metrics", headers=key).text
            )


def test_cve_2025_62164_nothing_from_the_wire_is_deserialised() -> None:
    words = ("pickle", "torch.load", "marshal", "shelve", "eval(", "exec(", "yaml")
    store = SERVER.parent / "generate"
    files = [*SERVER.rglob("*.py"), store / "prefix_store.py", store / "disk_prefix.py"]
    found = [(f.name, w) for f, w in itertools.product(files, words) if w in f.read_text()]
    assert found == []


def test_paths_lead_to_files_of_the_page_alone() -> None:
    app = app_of()
    for path in (
        "/page/..%2f..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page/../app.py",
        "/page/",
        "/page/x",
    ):
        assert ask(app, "GET", path).status_code == 404
    page = ask(app, "GET", "/")
    assert (
        page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    )
    assert page.headers["x-content-type-options"] == "nosniff"
