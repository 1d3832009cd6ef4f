"""Request: the one description of a sequence that the engine runs, and the events that it causes.

Prompt, sampling, limits, adapter and drafts are checked when the request is made, in the caller's
thread, so that a bad value never reaches a step that others share. The engine changes the rest: the
tokens so far, the blocks, how many tokens have been computed.
"""

from __future__ import annotations

import operator
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitnet_ops.arguments import check_integer
from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.constraint import Constraint, LooksAhead
from bitnet_ops.generate.draft_choice import Speculation, read_speculation
from bitnet_ops.generate.draft_report import NO_DRAFTS, DraftCounts
from bitnet_ops.generate.head_acceptance import HeadAcceptance
from bitnet_ops.generate.prompt import RowRuns, kind_of
from bitnet_ops.generate.sampling import Sampler, SamplingParams
from bitnet_ops.generate.speculation import Acceptance
from bitnet_ops.nn.blocks import Contents, block_key, root_key

# What is asked -----------------------------------------------------------------------------------


class ClosedError(BitNetError, RuntimeError):
    """An engine that was shut down, or the language model that it belongs to."""


@dataclass(frozen=True)
class Limits:
    """When to end: after max_new_tokens (0 or more), or at one of stop_ids."""

    max_new_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        check_integer("engine: expected max_new_tokens", self.max_new_tokens, 0)
        try:
            if isinstance(self.stop_ids, str | bytes):
                raise TypeError
            object.__setattr__(self, "stop_ids", frozenset(map(operator.index, self.stop_ids)))
        except TypeError:
            raise TypeError(
                f"engine: expected stop_ids as token ids, got {kind_of(self.stop_ids)}"
            ) from None


# What is returned --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewToken:
    """The request has one more token; stop ids are left out.

    `logprob` and `top_logprobs` ((token, logarithm), the most probable first) are there if the
    request asks for them. `reused_tokens`: of the prompt, that the prefix cache spared. `drafts`:
    of the request so far; events are equal whatever was drafted.
    """

    request_id: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    reused_tokens: int = 0
    drafts: DraftCounts = field(default=NO_DRAFTS, compare=False)


