"""The service under load: places, cancelled answers, failures, the end; answers stay right."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import bitnet_ops
from bitnet_ops.config.sparsity import ALWAYS
from bitnet_ops.language_model import DEMO_DIR, LanguageModel
from bitnet_ops.server.exchange import AskError
from bitnet_ops.server.gate import Gate
from served import app_of, greedy_demo, scripted_lm, serving

WORDS = " ".join(f"word{i}" for i in range(400))


def until(something: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not something():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def idle(app: Any, lm: Any) -> Callable[[], bool]:
    """Whether nothing runs, waits or holds a block."""

    def look() -> bool:
        stats, gate = lm.engine.stats(), app.state.service.gate
        return not (
            stats.running or stats.waiting or stats.used_blocks or gate.running or gate.waiting
        )

    return look


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


# The gate ----------------------------------------------------------------------------------------


def test_clients_take_turns() -> None:
    async def run() -> list[str]:
        gate, order = Gate(1, 20), list[str]()
        first = gate.enter("a")
        tickets = [
            gate.enter(c, background=b)
            for c, b in [
                ("a", False),
                ("a", False),
                ("z", True),
                ("a", False),
                ("b", False),
                ("c", False),
            ]
        ]
        first.leave()
        for _ in tickets:
            (ticket,) = [t for t in tickets if t.admitted.is_set() and not t._left]
            order.append(ticket.client)
            ticket.leave()
        assert gate.running == gate.waiting == 0 and not gate._clients
        return order

    assert asyncio.run(run()) == ["a", "b", "c", "a", "a", "z"], (
        "who works in the background is last"
    )


def test_places_are_counted_in_answers() -> None:
    async def run() -> None:
        gate = Gate(4, 4, per_client=6)
        large = gate.enter("a", 3)
        waiting = gate.enter("a", 2)
        assert (gate.running, gate.waiting, waiting.admitted.is_set()) == (3, 2, False)
        with pytest.raises(AskError, match="at most 6 answers at once for a client, got 7"):
            gate.enter("a", 2)
        with pytest.raises(AskError, match="at most 4 answers to wait, got 5") as error:
            gate.enter("b", 3)
        assert error.value.status == 429 and gate.retry_after >= 1
        small = gate.enter("b")
        assert not small.admitted.is_set(), "nobody passes who came earlier"
        waiting.leave()
        assert small.admitted.is_set()
        for ticket in (large, small, small):
            ticket.leave()
        assert gate.running == gate.waiting == 0

    asyncio.run(run())


# Clients that go ---------------------------------------------------------------------------------


def test_clients_that_go_end_their_work() -> None:
    lm = scripted_lm({"count": WORDS}, seconds=0.002)
    app = app_of({"scripted": lm}, max_running=64, max_waiting=200, speculation="off")
    with serving(app) as address:

        async def one(client: httpx.AsyncClient, pieces: int) -> None:
            async with client.stream(
                "POST", f"{address}/v1/chat/completions", json=chat("count", stream=True)
            ) as response:
                async for _ in response.aiter_lines():
                    pieces -= 1
                    if pieces < 0:
                        return

        async def all_of_them() -> None:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                await asyncio.gather(*(one(client, i % 7) for i in range(200)))

        asyncio.run(all_of_them())
        until(idle(app, lm))
        assert app.state.service.metrics.requests["cancelled"] == 200
        whole = httpx.post(f"{address}/v1/chat/completions", json=chat("count"), timeout=60)
        assert whole.json()["choices"][0]["message"]["content"] == WORDS


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_while_its_prompt_is_read(stream: bool) -> None:
    lm = scripted_lm({"": "x"}, seconds=0.05, token_budget=16, max_sequences=16)
    app = app_of({"scripted": lm})
    with serving(app) as address:
        body = chat("long " * 1500, stream=stream)
        timeout = httpx.Timeout(60, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            with httpx.stream(
                "POST", f"{address}/v1/chat/completions", json=body, timeout=timeout
            ) as r:
                for line in r.iter_lines():
                    assert not line or '"content":""' in line
        steps = lm.model.steps
        until(idle(app, lm), 3)
        assert lm.model.steps - steps < 10 < 1500 // 16, "the rest of the prompt is not read"


def test_a_waiting_client_that_goes_leaves_its_place() -> None:
    lm = scripted_lm({"count": WORDS}, seconds=0.01)
    app = app_of({"scripted": lm}, max_running=1, max_waiting=1)
    with serving(app) as address:
        url = f"{address}/v1/chat/completions"
        with httpx.stream("POST", url, json=chat("count", stream=True), timeout=60) as first:
            next(first.iter_lines())
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=chat("count"), timeout=0.3)
            until(lambda: app.state.service.gate.waiting == 0)
        until(idle(app, lm))


def test_pings_while_a_prompt_is_read() -> None:
    lm = scripted_lm({"": "x"}, seconds=0.1, token_budget=16, max_sequences=16)
    with serving(app_of({"scripted": lm}, ping_s=0.05)) as address:
        body = chat("long " * 60, stream=True)
        text = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).text
        assert text.count(": ping\n\n") > 2 and text.endswith("data: [DONE]\n\n")


# Load --------------------------------------------------------------------------------------------


def test_ten_times_the_capacity() -> None:
    """Who finds no place is told at once; who has one gets the right answer."""
    lm = greedy_demo()
    app = app_of({"demo": lm}, max_running=4, max_waiting=4)
    prompts = [f"And {i} men" for i in range(80)]
    wanted = [
        lm.generate(p, max_new_tokens=60, temperature=1, seed=i) for i, p in enumerate(prompts)
    ]
    with serving(app) as address:

        async def one(client: httpx.AsyncClient, i: int) -> tuple[int, float, str]:
            body = {"prompt": prompts[i], "max_tokens": 60, "temperature": 1, "seed": i}
            began = time.monotonic()
            response = await client.post(f"{address}/v1/completions", json=body)
            seconds = time.monotonic() - began
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                return 429, seconds, ""
            assert response.status_code == 200, response.text
            return 200, seconds, response.json()["choices"][0]["text"]

        async def all_of_them() -> list[tuple[int, float, str]]:
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                return await asyncio.gather(*(one(client, i) for i in range(80)))

        found = asyncio.run(all_of_them())
        answered = [i for i, (status, *_) in enumerate(found) if status == 200]
        assert 8 <= len(answered) < 80
        assert all(found[i][2] == wanted[i] for i in answered)
        assert app.state.service.metrics.requests["rejected"] == 80 - len(answered)
        until(idle(app, lm))


def test_metrics_say_what_policies_left_out() -> None:
    sparse = greedy_demo(attention="window:64", activation_sparsity="auto")
    sparse.model.config = dataclasses.replace(sparse.model.config, sparsity=ALWAYS)
    models = {"sparse": sparse, "plain": greedy_demo()}
    names = "bitnet_attention_skipped_ratio", "bitnet_columns_skipped_ratio"

    def shown(address: str) -> dict[tuple[str, str], float]:
        text = httpx.get(f"{address}/metrics").text
        found = re.findall(r'^(\w+_skipped_ratio)\{model="(\w+)"\} (\S+)$', text, re.M)
        return {(name, model): float(value) for name, model, value in found}

    with serving(app_of(models)) as address:
        assert shown(address) == {(name, model): 0 for name in names for model in models}
        for model in models:
            body = {"model": model, "prompt": "And God said. " * 40, "max_tokens": 20}
            assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).is_success
        stats, found = sparse.engine.stats(), shown(address)
    assert found.pop((names[0], "sparse")) == pytest.approx(1 - stats.attention_read)
    assert found.pop((names[1], "sparse")) == pytest.approx(stats.inputs_skipped)
    assert 0 < stats.attention_read < 0.95 and 0.5 < stats.inputs_skipped < 1
    assert found == {(name, "plain"): 0 for name in names}


def test_preempted_answers_are_the_same() -> None:
    lm = greedy_demo(kv_cache_mb=2)  # ten blocks
    alone = greedy_demo()
    prompts = [f"And {i} men went up" for i in range(12)]
    wanted = [
        alone.generate(p, max_new_tokens=100, temperature=1, seed=i) for i, p in enumerate(prompts)
    ]
    with serving(app_of({"demo": lm})) as address:

        async def all_of_them() -> list[str]:
            async with httpx.AsyncClient(timeout=60) as client:
                found = await asyncio.gather(
                    *(
                        client.post(
                            f"{address}/v1/completions",
                            json={"prompt": p, "max_tokens": 100, "temperature": 1, "seed": i},
                        )
                        for i, p in enumerate(prompts)
                    )
                )
                return [r.json()["choices"][0]["text"] for r in found]

        assert asyncio.run(all_of_them()) == wanted
        assert lm.engine.stats().preemptions > 0


@pytest.mark.parametrize("stop", [None, "void"])
@pytest.mark.parametrize("stream", [False, True])
def test_timings_and_metrics_say_what_was_drafted(stream: bool, stop: str | None) -> None:
    """Under llama-server's names, and only where something was drafted; n answers together."""
    lm = greedy_demo()
    body = {**chat("And God saw. " * 8), "max_tokens": 60, "n": 2, "stop": stop, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}

    def timings(address: str, body: dict[str, Any]) -> dict[str, float]:
        reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        if not stream:
            return reply.json()["timings"]
        parts = [json.loads(x) for x in re.findall(r"^data: (\{.*\})$", reply.text, re.M)]
        return next(part["timings"] for part in parts if part.get("usage"))

    def shown(address: str) -> dict[tuple[str, str], float]:
        text = httpx.get(f"{address}/metrics").text
        row = r'^bitnet_(drafted_tokens|accepted_drafts)\{model="demo",source="(\w+)"\} (\S+)$'
        return {(name, source): float(n) for name, source, n in re.findall(row, text, re.M)}

    with serving(app_of({"demo": lm}, speculation=4)) as address:
        assert shown(address) == {("drafted_tokens", "ngram"): 0, ("accepted_drafts", "ngram"): 0}
        found = timings(address, body)
        until(lambda: not lm.engine.has_work)
        stats, told = lm.engine.stats().drafts, shown(address)
    assert 0 < found["draft_n_accepted"] <= found["draft_n"]
    if stop is None:
        assert (found["draft_n"], found["draft_n_accepted"]) == stats.ngram
    assert tuple(told.values()) == stats.ngram
    with serving(app_of({"demo": greedy_demo()}, speculation="off")) as address:
        assert {"draft_n", "draft_n_accepted"}.isdisjoint(timings(address, body))


