"""Service: asks in, deltas out, over the engines of all models and the one thread that owns them.

What runs where: dialects, the gate and the splitting of text run in the event loop; prompts are
encoded, and their pictures decoded, in worker threads; towers, which make rows of pictures, have a
thread of their own, so that texts do not wait for them; the engines' thread computes. Its events
come back through a `Postbox`, which rings the event loop once for a step, however many answers have
a token then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from bitnet_ops.generate.draft_choice import DEFAULT_SPECULATION, Speculation
from bitnet_ops.generate.draft_report import DraftCounts
from bitnet_ops.generate.engine import Engine, Event, Failed, Finished, Limits, NewToken
from bitnet_ops.generate.engine_thread import EngineThread
from bitnet_ops.generate.grammar import ConstraintError
from bitnet_ops.generate.pictures import Picture
from bitnet_ops.generate.prompt import PromptError, PromptRows
from bitnet_ops.generate.request import Consumer
from bitnet_ops.generate.run import TokenLogprobs
from bitnet_ops.generate.sampling import SamplingError, SamplingParams
from bitnet_ops.generate.scoring import embed_steps, prompt_logprobs_steps
from bitnet_ops.generate.tokenizer import TokenizerError
from bitnet_ops.nn.blocks import PoolFullError
from bitnet_ops.server.catalog import Catalog, Served
from bitnet_ops.server.exchange import Ask, AskError, CallArguments, Delta, Reasoning, Text
from bitnet_ops.server.gate import Client, Gate, Ticket
from bitnet_ops.server.metrics import Metrics
from bitnet_ops.server.prompt import Prompt, encode_within, make_prompt, picture_error
from bitnet_ops.vision.errors import ImageError

T = TypeVar("T")
_READERS = 2  # prompts that are encoded at once: each may take some hundred MB for a moment
_MAX_COUNTED = 1 << 18  # tokens that are counted or returned, of a model whose context is shorter
_MAX_EMBEDDED = 1 << 20  # tokens of all texts of a request
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceOptions:
    """Limits.

    max_running: answers that are computed at once. max_waiting: that may wait beside them.
    max_per_client: of one client, both together. max_tokens: of an answer. max_answers: of a
    request (n). request_s: how long a request may take, its waiting included. ping_s: after so long
    without news a client gets a sign of life. speculation: drafts, as of LanguageModel.generate.
    """

    max_running: int = 32
    max_waiting: int = 128
    max_per_client: int | None = None
    max_tokens: int | None = None
    max_answers: int = 16
    request_s: float = 3600.0
    ping_s: float = 5.0
    speculation: Speculation = DEFAULT_SPECULATION


class Service:
    """Answers asks. For one event loop.

    Attributes: `state`, "loading", "ready" or "draining"; `catalog`, once it is ready; `gate`,
    `metrics`.
    """

    def __init__(self, options: ServiceOptions | None = None) -> None:
        self.options = options or ServiceOptions()
        self.state, self.failure = "loading", ""
        self.gate = Gate(
            self.options.max_running, self.options.max_waiting, self.options.max_per_client
        )
        self.gate.closed = "the model is being loaded"
        self._reading = Gate(_READERS, self.gate.max_running + self.gate.max_waiting)
        self._readers = ThreadPoolExecutor(_READERS, "bitnet-ops reader")
        self._tower_gate = Gate(1, self.gate.max_running)
        self._tower_thread = ThreadPoolExecutor(1, "bitnet-ops tower")  # it takes every core
        self.metrics = Metrics()
        self._catalog: Catalog | None = None
        self._thread: EngineThread | None = None
        self._postbox: Postbox | None = None

    def open(self, catalog: Catalog) -> None:
        """Begin to answer; in the event loop."""
        self._catalog = catalog
        self._postbox = Postbox(asyncio.get_running_loop())
        self._thread = EngineThread(*(lm.engine for lm in catalog.models))
        for one in catalog:
            if one.adapter is None:
                self.metrics.show_skipped(one.name, one.lm.engine.stats)
                has_head = getattr(one.lm.model, "draft_head", None) is not None
                self.metrics.show_drafts(one.name, one.lm.engine.stats, head=has_head)
                if one.lm.images is not None:
                    self.metrics.show_pictures(one.name, one.lm.images)
        self.gate.closed, self.state = "", "ready"

    @property
    def catalog(self) -> Catalog:
        if self._catalog is None:
            raise AskError(f"server: {self.gate.closed}", status=503, code="unavailable")
        return self._catalog

    def refuse(self) -> None:
        """Admit nobody any more; those who are in go on."""
        self.state, self.gate.closed = "draining", "the server is shutting down"

    def close(self) -> None:
        """End the engines' thread, and write what the prefix cache on disk has not yet."""
        for pool in (self._readers, self._tower_thread):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.close()
            for lm in self.catalog.models:
                lm.engine.close()

    # Answers -------------------------------------------------------------------------------------

    async def answer(self, ask: Ask, client: Client) -> Answer:
        """The answer to `ask`, not begun; raises AskError for what cannot be answered.

        Its place is given back when it ends, is closed, or the client's request is over.
        """
        served, limit = self.catalog.find(ask.model), self.options.request_s
        self._check(served, ask)
        ticket = self.gate.enter(client.name, ask.n, background=ask.background)
        client.hold(ticket.leave)
        deadline = time.monotonic() + limit
        try:
            try:
                reading = self.read(client, lambda: make_prompt(served, ask))
                prompt = await asyncio.wait_for(reading, limit)
            except asyncio.TimeoutError:
                raise _timeout(limit) from None
            maximum = served.context_length - len(prompt.ids) + (ask.max_tokens == 0)
            for bound in (ask.max_tokens, self.options.max_tokens):
                maximum = maximum if bound is None else min(maximum, bound)
            params = _params(served, ask)
            params.check_vocabulary(served.lm.config.vocab_size)
        except SamplingError as error:
            ticket.leave()
            raise AskError(str(error)) from None
        except BaseException:
            ticket.leave()
            raise
        answer = Answer(self, served, ask, prompt, params, maximum, ticket, deadline)
        client.hold(answer.close)
        return answer

    def _check(self, served: Served, ask: Ask) -> None:
        if served.lm.config.embedding_only:
            raise AskError(
                f"server: expected a model with an output head, got {served.name}, an embedding "
                "model; ask /v1/embeddings",
                field="model",
            )
        maximum = min(self.options.max_answers, self.gate.max_running)
        if not 1 <= ask.n <= maximum:
            raise AskError(f"server: expected n from 1 to {maximum}, got {ask.n}", field="n")

    async def run(self, client: Client, steps: Callable[[], Generator[None, None, T]]) -> T:
        """The result of work beside the engines' steps; it takes the place of an answer."""
        ticket = self.gate.enter(client.name)
        try:
            await ticket.admitted.wait()
            return await self._beside(steps)
        finally:
            ticket.leave()

    async def _beside(self, steps: Callable[[], Generator[None, None, T]]) -> T:
        assert self._thread is not None
        try:
            return await asyncio.wrap_future(self._thread.run(steps))
        except ValueError as error:  # of the caller's: texts that are empty or too long
            raise AskError(str(error)) from None

    async def read(self, client: Client, work: Callable[[], T]) -> T:
        """The result of `work`, which encodes texts, in one of a few threads."""
        return await self._in(self._readers, self._reading, client.name, work)

    async def rows_of(
        self, served: Served, pictures: Sequence[Picture | PromptRows], name: str
    ) -> list[PromptRows]:
        """What stands in a prompt for pictures. Clients take turns, a picture each."""
        images, found = served.lm.images, list[PromptRows]()
        assert images is not None
        for one in pictures:
            if isinstance(one, PromptRows):
                found.append(one)
                continue
            try:
                work = functools.partial(images.rows, one)
                found.append(await self._in(self._tower_thread, self._tower_gate, name, work))
            except ImageError as error:
                raise picture_error(error) from None
        return found

    async def _in(
        self, pool: ThreadPoolExecutor, gate: Gate, name: str, work: Callable[[], T]
    ) -> T:
        """The result of `work` in a thread of `pool`, at a place of `gate`, for the client `name`.

        Its place is free when it has ended, not when nobody waits for it any more.
        """
        loop, ticket = asyncio.get_running_loop(), gate.enter(name)
        try:
            await ticket.admitted.wait()
            future = pool.submit(work)
        except BaseException:
            ticket.leave()
            raise

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ticket.leave)

        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    async def count(self, model: str, client: Client, ids: Callable[[Served, int], T]) -> T:
        """What `ids` gives for the model and the most tokens that it may count."""
        served = self.catalog.find(model)
        maximum = max(served.context_length, _MAX_COUNTED)
        try:
            return await self.read(client, lambda: ids(served, maximum))
        except TokenizerError as error:
            raise AskError(str(error)) from None
        except ImageError as error:
            raise picture_error(error) from None

    async def embed(
        self,
        model: str,
        texts: Sequence[str | Sequence[int]],
        dimensions: int | None,
        client: Client,
        *,
        truncate: bool = False,
    ) -> tuple[Tensor, int]:
        """Vectors of texts [n, dimensions], and of how many tokens they are; truncate: cut texts
        that are too long before their last token, for embedding models read from a text's end."""
        served = self.catalog.find(model)
        ids = await self.read(client, lambda: _text_ids(served, texts, truncate))
        vectors = await self.run(client, lambda: embed_steps(served.lm.model, ids, dimensions))
        return vectors, sum(map(len, ids))

    async def prompt_logprobs(self, answer: Answer, top: int) -> list[TokenLogprobs]:
        """Of each token of an answer's prompt from the second one on; at the answer's place."""
        served, ids = answer.served, answer.ids
        kv_dtype = served.lm.engine.kv_dtype
        await answer.admitted()
        return await self._beside(
            lambda: prompt_logprobs_steps(served.lm.model, ids, top, kv_dtype, served.adapter)
        )


