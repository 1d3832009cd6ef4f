"""`bench serve`: a server under load, beside its engine alone, and whether answers stay the same.

Two loads. Streams: so many equal requests at the same moment, and the same ones through the engine
in this process, by turns: what the server costs. Arrivals: requests that come at random (Poisson,
open loop: nobody waits for an earlier answer) with a shared system prompt and lengths of a mix; a
sample of them is asked again when nothing else runs. The client speaks HTTP over a bare socket, for
it shares the machine with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch

from bitnet_ops import _runtime, machine
from bitnet_ops.bench.harness import percentile
from bitnet_ops.errors import BitNetError, counted
from bitnet_ops.generate.draft_choice import DEFAULT_SPECULATION, Speculation
from bitnet_ops.generate.engine import Event, Limits, NewToken, SamplingParams
from bitnet_ops.generate.engine_thread import EngineThread
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.untrusted.bounded import interpreter

_ROUNDS = 3  # of streams, by turns with the engine
_ASKED_AGAIN = 8  # arrivals whose answers are compared
_READY_S = 600.0


class BenchServeError(BitNetError, RuntimeError):
    """A server that does not start, or an answer that is none."""

    code = "bench-serve"


@dataclass(frozen=True)
class ServeSettings:
    """What to ask.

    model: for `bitnet-ops serve`. streams: numbers of equal streams. rates: arrivals a second, of
    `requests` each. system_tokens: of the shared prompt. prompt_tokens, new_tokens: the mix, from
    which each request has one. stream_tokens: prompt and answer of a stream. speculation: of the
    server and of the engine beside it. options: more words for the server's command.
    """

    model: str | None = None
    streams: tuple[int, ...] = (1, 4, 8, 16, 32)
    stream_tokens: tuple[int, int] = (64, 64)
    rates: tuple[float, ...] = (1.0,)
    requests: int = 40
    system_tokens: int = 512
    prompt_tokens: tuple[int, ...] = (16, 64, 256)
    new_tokens: tuple[int, ...] = (16, 64, 128)
    seed: int = 0
    speculation: Speculation = DEFAULT_SPECULATION
    options: tuple[str, ...] = ()


@dataclass
class Reply:
    """What came back: when each piece did, in seconds after asking, and the text."""

    status: int
    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def first_s(self) -> float:
        return self.times[0] if self.times else self.seconds


def run(settings: ServeSettings, open_model: Callable[[], LanguageModel], progress: Any) -> Any:
    """The report of `bench serve`. `open_model` opens the same model in this process."""
    lm = open_model()
    progress("starting the server")
    with server(settings) as address:
        texts = Texts(lm, settings)
        streams = []
        for count in settings.streams:
            progress(counted(count, "stream"))
            streams.append(_streams(address, lm, texts, count, settings))
        arrivals = []
        for rate in settings.rates:
            progress(f"{rate:g} request{'s' * (rate != 1)} a second")
            arrivals.append(_arrivals(address, texts, rate, settings))
    return {
        "schema": "bitnet_ops.bench.serve",
        "schema_version": 1,
        "ok": all(row["same"] for row in (*streams, *arrivals)),
        "settings": asdict(settings),
        "machine": {
            "cpu": machine.cpu_model(),
            "isa": _runtime.isa(),
            "threads": torch.get_num_threads(),
            "load": machine.load_average(),
        },
        "model": lm.model.summary,
        "streams": streams,
        "arrivals": arrivals,
    }


@contextlib.contextmanager
def server(settings: ServeSettings) -> Iterator[str]:
    """`bitnet-ops serve` as a process of its own; its address."""
    words = [settings.model] if settings.model is not None else []
    command = [interpreter(), "-m", "bitnet_ops", "serve", *words, "--port", "0"]
    command += ["--speculation", str(settings.speculation)]
    process = subprocess.Popen([*command, *settings.options], stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(_READY_S, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line.strip())
            if found := re.search(r"ready after .*(http://\S+)/", line):
                yield found[1]
                return
        raise BenchServeError(f"bench serve: expected a server that starts, got: {said[-1:]}")
    finally:
        timer.cancel()
        process.terminate()
        process.wait()


class Texts:
    """Prompts of wanted lengths, as token ids: no two of them begin alike behind the shared one."""

    def __init__(self, lm: LanguageModel, settings: ServeSettings) -> None:
        self._draw = random.Random(settings.seed)
        text = " ".join(f"word{i}" for i in range(20_000))
        self._ids = [i for i in lm.encode(text) if i not in lm.stop_ids]
        self.system = self._ids[: settings.system_tokens]

    def prompt(self, tokens: int) -> list[int]:
        return [self._draw.choice(self._ids) for _ in range(tokens)]


# One request -------------------------------------------------------------------------------------


def _body(ids: Sequence[int], tokens: int, seed: int) -> dict[str, Any]:
    return {
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 1,
        "top_k": 40,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(address: str, body: dict[str, Any]) -> Reply:
    """Ask /v1/completions for a stream."""
    place = urlsplit(address)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    began = time.perf_counter()
    writer.write(head.encode() + data)
    received, marks = bytearray(), list[tuple[int, float]]()
    try:
        while part := await reader.read(1 << 16):
            received += part
            marks.append((len(received), time.perf_counter() - began))
    finally:
        writer.close()
    return _read(bytes(received), marks)


def _read(received: bytes, marks: Sequence[tuple[int, float]]) -> Reply:
    """An answer in chunks, and when its pieces came."""
    head, _, rest = received.partition(b"\r\n\r\n")
    reply = Reply(int(head.split()[1]), seconds=marks[-1][1] if marks else 0.0)
    if reply.status != 200:
        reply.text = rest.decode(errors="replace")
        return reply
    begin, mark = len(head) + 4, 0
    for match in re.finditer(rb"data: (\{.*\})\n\n", rest):
        while marks[mark][0] < begin + match.end():
            mark += 1
        value = json.loads(match[1])
        if "error" in value:
            raise BenchServeError(f"bench serve: expected an answer, got {value['error']}")
        if value.get("usage"):
            reply.tokens = value["usage"]["completion_tokens"]
        for choice in value["choices"]:
            if choice["text"]:
                reply.text += choice["text"]
                reply.times.append(marks[mark][1])
    return reply


# Streams -----------------------------------------------------------------------------------------


def _streams(
    address: str, lm: LanguageModel, texts: Texts, count: int, settings: ServeSettings
) -> dict[str, Any]:
    prompt, tokens = settings.stream_tokens
    served, alone, same = [], [], True
    for _ in range(_ROUNDS):  # new prompts each, or the cache would have them
        prompts = [texts.prompt(prompt) for _ in range(count)]
        seconds, wanted = _engine_alone(lm, prompts, tokens, settings.speculation)
        alone.append(seconds)
        began = time.perf_counter()
        replies = asyncio.run(_together(address, prompts, tokens))
        served.append(time.perf_counter() - began)
        _check(replies)
        same &= [r.text for r in replies] == wanted
    return {
        "streams": count,
        "engine_s": median(alone),
        "served_s": median(served),
        "overhead": median(s / a for s, a in zip(served, alone, strict=True)) - 1,
        "tokens_per_s": count * tokens / median(served),
        "same": same,
    }


async def _together(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[Reply]:
    bodies = [_body(ids, tokens, seed) for seed, ids in enumerate(prompts)]
    return list(await asyncio.gather(*(ask(address, body) for body in bodies)))


def _engine_alone(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int, speculation: Speculation
) -> tuple[float, list[str]]:
    """Seconds and texts of the same requests without a server."""
    found: list[list[int]] = [[] for _ in prompts]
    left, done = len(prompts), threading.Event()

    def consumer(index: int) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            nonlocal left
            if isinstance(event, NewToken):
                found[index].append(event.token_id)
            else:
                left -= 1
                if not left:
                    done.set()

        return hear

    with EngineThread(lm.engine):
        began = time.perf_counter()
        for seed, ids in enumerate(prompts):
            params = SamplingParams(temperature=1, top_k=40, seed=seed)
            lm.engine.add(
                ids, params, Limits(tokens), max_drafts=speculation, consumer=consumer(seed)
            )
        done.wait()
        seconds = time.perf_counter() - began
    return seconds, [lm.tokenizer.decode(ids) for ids in found]


def _check(replies: Sequence[Reply]) -> None:
    for reply in replies:
        if reply.status != 200:
            raise BenchServeError(
                f"bench serve: expected answers, got status {reply.status}: {reply.text[:200]}"
            )


# Arrivals ----------------------------------------------------------------------------------------


def _arrivals(address: str, texts: Texts, rate: float, settings: ServeSettings) -> dict[str, Any]:
    draw = random.Random(settings.seed)
    bodies = []
    for seed in range(settings.requests):
        ids = [*texts.system, *texts.prompt(draw.choice(settings.prompt_tokens))]
        bodies.append(_body(ids, draw.choice(settings.new_tokens), seed))
    pauses = [draw.expovariate(rate) for _ in bodies]

    async def load() -> tuple[list[Reply], float]:
        tasks, began = [], time.perf_counter()
        for body, pause in zip(bodies, pauses, strict=True):
            tasks.append(asyncio.ensure_future(ask(address, body)))
            await asyncio.sleep(pause)
        return list(await asyncio.gather(*tasks)), time.perf_counter() - began

    replies, seconds = asyncio.run(load())
    good = [reply for reply in replies if reply.status == 200]
    _check([reply for reply in replies if reply.status not in (200, 429)])
    again = [i for i, r in enumerate(replies) if r.status == 200][:_ASKED_AGAIN]
    alone = [asyncio.run(ask(address, bodies[i])).text for i in again]
    gaps = [b - a for r in good for a, b in zip(r.times, r.times[1:], strict=False)]
    return {
        "rate": rate,
        "requests": len(replies),
        "answered": len(good),
        "turned_away": len(replies) - len(good),
        "seconds": seconds,
        "tokens_per_s": sum(r.tokens for r in good) / seconds,
        "first_ms": _spread([r.first_s for r in good]),
        "gap_ms": _spread(gaps),
        "whole_ms": _spread([r.seconds for r in good]),
        "firsts_s": [r.first_s for r in good],
        "same": alone == [replies[i].text for i in again],
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": 1000 * percentile(seconds, p) for p in (50, 90, 99)}


# What is shown -----------------------------------------------------------------------------------


def lines(result: dict[str, Any]) -> list[str]:
    """The report for people."""
    of = result["machine"]
    found = [
        f"{of['cpu']}, {of['isa']}, {counted(of['threads'], 'thread')}, load {of['load']}",
        result["model"],
    ]
    if result["streams"]:
        found += ["", "streams   engine alone s   served s   overhead   tokens/s   same texts"]
    for row in result["streams"]:
        found.append(
            f"{row['streams']:7d}   {row['engine_s']:14.3f}   {row['served_s']:8.3f}   "
            f"{100 * row['overhead']:7.1f} %   {row['tokens_per_s']:8.1f}   {_yes(row['same'])}"
        )
    if result["arrivals"]:
        found += ["", "rate/s   answered   turned away   tokens/s   first ms p50 p90 p99   "
                  "gap ms p50 p90 p99   same texts"]  # fmt: skip
    for row in result["arrivals"]:
        first, gap = (
            "  ".join(f"{v:.0f}" for v in row[k].values()) for k in ("first_ms", "gap_ms")
        )
        found.append(
            f"{row['rate']:6g}   {row['answered']:8d}   {row['turned_away']:11d}   "
            f"{row['tokens_per_s']:8.1f}   {first:>20}   {gap:>18}   {_yes(row['same'])}"
        )
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def require_plot() -> None:
    """Raises BenchServeError where nothing can be drawn: before a long measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchServeError(
            "bench serve: expected matplotlib for --plot, got none; run: pip install matplotlib"
        )


def plot(result: dict[str, Any], file: Path) -> None:
    """The share of requests whose first token came within a time, a line for each rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row in result["arrivals"]:
        firsts = sorted(row["firsts_s"])
        share = [(i + 1) / len(firsts) for i in range(len(firsts))]
        axes.step(firsts, share, where="post", label=f"{row['rate']:g} requests/s")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    axes.set_title(result["model"].partition(",")[0] + ", " + result["machine"]["cpu"])
    figure.savefig(file)