@pytest.mark.parametrize("speculation", [4, "auto"])
def test_guesses_change_no_answer(speculation: Any) -> None:
    lm, alone = greedy_demo(), greedy_demo()
    schema = {"type": "array", "items": {"enum": ["And God saw", "And God said"]}, "minItems": 6}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    bodies: list[dict[str, Any]] = [
        {**chat("And God saw. " * 8), "max_tokens": 60},
        {**chat("And God saw. " * 8), "max_tokens": 60, "temperature": 1, "seed": 3},
        {**chat("And God saw. " * 8), "max_tokens": 200, "response_format": form},
    ]

    def answers(model: LanguageModel, **options: Any) -> list[str]:
        with serving(app_of({"demo": model}, **options)) as address:
            url = f"{address}/v1/chat/completions"
            replies = [httpx.post(url, json=body, timeout=60).json() for body in bodies]
            return [reply["choices"][0]["message"]["content"] for reply in replies]

    assert answers(lm, speculation=speculation) == answers(alone, speculation="off")
    assert speculation == "auto" or lm.engine.stats().accepted_drafts > 0


def test_a_slow_reader_holds_nobody_up() -> None:
    lm = scripted_lm({"count": WORDS})
    app = app_of({"scripted": lm})
    with serving(app) as address:
        url = f"{address}/v1/chat/completions"
        with httpx.stream("POST", url, json=chat("count", stream=True), timeout=60) as slow:
            lines = slow.iter_lines()
            next(lines)
            assert httpx.post(url, json=chat("count"), timeout=60).status_code == 200
            until(lambda: lm.engine.stats().running == 0)
            text = "".join(
                json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                for line in lines
                if line.startswith("data: {")
            )
        assert text == WORDS