def _text_ids(
    served: Served, texts: Sequence[str | Sequence[int]], truncate: bool
) -> list[list[int]]:
    """The ids of texts to be embedded."""
    maximum, found, left = served.context_length, list[list[int]](), _MAX_EMBEDDED
    for text in texts:
        try:
            ids = encode_within(served.lm.tokenizer, text, maximum, truncate)
        except TokenizerError as error:
            raise AskError(str(error), field="input") from None
        left -= len(ids)
        if left < 0:
            raise AskError(
                f"server: expected texts of at most {_MAX_EMBEDDED:,} tokens together, got more",
                field="input",
            )
        found.append(ids)
    return found


def _left(deadline: float, maximum: float) -> float:
    """Seconds until the deadline; raises AskError behind it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise _timeout(maximum)
    return left


def _timeout(maximum: float) -> AskError:
    return AskError(
        f"server: expected an answer within {maximum:g} s, got none; ask for fewer tokens",
        status=503,
        code="timeout",
    )


def _params(served: Served, ask: Ask) -> SamplingParams:
    return SamplingParams(**{**served.lm.generation.sampling, **ask.sampling})


class Postbox:
    """Carries events of the engines' thread into an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mail: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._rung = False

    def to(self, deliver: Callable[[Event], None]) -> Consumer:
        """What an engine calls so that `deliver` gets the event in the event loop."""

        def put(event: Event) -> None:
            self._mail.append((deliver, event))
            if not self._rung:
                self._rung = True
                self._loop.call_soon_threadsafe(self._deliver)

        return put

    def _deliver(self) -> None:
        self._rung = False  # before the mail is read: what comes from now on rings again
        while self._mail:
            deliver, event = self._mail.popleft()
            deliver(event)


