"""Scheduler: which tokens of which requests the next step computes, and in which blocks.

Every running request that decodes gets its one token first, so that a long prompt does not make
the others wait: prompts take what is left of the step's token budget, in chunks, oldest first.
Requests are admitted in the order of their arrival when the pool has blocks for all of their
tokens; when it is full, the youngest running one gives its blocks back, waits at the head of the
queue and is computed again later. What a request's tokens are does not depend on any of this.
For one thread at a time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from bitnet_ops.arguments import check_flag, check_integer, is_number, shown
from bitnet_ops.generate.draft_planner import DraftPlanner
from bitnet_ops.generate.draft_report import NO_DRAFTS, DraftCounts
from bitnet_ops.generate.request import Request, ShareRead, without
from bitnet_ops.generate.states import Checkpoint, StateSlots, stops_of
from bitnet_ops.generate.step_plan import PlannedStep, StepPlan
from bitnet_ops.nn.blocks import BlockAllocator, PoolFullError


@dataclass(frozen=True)
class SchedulerOptions:
    """How requests share steps and blocks.

    token_budget: new tokens of a step, at most. A step with a full budget is the longest that a
        stream waits for its next token while prompts are prefilled.
    max_sequences: requests that run at once, at most; not above token_budget.
    prefill_beside_decode: prompt tokens, at most, of a step in which streams decode: fewer make
        the streams wait less for each token, and the prompt longer. None: what the budget leaves.
    watermark: share of the blocks that stay free when a request is admitted beside others, for
        these to grow into.
    prefix_cache: find blocks that hold the same tokens already.
    checkpoint_tokens: of a model with recurrent layers, after how many tokens of a prompt its state
        is kept for other requests; long prompts have wider steps.
    """

    token_budget: int = 256
    max_sequences: int = 64
    prefill_beside_decode: int | None = 32
    watermark: float = 0.01
    prefix_cache: bool = True
    checkpoint_tokens: int = 512

    def __post_init__(self) -> None:
        integers = "token_budget", "max_sequences", "prefill_beside_decode", "checkpoint_tokens"
        for name in integers:
            value = getattr(self, name)
            if name == "prefill_beside_decode" and value is None:
                continue
            check_integer(f"engine: expected {name}", value, 1)
        if self.max_sequences > self.token_budget:
            raise ValueError(
                f"engine: expected max_sequences at most token_budget {self.token_budget}, got "
                f"{self.max_sequences}: every running sequence has a token in every step"
            )
        if not is_number(self.watermark) or not 0 <= self.watermark < 1:
            raise ValueError(f"engine: expected watermark from 0 to 1, got {shown(self.watermark)}")
        check_flag("engine: expected prefix_cache", self.prefix_cache)


@dataclass(frozen=True)
class EngineStats:
    """Counts of requests and blocks at one moment, the others since the beginning (Scheduler)."""

    waiting: int
    running: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    preemptions: int
    reused_tokens: int
    drafted_tokens: int
    accepted_drafts: int
    state_slots: int = 0
    checkpoints: int = 0
    disk_pieces: int = 0  # files of the prefix cache on disk, and their MiB
    disk_mb: float = 0.0
    disk_tokens: int = 0  # that it gave, and that did not have to be computed
    attention_read: float = 1.0  # share of the pages that policies of attention let be read
    inputs_skipped: float = 0.0  # share of the inputs that activation sparsity may leave out
    prompt_tokens: int = 0  # of all that were admitted, the reused ones among them
    drafts: DraftCounts = NO_DRAFTS  # the drafted and accepted ones by their source


class _Found(NamedTuple):
    """What the prefix cache has of a request.

    blocks: hold its first `tokens` tokens, and are shared.
    gone: of its blocks a range that the request does not read; they are not shared.
    source: a block whose first `source_tokens` tokens come next; to be copied.
    """

    blocks: list[int]
    tokens: int
    source: int | None = None
    source_tokens: int = 0
    gone: tuple[int, int] = 0, 0

    @property
    def shared(self) -> list[int]:
        return without(self.blocks, self.gone)


class Scheduler:
    """Requests, waiting and running, over one allocator.

    Args:
        allocator: of the pool's blocks.
        block_size: positions of a block.
        max_positions: of the model.
        copy_block: called with (source, target) when a request is about to write a block that
            others hold: its contents move into a block of its own.
        options: budgets.
        states: of a model whose blocks keep something for sequences, the slots of that.
        unread: of a model whose layers all have windows, the positions [begin, end) that no token
            from a given one on reads. Their blocks go back while the request runs; those behind its
            prompt are forgotten at once, so that they are the next to be taken.
    Attributes: `recurrent`, the slots of a model that computes from states; `drafts`, which plans
    and counts them; `waiting`, the next one first; `running`, the oldest first; and counts of all
    that has been: `preemptions`, `prompt_tokens`, `reused_tokens` (that the prefix cache spared,
    those of preempted requests too); `attention`, the pages that were read where attention has a
    policy.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        max_positions: int,
        copy_block: Callable[[int, int], None],
        options: SchedulerOptions,
        states: StateSlots | None = None,
        unread: Callable[[int], tuple[int, int]] = lambda _: (0, 0),
    ) -> None:
        self.states, self._unread = states, unread
        self.recurrent = states if states is not None and states.needed else None
        self.allocator, self.block_size, self.max_positions = allocator, block_size, max_positions
        self.options, self._copy_block = options, copy_block
        self.drafts = DraftPlanner(max_positions, self._room)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.prompt_tokens = self.reused_tokens = 0
        self.attention, self.inputs = ShareRead(), ShareRead()

    def stats(self) -> EngineStats:
        """The counts at this moment."""
        return EngineStats(
            waiting=len(self.waiting),
            running=len(self.running),
            blocks=self.allocator.blocks,
            used_blocks=self.allocator.used_blocks,
            cached_blocks=self.allocator.cached_blocks,
            preemptions=self.preemptions,
            reused_tokens=self.reused_tokens,
            drafted_tokens=self.drafts.counts.drafted,
            accepted_drafts=self.drafts.counts.accepted,
            drafts=self.drafts.counts,
            prompt_tokens=self.prompt_tokens,
            attention_read=self.attention.share,
            inputs_skipped=1 - self.inputs.share,
            state_slots=0 if self.recurrent is None else self.recurrent.pool.slots,
            checkpoints=0 if self.recurrent is None else self.recurrent.checkpoints,
        )

    # Requests come and go ------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request, *, failed: bool = False) -> None:
        """Take a request out, in any state; unless `failed`, what it computed stays cached."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if failed:
            self.allocator.forget(request.own_blocks)
            if self.states is not None:
                self.states.leave(request, keep=False)
            request.computed = 0
        self._free(request)

    def computed(self, step: PlannedStep, accepted_drafts: int) -> None:
        """Keys and values of a step are in the pool; drafts that were rejected are not counted."""
        request, size = step.request, self.block_size
        full = request.computed // size
        certain = step.start + step.tokens
        request.computed = min(certain + accepted_drafts, len(request.ids))
        request.replays = request.computed - certain
        self._keep_state(request)
        if self.options.prefix_cache:
            for i in range(full, request.computed // size):
                self.allocator.register(request.blocks[i], request.contents(i, size))
            if step.tokens > 1:  # others that begin with this prompt need not wait for its end
                self._register_last(request)
        needed = self._blocks_for(len(request.ids))
        if needed < len(request.blocks):  # the others were for drafts
            self.allocator.free(request.blocks[needed:])
            del request.blocks[needed:]

    def _keep_state(self, request: Request) -> None:
        if self.recurrent is None or not request.stops or request.computed < request.stops[0]:
            return
        while request.stops and request.stops[0] <= request.computed:
            request.stops.pop(0)
        self.recurrent.save(request)

    # The next step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The plan of the next step; empty only if nobody waits or runs."""
        plan = StepPlan(self.options.token_budget)
        for request in [r for r in self.running if r.remaining == 1]:
            self._plan(plan, request, 1)
        if plan.left and any(step.request.max_drafts for step in plan.steps.values()):
            busy = bool(self.waiting) or len(plan.steps) < len(self.running)
            self.drafts.add(plan, busy=busy)
        if plan.steps:
            maximum = self.options.prefill_beside_decode
            plan.budget = plan.tokens + (plan.left if maximum is None else min(plan.left, maximum))
        for request in [r for r in self.running if r.remaining > 1]:
            self._plan(plan, request, plan.left)
        self._admit(plan)
        plan.decoding = sum(step.request.remaining == 1 for step in plan.steps.values())
        return plan

    def _plan(self, plan: StepPlan, request: Request, maximum: int) -> None:
        """Plan at most `maximum` tokens of a running request."""
        self._give_back(request)
        tokens = min(request.remaining, maximum)
        if request.stops:  # a checkpoint is a state behind a step
            tokens = min(tokens, request.stops[0] - request.computed)
        if tokens and request.blocks and self._make_room(plan, request, tokens):
            plan.steps[request.id] = PlannedStep(request, request.computed, tokens)

    def _room(self, request: Request, drafts: int) -> int:
        """For how many of so many drafts a request has blocks now, those that are free included."""
        if drafts <= 0:
            return 0
        free = 0 if self.waiting else self.allocator.free_blocks - self._reserve()
        spare = max(0, free)
        room = (len(request.blocks) + spare) * self.block_size - len(request.ids)
        if (drafts := min(drafts, room)) > 0:
            missing = self._blocks_for(len(request.ids) + drafts) - len(request.blocks)
            request.blocks += self.allocator.allocate(max(0, missing))
        return max(0, drafts)

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and len(self.running) < self.options.max_sequences:
            if plan.left < 1:
                return
            request = self.waiting[0]
            if self.states is not None and not self.states.available:
                return
            found, checkpoint = self._continued(request, self._cached_prefix(request))
            maximum = self._max_blocks(len(request.ids))
            missing = min(self._blocks_for(len(request.ids)) - len(found.blocks),
                          max(1, maximum - len(found.shared)))  # fmt: skip
            needed = missing + self.allocator.count_free(found.shared)
            free = self.allocator.free_blocks
            if needed > free and (not self.running or maximum > self.allocator.blocks):
                self._fail(plan, request, maximum)
            elif needed + (self._reserve() if self.running else 0) > free:
                return
            else:
                self.waiting.popleft()
                self._take(request, found, missing, spare=free - needed)
                if self.states is not None:
                    self.states.load(request, checkpoint)
                insort(self.running, request, key=lambda r: r.id)
                self._plan(plan, request, plan.left)

    def _max_blocks(self, positions: int) -> int:
        """How many blocks a request of so many positions holds at most."""
        begin, end = self._unread(positions)
        read = positions - (end - begin)
        steps = self._blocks_for(self.options.token_budget) + 2 if begin < end else 0
        return min(self._blocks_for(positions), self._blocks_for(read) + steps)

    def _range_unread(self, position: int) -> tuple[int, int]:
        """The blocks [begin, end) that no token from `position` on reads."""
        begin, end = self._unread(position)
        first, last = self._blocks_for(begin), end // self.block_size
        return (first, last) if first < last else (0, 0)

    def _give_back(self, request: Request) -> None:
        """Free the blocks that nothing will read again; those of the prompt may be found again."""
        begin, end = self._range_unread(request.computed)
        start = max(begin, request.gone[1])
        if start >= end:
            return
        freed = request.blocks[start:end]
        self.allocator.free(freed)
        new = freed[max(0, self._blocks_for(request.prompt_tokens) - start) :]
        self.allocator.forget(b for b in new if not self.allocator.references(b))
        request.gone = begin, end

    def _cached_prefix(self, request: Request) -> _Found:
        """Blocks that hold the request's first tokens; the last one is always left to compute."""
        if not self.options.prefix_cache:
            return _Found([], 0)
        size, known = self.block_size, len(request.ids) - 1
        blocks, gone = self._match(request, known // size)
        at = len(blocks) * size
        rest = request.content[at : min(at + size, known)]
        nearest = self.allocator.nearest(request.key(len(blocks) - 1, size), rest)
        if nearest is None:
            return _Found(blocks, at, gone=gone)
        block, count = nearest
        contents = self.allocator.contents(block)
        if self.allocator.count_free([block]) and contents and len(contents.token_ids) == count:
            # may be written behind these tokens
            return _Found([*blocks, block], at + count, gone=gone)
        return _Found(blocks, at, block, count, gone)

    def _match(self, request: Request, maximum: int) -> tuple[list[int], tuple[int, int]]:
        """The longest part of its first `maximum` blocks to go on from, and which blocks it lacks.

        Those that it will not read need not be there.
        """
        size = self.block_size
        if self.recurrent is not None or self._range_unread(maximum * size) == (0, 0):
            return self.allocator.match(request.key(i, size) for i in range(maximum)), (0, 0)
        there = [self.allocator.match([request.key(i, size)]) for i in range(maximum)]
        runs = [0]  # how many there are in front of each place, without a gap
        for one in there:
            runs.append(runs[-1] + 1 if one else 0)
        head = next((i for i, one in enumerate(there) if not one), maximum)
        for count in range(maximum, -1, -1):
            begin, end = gone = self._range_unread(count * size)
            if head >= begin and runs[count] >= count - end:
                return [one[0] if one else 0 for one in there[:count]], gone
        return [], (0, 0)

    def _continued(self, request: Request, found: _Found) -> tuple[_Found, Checkpoint | None]:
        """What of `found` a model with recurrent layers can continue: up to a checkpoint.

        Notes where the request should leave checkpoints of its own.
        """
        if self.recurrent is None:
            return found, None
        size, total = self.block_size, found.tokens + found.source_tokens
        one = self.recurrent.find(request, total)
        tokens = 0 if one is None else one.tokens
        if tokens == total and found.source is None:
            kept = found
        else:
            whole, rest = divmod(tokens, size)
            blocks = [*found.blocks, *([] if found.source is None else [found.source])]
            kept = _Found(found.blocks[:whole], whole * size)
            if rest:
                kept = kept._replace(source=blocks[whole], source_tokens=rest)
        if kept.source is not None and self.allocator.free_blocks <= self._blocks_for(
            len(request.ids)
        ):  # the copy may find no room, and without it the state would be ahead of the keys
            kept, one = _Found([], 0), None
        request.computed = 0 if one is None else one.tokens
        if self.options.prefix_cache:
            every = self.options.checkpoint_tokens
            request.stops = stops_of(request, every, size, branch=total)
        request.computed = 0
        return kept, one

    def _take(self, request: Request, found: _Found, missing: int, *, spare: int) -> None:
        """Give a request its first blocks: those found, and `missing` new ones."""
        self.allocator.share(found.shared)
        request.computed, request.gone = found.tokens, found.gone
        source = [] if found.source is None else [found.source]
        if source and self.allocator.count_free(source) <= spare:
            self.allocator.share(source)  # so that it is not allocated before it is copied
            request.blocks = found.blocks + self.allocator.allocate(missing)
            self._copy_block(source[0], request.blocks[len(found.blocks)])
            request.computed += found.source_tokens
            self.allocator.free(source)
        else:
            request.blocks = found.blocks + self.allocator.allocate(missing)
        self.prompt_tokens += len(request.ids)
        self.reused_tokens += request.computed
        if request.reused_tokens is None:
            request.reused_tokens = request.computed

    # Blocks --------------------------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, request: Request, tokens: int) -> bool:
        """Give a request blocks for its next `tokens`, if need be by preemption.

        False where it has been preempted itself, or can never go on. It shares no block that it
        writes: what it shares ends before its last token, which is always left to compute.
        """
        missing = self._blocks_for(request.computed + tokens) - len(request.blocks)
        while missing > self.allocator.free_blocks:
            victim = self.running[-1]
            if len(self.running) == 1:
                self._fail(plan, request, missing)
                return False
            self._preempt(plan, victim)
            if victim is request:
                return False
        if missing > 0:
            request.blocks += self.allocator.allocate(missing)
        return True

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Back to the head of the queue: the prefix cache may give some of its blocks again."""
        plan.steps.pop(request.id, None)  # planned already, if for an older one's prompt
        self.running.remove(request)
        self._free(request)
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _fail(self, plan: StepPlan, request: Request, needed: int) -> None:
        error = PoolFullError(needed, self.allocator.free_blocks, self.allocator.blocks)
        plan.failed.append((request, error))
        self.remove(request)

    def _free(self, request: Request) -> None:
        """Give its blocks and its slot back."""
        if self.options.prefix_cache:
            self._register_last(request)
        if self.states is not None:
            self.states.leave(request, keep=self.options.prefix_cache)
        self.allocator.free(request.own_blocks, keep=request.keep_prefix)
        request.blocks, request.gone = [], (0, 0)
        request.computed = 0

    def _register_last(self, request: Request) -> None:
        """Let the computed part of its last block be found, where that is not full."""
        if request.computed % self.block_size:
            last = request.computed // self.block_size
            contents = request.contents(last, self.block_size)
            self.allocator.register(request.blocks[last], contents)

    def _reserve(self) -> int:
        """Blocks that stay free for running requests to grow into."""
        return math.ceil(self.options.watermark * self.allocator.blocks)

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)