# Lengths ------------------------------------------------------------------------------------------


MIB = 1 << 20
LONG: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {**chat(text), "max_tokens": 3},
    "/v1/messages/count_tokens": chat,
    "/api/chat": chat,
    "/api/generate": lambda text: {"prompt": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/api/embed": lambda text: {"input": text, "truncate": False},
    "/tokenize": lambda text: {"content": text},
}


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[Any, str]]:
    app = app_of(max_tokens=3)
    with serving(app) as address:
        yield app, address


@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize("piece", ["<|im_end|>", "a ", "In the beginning", "\U0001f600"])
@pytest.mark.sampled(14)
def test_a_text_that_cannot_fit_costs_nothing(path: str, piece: str, demo: Any) -> None:
    app, address = demo
    body = LONG[path](piece * (12 * MIB // len(json.dumps(piece))))
    before, began = peak_mib(), time.process_time()
    found = httpx.post(f"{address}{path}", json=body, timeout=120)
    assert found.status_code == 400, found.text[:300]
    message = str(found.json())
    assert "expected a" in message and len(message) < 500
    assert time.process_time() - began < 8 and peak_mib() - before < 400
    until(lambda: not (app.state.service.gate.running or app.state.service._reading.running))


def test_truncated_texts_cost_no_more_and_stay_the_same(demo: Any) -> None:
    _, address = demo
    text = "In the beginning " * 40_000
    url, before = f"{address}/api/embed", peak_mib()
    long, short = (
        httpx.post(url, json={"input": t + "God"}, timeout=120).json() for t in (text * 10, text)
    )
    assert long["embeddings"] == short["embeddings"]
    assert long["prompt_eval_count"] == short["prompt_eval_count"] == 1024
    assert peak_mib() - before < 400


def test_few_texts_are_read_at_once(demo: Any, monkeypatch: Any) -> None:
    """On all routes together, and also when nobody waits for it any more."""
    app, address = demo
    at_once, maximum, lock = 0, 0, threading.Lock()
    real = app.state.service.catalog.find("").lm.tokenizer.check_length

    def slow(text: str, length: int) -> None:
        nonlocal at_once, maximum
        with lock:
            at_once += 1
            maximum = max(maximum, at_once)
        time.sleep(0.1)
        real(text, length)
        with lock:
            at_once -= 1

    tokenizer = app.state.service.catalog.find("").lm.tokenizer
    monkeypatch.setattr(tokenizer, "check_length", slow)
    paths = [path for path in LONG for _ in range(3)]

    def one(path: str) -> int:
        timeout = httpx.Timeout(60, read=0.05 if path == "/tokenize" else 60)
        try:
            return httpx.post(
                f"{address}{path}", json=LONG[path]("In"), timeout=timeout
            ).status_code
        except httpx.ReadTimeout:
            return 0

    with concurrent.futures.ThreadPoolExecutor(len(paths)) as pool:
        statuses = list(pool.map(one, paths))
    assert set(statuses) <= {200, 0} and statuses.count(200) >= len(paths) - 3
    assert maximum == 2
    until(lambda: not app.state.service._reading.running)


def test_others_go_on_while_a_long_text_is_read() -> None:
    process, address = start()
    try:
        text = "And God said let there be light. " * 7000  # seconds
        # One client for all looks: to make one takes as long as many looks on a busy machine.
        with concurrent.futures.ThreadPoolExecutor() as pool, httpx.Client() as client:
            asked = pool.submit(
                httpx.post, f"{address}/tokenize", json={"content": text}, timeout=60
            )
            looks = 0
            while not asked.done():
                assert client.get(f"{address}/health").status_code == 200
                looks += 1
            assert asked.result().status_code == 200 and asked.result().json()["count"] > 50_000
            assert looks > 3
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_an_answer_that_ends_at_once_says_what_was_cached() -> None:
    lm = bitnet_ops.load()
    with serving(app_of({"demo": lm})) as address:
        body = {"prompt": "In the beginning God created the heaven. " * 20, "max_tokens": 1}
        for path, more in (
            ("/v1/completions", {}),
            ("/v1/completions", {"stop": ["e", "a", " ", "\n", "i", "o", "t", "s"]}),
        ):
            found = [
                httpx.post(f"{address}{path}", json={**body, **more}, timeout=60).json()["usage"]
                for _ in range(2)
            ]
            assert found[1]["prompt_tokens_details"]["cached_tokens"] > 100, more


# Failures and ends -------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_answers_alone(caplog: Any) -> None:
    lm = scripted_lm({"count": WORDS, "ok": "fine"}, seconds=0.002)
    app = app_of({"scripted": lm})
    with serving(app) as address:
        url = f"{address}/v1/chat/completions"
        with httpx.stream("POST", url, json=chat("count", stream=True), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            lm.model.broken = True
            rest = [line for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "internal"
        assert "broken for a test" not in rest[-1] and "broken for a test" in caplog.text
        assert httpx.post(url, json=chat("ok")).status_code == 500
        lm.model.broken = False
        until(idle(app, lm))
        assert httpx.post(url, json=chat("ok")).json()["choices"][0]["message"]["content"] == "fine"


def test_a_prompt_that_never_fits_the_pool_is_told_so() -> None:
    lm = greedy_demo(kv_cache_mb=2)
    with serving(app_of({"demo": lm})) as address:
        body = {"prompt": "And " * 900, "max_tokens": 4}
        found = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        assert found.status_code == 503 and "KV pool" in found.json()["error"]["message"]


def test_an_answer_has_an_end_in_time() -> None:
    lm = scripted_lm({"count": WORDS}, seconds=0.05)
    app = app_of({"scripted": lm}, request_s=0.3, max_running=1)
    with serving(app) as address:
        url = f"{address}/v1/chat/completions"
        with httpx.stream("POST", url, json=chat("count", stream=True), timeout=60) as first:
            lines = first.iter_lines()
            next(lines)
            late = httpx.post(url, json=chat("count"), timeout=60)  # it waits for a place first
            rest = [line for line in lines if line]
        assert late.status_code == 503 and late.json()["error"]["code"] == "timeout"
        assert "retry-after" in late.headers
        assert json.loads(rest[-1][6:])["error"]["code"] == "timeout"
        until(idle(app, lm))


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """`bitnet-ops serve` as a process of its own, ready, and its address."""
    command = [sys.executable, "-m", "bitnet_ops", "serve", "--port", "0", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = ""
    for line in process.stderr:
        if found := re.search(r"ready after .* (http://\S+)/", line):
            address = found[1]
            break
    assert address
    return process, address


def test_sigterm_lets_answers_end_and_admits_nobody() -> None:
    process, address = start("--drain", "20")
    url = f"{address}/v1/completions"
    with httpx.stream(
        "POST", url, json={"prompt": "In", "max_tokens": 900, "stream": True, "ignore_eos": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        with pytest.raises(httpx.HTTPError):
            if httpx.post(url, json={"prompt": "In"}).status_code == 503:
                raise httpx.HTTPError("refused")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert process.wait(20) == 0
    assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_killed_at_any_moment_nothing_wrong_is_served_afterwards(tmp_path: Any) -> None:
    lm = greedy_demo()
    verses = " And God saw every thing that he had made, and, behold, it was very good." * 12
    bodies = [
        {"prompt": f"Verse {i % 3}:{verses} {i}", "max_tokens": 24, "temperature": 0}
        for i in range(12)
    ]
    wanted = [str(lm.generate(str(body["prompt"]), max_new_tokens=24)) for body in bodies]
    prefixes = tmp_path / "prefixes"
    words = ("--prefix-dir", str(prefixes), "--prefix-dir-mb", "8")

    def ask(address: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(httpx.post(f"{address}/v1/completions", json=body, timeout=60).json())

    for seconds in (0.05, 0.15, 0.3, 0.6):
        process, address = start(*words)
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            asked = [pool.submit(ask, address, body) for body in bodies]
            time.sleep(seconds)
            if seconds == 0.6:  # on a busy machine nothing may have been written before
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline and not any(prefixes.rglob("*.kv")):
                    time.sleep(0.05)
            process.kill()
            process.wait()
            for answer, text in zip(asked, wanted, strict=True):
                if answer.exception() is None:
                    assert answer.result()["choices"][0]["text"] == text
    process, address = start(*words)
    reused = 0
    for body, text in zip(bodies, wanted, strict=True):
        answer = ask(address, body)
        assert answer["choices"][0]["text"] == text
        reused += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if body is bodies[0]:
            assert reused > 100, "of a process before this one"
    process.terminate()
    assert process.wait(20) == 0


def test_a_model_that_cannot_be_opened_ends_the_server(tmp_path: Any) -> None:
    shutil.copy(DEMO_DIR / "model.bin", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # seen while it is loaded, not before
    command = [sys.executable, "-m", "bitnet_ops", "serve", "--port", "0", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    first, *_, last = done.stderr.splitlines()
    assert done.returncode == 1 and first.startswith("loading; then http") and "error: " in last
    assert "Traceback" not in done.stderr


def test_loading_is_503_and_then_ready() -> None:
    begin = threading.Event()

    def load() -> Any:
        from bitnet_ops.server.catalog import Catalog

        begin.wait(20)
        return Catalog({"demo": greedy_demo()}, {})

    from bitnet_ops.server.app import make_app

    async def run() -> None:
        app = make_app(load)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                for path in ("/health", "/v1/models"):
                    response = await client.get(path)
                    assert response.status_code == 503 and "retry-after" in response.headers
                assert (await client.get("/status/data")).json()["state"] == "loading"
                begin.set()
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.01)
                found = await client.post("/v1/completions", json={"prompt": "In", "max_tokens": 1})
                assert found.status_code == 200
                assert (await client.get("/v1/models")).json()["data"][0]["id"] == "demo"

    asyncio.run(run())


def test_a_port_that_is_taken_is_named(capsys: Any) -> None:
    import socket

    from bitnet_ops.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert "another program listens there: choose another --port" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_flat_under_load() -> None:
    lm = greedy_demo()
    with serving(app_of({"demo": lm}, max_running=16)) as address:

        async def burst() -> None:
            async with httpx.AsyncClient(timeout=60) as client:
                await asyncio.gather(
                    *(
                        client.post(
                            f"{address}/v1/completions",
                            json={"prompt": f"And {i}", "max_tokens": 40},
                        )
                        for i in range(100)
                    )
                )

        def mib() -> float:
            with open("/proc/self/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * resource.getpagesize() / 2**20

        asyncio.run(burst())
        asyncio.run(burst())
        before = mib()
        for _ in range(5):
            asyncio.run(burst())
        assert mib() - before < 20, os.getpid()