class Answer:
    """The answers to one ask, as deltas.

    Attributes: `served`; `ids`, the prompt's; `created`, in seconds since 1970; `cached_tokens`,
    once the first delta is there; `timing`.
    """

    def __init__(
        self,
        service: Service,
        served: Served,
        ask: Ask,
        prompt: Prompt,
        params: SamplingParams,
        max_tokens: int,
        ticket: Ticket,
        deadline: float,
    ) -> None:
        self.served, self.ask, self.ids, self._prompt = served, ask, prompt.ids, prompt
        self.created, self.cached_tokens = int(time.time()), 0
        self.timing = AnswerTiming(time.perf_counter())
        self._service, self._ticket = service, ticket
        self._params, self._max_tokens = params, max_tokens
        self._deadline = deadline
        self._choices: dict[int, Choice] = {}  # those that have not ended, by the engine's ids
        self._computed: set[int] = set()  # those that the engine has not ended
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._closed = self._failed = self._read = False

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Deltas as they come, those of one moment together; an empty list where there is nothing
        new for `ping_s` seconds.

        Raises AskError where the engine fails, or the time is over. Whoever stops early has to
        close it.
        """
        admitted = self._ticket.admitted
        try:
            while not admitted.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(admitted.wait(), self._until_ping())
                    break
                yield []
            whole: Sequence[int | PromptRows] = self.ids
            if self._prompt.pictures:
                computing = asyncio.ensure_future(self._whole())
                try:
                    while not (await asyncio.wait({computing}, timeout=self._until_ping()))[0]:
                        yield []
                    whole = computing.result()
                finally:
                    computing.cancel()
            self._submit(whole)
            while self._choices:
                if not await self._some(self._until_ping()):
                    yield []
                elif deltas := self._take():
                    yield deltas
            self._service.metrics.ended("ok")
        except AskError:
            self._failed = True
            raise
        finally:
            self.close()

    def _until_ping(self) -> float:
        """Seconds until the next sign of life; raises AskError where the time is over."""
        options = self._service.options
        return min(options.ping_s, _left(self._deadline, options.request_s))

    async def _whole(self) -> Sequence[int | PromptRows]:
        """The prompt as the engine takes it, with the rows of its pictures."""
        prompt, images = self._prompt, self.served.lm.images
        assert images is not None
        rows = await self._service.rows_of(self.served, prompt.pictures, self._ticket.client)
        return images.joined(prompt.short, rows)

    async def admitted(self) -> None:
        """Wait for its turn."""
        await self._ticket.admitted.wait()

    async def whole(self) -> list[list[Delta]]:
        """All deltas, by answer."""
        found: list[list[Delta]] = [[] for _ in range(self.ask.n)]
        async for deltas in self.batches():
            for delta in deltas:
                found[delta.index].append(delta)
        return found

    def close(self) -> None:
        """End it where it is. It may be called any number of times."""
        if self._closed:
            return
        self._closed = True
        for id in self._choices:
            self._engine.abort(id)
        if self._failed:
            self._service.metrics.ended("error")
        elif self._choices or not self._ticket.admitted.is_set():
            self._service.metrics.ended("cancelled")
        self._choices.clear()
        self._ticket.leave()

    @property
    def _engine(self) -> Engine:
        return self.served.lm.engine

    def _submit(self, prompt: Sequence[int | PromptRows]) -> None:
        postbox = self._service._postbox
        assert postbox is not None
        lm, ask = self.served.lm, self.ask
        stop_ids = frozenset[int]() if ask.ignore_eos else lm.stop_ids
        limits, consumer = Limits(self._max_tokens, stop_ids), postbox.to(self._deliver)
        for index in range(ask.n):
            params = self._params
            if index and params.seed is not None:  # else all answers would be the same
                params = _with_seed(params, index)
            try:
                id = self._engine.add(
                    prompt,
                    params,
                    limits,
                    adapter=self.served.adapter,
                    max_drafts=self._service.options.speculation,
                    constraint=self._prompt.shape.constraint(self._prompt.text),
                    keep_prefix=not ask.background,
                    consumer=consumer,
                )
            except (ValueError, TypeError) as error:
                raise AskError(str(error)) from None
            self._choices[id] = Choice(index, self._prompt)
            self._computed.add(id)

    # Events --------------------------------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        self._events.append(event)
        if not isinstance(event, NewToken):
            self._computed.discard(event.request_id)
            if not self._computed:  # whoever reads slowly holds no place
                self._ticket.leave()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    async def _some(self, seconds: float) -> bool:
        """Wait until there is an event, at most so long; whether there is one."""
        if self._events:
            return True
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()

        def give_up() -> None:
            if not waiter.done():
                waiter.set_result(False)

        timer = loop.call_later(seconds, give_up)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _take(self) -> list[Delta]:
        deltas: list[Delta] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Finished):
                self._cached(event.reused_tokens)
            choice = self._choices.get(event.request_id)
            if choice is None:  # it has ended by a stop text
                continue
            if not isinstance(event, Failed):
                self.timing.drafts[event.request_id] = event.drafts
            if isinstance(event, NewToken):
                self._first(event)
                self.timing.tokens += 1
                self._service.metrics.generated += 1
                choice.add(event, deltas)
                if choice.ended:
                    self._engine.abort(event.request_id)
            elif isinstance(event, Finished):
                choice.finish(event, deltas)
            else:
                raise _failure(event)
            if choice.ended:
                self.timing.completion_tokens += choice.tokens
                del self._choices[event.request_id]
        self.timing.last_s = time.perf_counter()
        return _merged(deltas)

    def _first(self, event: NewToken) -> None:
        if self.timing.first_s:
            return
        self.timing.first_s = time.perf_counter()
        self._cached(event.reused_tokens)

    def _cached(self, tokens: int) -> None:
        """So many of the prompt's tokens were; what is told first counts."""
        if self._read:
            return
        self._read, self.cached_tokens = True, tokens
        if self._max_tokens:  # else nothing was computed
            seconds = (self.timing.first_s or time.perf_counter()) - self.timing.asked_s
            self._service.metrics.first_token(seconds, len(self.ids), tokens)