@dataclass(slots=True)
class ShareRead:
    """How much has been read, of how much: pages by attention, inputs by products."""

    read: int = 0
    whole: int = 0

    def add(self, read: int, whole: int) -> None:
        self.read += read
        self.whole += whole

    @property
    def share(self) -> float:
        return self.read / self.whole if self.whole else 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    """No more tokens come. `reason`: "stop" (with the stop id), "length", "context" or "abort".

    reused_tokens: of the prompt, that the prefix cache spared. attention_read: share of the pages
    that its tokens have read, where attention has a policy. drafts: how many were verified for it,
    and were right; events are equal whatever was drafted.
    """

    request_id: int
    reason: str
    stop_reason: int | None = None
    reused_tokens: int = 0
    attention_read: float = 1.0
    drafts: DraftCounts = field(default=NO_DRAFTS, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with `error`; the tokens that it had before are good."""

    request_id: int
    error: BaseException


Event = NewToken | Finished | Failed
# Called with every event of a request by the thread that steps; it must not step itself.
Consumer = Callable[[Event], Any]


# The request -------------------------------------------------------------------------------------


class Request:
    """One sequence.

    Args:
        id: numbers count up, so the youngest request has the greatest.
        prompt: its token ids.
        runs: which of them stand for rows, such as those of an image; None: none.
        params: how tokens are chosen.
        limits: when to end.
        adapter: the name of its LoRA adapter, if any.
        max_drafts: the most tokens to draft in a step, 0 for none, of either source; "auto": as
            many as make this request faster on this machine; "ngram", "head": the same of this
            source alone; "off", None: none. The attribute is the most, a number.
        consumer: what gets the events, if not whoever steps.
        constraint: says which tokens may come next; of this request alone.
        keep_prefix: whether what it computes is worth keeping for others; False: of a request in
            the background, such as for a title.
    Attributes, besides these:
        ids: all tokens, prompt and output.
        content: what keys of the prefix cache cover: `ids`, and in the place of rows numbers that
            stand for what they hold, all below 0.
        prompt_tokens: how many of them the prompt is.
        sampler: chooses the next token.
        drafts_from_text, drafts_from_head: whether n-grams of the text may draft, and whether the
            model's draft head may, if there is one.
        acceptance: says how many drafts are worth it, where that is wanted.
        head_acceptance: how often drafts of the model's head are right, once some were made.
        drafts: how many were verified, and were right.
        epoch: of the weights that it began with.
        root: the key before its first block.
        computed: how many of `ids`, from the first, have keys and values in the pool. The newest
            token never has: it is the input of the next step.
        blocks: its block table; empty while it waits.
        gone: the range [begin, end) of its blocks that nothing reads any more: they belong to
            others, and `blocks` has some number in their place.
        attention: how many pages it has read, where attention has a policy.
        reused_tokens: how many the prefix cache spared when it was first admitted.
        arrived_ns: when it was made, by the clock of files.
        saved: how many of its blocks the prefix cache on disk has.
        slot: of a model with recurrent layers, where its state lies; -1 while it waits.
        replays: how many of the last computed tokens, drafts that were right, the state in the slot
            does not know yet.
        stops: behind how many tokens a checkpoint of its state is wanted next, ascending.
    """

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        *,
        adapter: str | None = None,
        max_drafts: Speculation = 0,
        consumer: Consumer | None = None,
        constraint: Constraint | None = None,
        keep_prefix: bool = True,
        runs: RowRuns | None = None,
    ) -> None:
        params = SamplingParams() if params is None else params
        limits = Limits() if limits is None else limits
        _check_type("params", params, SamplingParams)
        _check_type("limits", limits, Limits)
        _check_type("keep_prefix", keep_prefix, bool)
        choice = read_speculation(max_drafts, "engine: expected max_drafts")
        self.id, self.limits, self.adapter, self.consumer = id, limits, adapter, consumer
        self.ids, self.prompt_tokens = array("q", prompt), len(prompt)
        self.runs = runs
        self.content = self.ids if runs is None else runs.content(prompt)
        self.sampler = Sampler(params, prompt, constraint)
        self._looks_ahead = constraint if isinstance(constraint, LooksAhead) else None
        self.max_drafts = choice.maximum
        self.drafts_from_text = "ngram" in choice.sources
        self.drafts_from_head = "head" in choice.sources
        self.acceptance = Acceptance() if choice.adaptive else None
        self.head_acceptance: HeadAcceptance | None = None
        self.drafts = NO_DRAFTS
        self.epoch = self.computed = self.saved = 0
        self.keep_prefix, self.arrived_ns = keep_prefix, time.time_ns()
        self.blocks: list[int] = []
        self.gone = 0, 0
        self.attention = ShareRead()
        self.reused_tokens: int | None = None
        self.slot, self.replays = -1, 0
        self.stops: list[int] = []
        self.set_root(root_key(adapter))

    def __repr__(self) -> str:
        return (
            f"Request({self.id}: {self.prompt_tokens} prompt tokens, {self.output_tokens} new, "
            f"{self.computed} computed, {len(self.blocks)} blocks)"
        )

    @property
    def own_blocks(self) -> list[int]:
        """Those that it holds, in their order."""
        return without(self.blocks, self.gone)

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens still to be computed; 1 while it decodes, more while its prompt is prefilled."""
        return len(self.ids) - self.computed

    def set_root(self, root: bytes) -> None:
        """Have other keys from now on, as where the weights are other ones."""
        self.root, self._keys = root, list[bytes]()

    def key(self, index: int, block_size: int) -> bytes:
        """The key of its block `index`, all of whose tokens are known; -1: what is before all."""
        if index < 0:
            return self.root
        while len(self._keys) <= index:
            at = len(self._keys) * block_size
            parent = self.key(len(self._keys) - 1, block_size)
            self._keys.append(block_key(parent, self.content[at : at + block_size]))
        return self._keys[index]

    def contents(self, index: int, block_size: int) -> Contents:
        """What of block `index` has been computed, at least one token."""
        at = index * block_size
        ids = self.content[at : min(at + block_size, self.computed)]
        parent = self.key(index - 1, block_size)
        if len(ids) == block_size:
            return Contents(self.key(index, block_size), parent, ids)
        return Contents.of(parent, ids)

    def draft_limit(self, max_positions: int) -> int:
        """How many drafts can be of use before a limit ends it."""
        tokens = self.limits.max_new_tokens - self.output_tokens - 1
        return max(0, min(self.max_drafts, tokens, max_positions - len(self.ids)))

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first, its constraint may let come; it stays as it is."""
        if self._looks_ahead is None or not drafts:
            return len(drafts)
        return self._looks_ahead.allowed_prefix(drafts)

    def accept(self, token: int, max_positions: int) -> Finished | None:
        """Append a token, unless it is a stop id; why the request ends with it, or None."""
        if token in self.limits.stop_ids:
            return self._finished("stop", token)
        self.ids.append(token)
        if self.content is not self.ids:
            self.content.append(token)
        return self.end(max_positions)

    def end(self, max_positions: int) -> Finished | None:
        """Which limit it has reached: of its own tokens, or of the model's positions."""
        if self.output_tokens >= self.limits.max_new_tokens:
            return self._finished("length")
        if self.output_tokens and len(self.ids) > max_positions:
            return self._finished("context")
        return None

    def _finished(self, reason: str, stop: int | None = None) -> Finished:
        return Finished(
            self.id, reason, stop, self.reused_tokens or 0, self.attention.share, self.drafts
        )


def without(blocks: list[int], gone: tuple[int, int]) -> list[int]:
    """`blocks` but for the range `gone`."""
    begin, end = gone
    return blocks[:begin] + blocks[end:] if begin < end else blocks


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"engine: expected {name} as {kind.__name__}, got {kind_of(value)}")
