"""Request: one sequence on its way through the engine, and the events that tell of it.

It must not know tensors, nor how tokens are chosen: its sampler is passed on as it is.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bitnet_ops.generate.speculation import AUTO, MOST_DRAFTS, Acceptance
from bitnet_ops.nn.blocks import Contents, block_key, root_key

if TYPE_CHECKING:
    from bitnet_ops.generate.generation import Limits


@dataclass(frozen=True)
class NewToken:
    """The request has one more token; stop ids are left out.

    `logprob` and `top_logprobs` ((token, logarithm), the most probable first) are there if the
    request asks for them.
    """

    request_id: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """No more tokens come. `reason`: "stop" (with the stop id), "length", "context" or "abort"."""

    request_id: int
    reason: str
    stop_reason: int | None = None


@dataclass(frozen=True)
class Failed:
    """The request ended with `error`, alone; the tokens that it had before are good."""

    request_id: int
    error: Exception


Event = NewToken | Finished | Failed


class Inbox(deque[Event]):
    """The events of some requests, for whoever waits for them.

    `seconds`: of the steps that these requests took part in, whoever called them.
    `reused_tokens`: of their prompts, that the prefix cache spared.
    """

    __slots__ = ("reused_tokens", "seconds")

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.reused_tokens = 0.0, 0


class Request:
    """One sequence.

    Attributes:
        id: numbers count up, so the youngest request has the greatest.
        ids: all tokens, prompt and output.
        prompt_tokens: how many of them the prompt is.
        sampler: chooses its tokens; opaque.
        limits: when to end.
        adapter: the name of its LoRA adapter, if any.
        inbox: where its events go, if not to whoever steps.
        patient: nobody waits for its single tokens, so that others' prompts need not be held short.
        epoch: of the weights that it began with.
        max_drafts: the most tokens to draft in a step; 0 for none.
        acceptance: says how many of these are worth it, if that is wanted.
        computed: how many of `ids`, from the first, have keys and values in the pool. The newest
            token never has: it is the input of the next step.
        blocks: its block table; empty while it waits.
        reused_tokens: how many the prefix cache spared when it was first admitted.
        preemptions: how often it has lost its blocks and been computed again.
        ended: nothing more is wanted of it.
    """

    def __init__(
        self,
        id: int,
        prompt_ids: Sequence[int],
        sampler: Any,
        limits: Limits,
        *,
        adapter: str | None = None,
        max_drafts: int | Literal["auto"] = 0,
        inbox: Inbox | None = None,
        patient: bool = False,
        epoch: int = 0,
    ) -> None:
        self.id, self.sampler, self.limits = id, sampler, limits
        self.ids, self.prompt_tokens = array("q", prompt_ids), len(prompt_ids)
        self.adapter, self.inbox = adapter, inbox
        self.max_drafts = MOST_DRAFTS if max_drafts == AUTO else max_drafts
        self.acceptance = Acceptance() if max_drafts == AUTO else None
        self.patient, self.epoch = patient, epoch
        self.computed = 0
        self.blocks: list[int] = []
        self.reused_tokens: int | None = None
        self.preemptions = 0
        self.ended = False
        self._keys: list[bytes] = []
        self._root = root_key(adapter, epoch)

    def __repr__(self) -> str:
        return (
            f"Request({self.id}: {self.prompt_tokens} prompt tokens, {self.output_tokens} new, "
            f"{self.computed} computed, {len(self.blocks)} blocks)"
        )

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_tokens :].tolist()

    @property
    def remaining(self) -> int:
        """Tokens still to be computed; 1 while it decodes, more while its prompt is prefilled."""
        return len(self.ids) - self.computed

    def key(self, index: int, block_size: int) -> bytes:
        """The key of its block `index`, all of whose tokens are known; -1: what is before all."""
        while len(self._keys) <= index:
            at = len(self._keys) * block_size
            parent = self.key(len(self._keys) - 1, block_size)
            self._keys.append(block_key(parent, self.ids[at : at + block_size]))
        return self._keys[index] if index >= 0 else self._root

    def contents(self, index: int, block_size: int) -> Contents:
        """What of block `index` has been computed, at least one token."""
        at = index * block_size
        ids = self.ids[at : min(at + block_size, self.computed)]
        parent = self.key(index - 1, block_size)
        if len(ids) == block_size:
            return Contents(self.key(index, block_size), parent, ids)
        return Contents.of(parent, ids)

    def most_drafts(self, max_positions: int) -> int:
        """How many drafts can be of use before a limit ends it."""
        tokens = self.limits.max_new_tokens - self.output_tokens - 1
        return max(0, min(self.max_drafts, tokens, max_positions - len(self.ids)))

    def accept(self, token: int, max_positions: int) -> Finished | None:
        """Append a token, unless it is a stop id; why the request ends with it, or None."""
        if token in self.limits.stop_ids:
            return Finished(self.id, "stop", token)
        self.ids.append(token)
        return self.end(max_positions)

    def end(self, max_positions: int) -> Finished | None:
        """Which limit it has reached: of its own tokens, or of the model's positions."""
        if self.output_tokens >= self.limits.max_new_tokens:
            return Finished(self.id, "length")
        if self.output_tokens and len(self.ids) > max_positions:
            return Finished(self.id, "context")
        return None

    def fork(self, id: int, sampler: Any, limits: Limits, inbox: Inbox | None = None) -> Request:
        """Another request that goes on from the same tokens; its blocks are the scheduler's."""
        twin = Request(
            id,
            self.ids,
            sampler,
            limits,
            adapter=self.adapter,
            max_drafts=self.max_drafts if self.acceptance is None else AUTO,
            inbox=inbox,
            patient=self.patient,
            epoch=self.epoch,
        )
        twin.prompt_tokens = self.prompt_tokens
        twin._keys = list(self._keys)
        return twin