@dataclass
class AnswerTiming:
    """When an answer was asked for, had its first token and its newest one; by perf_counter."""

    asked_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0  # that have come so far, in all answers
    completion_tokens: int = 0  # of answers that have ended, with what ended them
    drafts: dict[int, DraftCounts] = field(default_factory=dict)  # of each answer so far

    @property
    def drafted(self) -> int:
        """Tokens that were drafted, for all answers."""
        return sum(one.drafted for one in self.drafts.values())

    @property
    def accepted_drafts(self) -> int:
        """How many of them were right."""
        return sum(one.accepted for one in self.drafts.values())

    @property
    def prompt_ms(self) -> float:
        return 1000 * max(0.0, self.first_s - self.asked_s)

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first one."""
        seconds = self.last_s - self.first_s
        return (self.tokens - 1) / seconds if seconds > 0 and self.tokens > 1 else 0.0


class Choice:
    """One of the answers: its tokens become deltas."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index, self.ended, self.tokens = index, False, 0
        self._decoder = prompt.shape.decoder()
        self._text = prompt.shape.text(index, prompt.text)

    def add(self, event: NewToken, deltas: list[Delta]) -> None:
        self.tokens += 1
        logprobs: tuple[TokenLogprobs, ...] = ()
        if event.logprob is not None:
            logprobs = (TokenLogprobs(event.token_id, event.logprob, event.top_logprobs),)
        deltas += self._text.push(self._decoder.push(event.token_id), logprobs)
        if self._text.stopped is not None:
            self._end("stop", deltas)

    def finish(self, event: Finished, deltas: list[Delta]) -> None:
        if rest := self._decoder.finish():
            deltas += self._text.push(rest)
        self.tokens += event.reason == "stop"
        self._end(event.reason, deltas)

    def _end(self, reason: str, deltas: list[Delta]) -> None:
        self.ended = True
        deltas += self._text.end(reason, self.tokens)


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Pieces of the same text as one: a reader that is slow gets them together."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(delta, Text | Reasoning) and type(last) is type(delta):
            if last.index == delta.index:
                logprobs = (*last.logprobs, *delta.logprobs)
                found[-1] = replace(delta, text=last.text + delta.text, logprobs=logprobs)
                continue
        if isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            if (last.index, last.call) == (delta.index, delta.call):
                found[-1] = replace(delta, text=last.text + delta.text)
                continue
        found.append(delta)
    return found


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    assert params.seed is not None
    return replace(params, seed=(params.seed + index) % 2**63)


def _failure(event: Failed) -> AskError:
    error = event.error
    if isinstance(error, PoolFullError):
        return AskError(str(error), status=503, code="unavailable")
    if isinstance(error, PromptError | ConstraintError):
        return AskError(str(error))
    _LOG.error("an answer failed", exc_info=error)
    return AskError("server: the model failed; see the server's log", status=500, code="internal")
