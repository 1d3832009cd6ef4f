"""StateSlots: who has which slot of recurrent states, and checkpoints of states by their tokens.

A running request of a model with recurrent layers has a slot. A state cannot be cut back to an
earlier token, so a prefix of a text can be continued only from a checkpoint: a copy, or the slot
that a request leaves behind. Checkpoints fill the slots that no request needs; the one that has not
been used for longest goes first. For one thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bitnet_ops.generate.request import Request
from bitnet_ops.nn.state_pool import StatePool

# Of a prompt, at most, apart from the last one and from where texts part: a long prompt must not
# drive out all others.
MAX_PER_PROMPT = 8
_MAX_BORDERS = 4  # of images, behind which its state is kept


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state behind the first `tokens` tokens of a text, in `slot`.

    drafts: how many of them are kept beside it, as drafts that were right. parent: the key of the
    last whole block of these tokens; tail: those behind it.
    """

    slot: int
    tokens: int
    drafts: int
    parent: bytes
    tail: tuple[int, ...]


class StateSlots:
    """The slots of a pool.

    Args:
        pool: of the states.
        block_size: positions of a block of keys and values.
        max_checkpoints: how many there are, at most; None: as many as there are slots.
        needed: whether the model computes from states; False: nothing but drafts comes from them,
            so a text can be continued without its state, and there are no checkpoints.
    """

    def __init__(
        self,
        pool: StatePool,
        block_size: int,
        max_checkpoints: int | None = None,
        *,
        needed: bool = True,
    ) -> None:
        self.needed = needed
        self.pool, self._size = pool, block_size
        self._max_checkpoints = pool.slots if max_checkpoints is None else max_checkpoints
        self._free = [*reversed(range(pool.slots))]
        self._checkpoints: OrderedDict[Checkpoint, None] = OrderedDict()  # oldest use first
        self._by_parent: dict[bytes, list[Checkpoint]] = {}

    @property
    def checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def available(self) -> int:
        """Slots that a request can have: free ones and those of checkpoints."""
        return len(self._free) + len(self._checkpoints)

    # Requests ------------------------------------------------------------------------------------

    def load(self, request: Request, found: Checkpoint | None) -> None:
        """Give a request a slot; from `found` on if there is such a checkpoint.

        One slot has to be `available`.
        """
        if found is not None:
            self._checkpoints.move_to_end(found)
        if not self._free and len(self._checkpoints) == 1 and found is not None:
            self._drop(found)  # its slot is the request's, as it is
            request.slot, request.replays = self._free.pop(), found.drafts
            return
        while not self._free:
            self._drop(next(iter(self._checkpoints)))
        request.slot, request.replays = self._free.pop(), 0
        if found is None and request.computed:  # what was there is of another text
            self.pool.clear(request.slot)
        if found is not None:
            self.pool.copy(found.slot, request.slot, found.drafts)
            request.replays = found.drafts

    def leave(self, request: Request, *, keep: bool) -> None:
        """Take a request's slot back; with `keep` as the checkpoint of what it has computed."""
        slot, request.slot = request.slot, -1
        if slot < 0:
            return
        if self.needed and keep and request.computed and self._has_room(request, request.computed):
            self._enter_checkpoint(request, slot, request.computed, request.replays)
        else:
            self._free.append(slot)

    def save(self, request: Request) -> None:
        """Keep a copy of the state of a running request, if there is a slot for it."""
        slot = self._enter_new(request, request.computed, request.replays)
        if slot is not None:
            self.pool.copy(request.slot, slot, request.replays)

    def restore(self, request: Request, tokens: int) -> int | None:
        """A slot to be written with the state behind the first `tokens` of a request that waits.

        None where there is a checkpoint already, or no slot for it.
        """
        return self._enter_new(request, tokens, 0)

    def _enter_new(self, request: Request, tokens: int, drafts: int) -> int | None:
        if not self._has_room(request, tokens):
            return None
        if not self._free:
            if not self._checkpoints or not request.keep_prefix:
                return None
            self._drop(next(iter(self._checkpoints)))
        slot = self._free.pop()
        self._enter_checkpoint(request, slot, tokens, drafts)
        return slot

    # Checkpoints ---------------------------------------------------------------------------------

    def find(self, request: Request, maximum: int) -> Checkpoint | None:
        """The checkpoint behind the most of the request's tokens, but at most `maximum`."""
        for block in range(maximum // self._size, -1, -1):
            best = None
            for one in self._by_parent.get(request.key(block - 1, self._size), ()):
                begin = block * self._size
                tail = tuple(request.content[begin : one.tokens])
                fits = one.tokens <= maximum and one.tail == tail
                if fits and (best is None or one.tokens > best.tokens):
                    best = one
            if best is not None:
                return best
        return None

    def behind(self, request: Request, tokens: int) -> Checkpoint | None:
        """The checkpoint behind exactly so many of the request's tokens."""
        begin = tokens // self._size * self._size
        tail = tuple(request.content[begin:tokens])
        of_parent = self._by_parent.get(request.key(tokens // self._size - 1, self._size), ())
        return next((one for one in of_parent if one.tail == tail), None)

    def forget_all(self) -> None:
        """Forget all checkpoints, as when the weights have changed."""
        for one in list(self._checkpoints):
            self._drop(one)

    def trim(self) -> None:
        """Forget all checkpoints, and give the memory of free slots back to the system."""
        self.forget_all()
        self.pool.release(self._free)

    def _has_room(self, request: Request, tokens: int) -> bool:
        """Whether a checkpoint behind so many of the request's tokens can be had, and is new.

        One of a request in the background takes no other's place.
        """
        if (known := self.behind(request, tokens)) is not None:
            self._checkpoints.move_to_end(known)
            return False
        if len(self._checkpoints) >= self._max_checkpoints and not request.keep_prefix:
            return False
        while self._checkpoints and len(self._checkpoints) >= self._max_checkpoints:
            self._drop(next(iter(self._checkpoints)))
        return self._max_checkpoints > 0

    def _enter_checkpoint(self, request: Request, slot: int, tokens: int, drafts: int) -> None:
        size = self._size
        parent = request.key(tokens // size - 1, size)
        tail = tuple(request.content[tokens // size * size : tokens])
        one = Checkpoint(slot, tokens, drafts, parent, tail)
        self._checkpoints[one] = None
        if not request.keep_prefix:
            self._checkpoints.move_to_end(one, last=False)
        self._by_parent.setdefault(parent, []).append(one)

    def _drop(self, one: Checkpoint) -> None:
        del self._checkpoints[one]
        rows = self._by_parent[one.parent]
        rows.remove(one)
        if not rows:
            del self._by_parent[one.parent]
        self._free.append(one.slot)


def stops_of(request: Request, every: int, block_size: int, branch: int) -> list[int]:
    """Behind which tokens of a prompt checkpoints are worth their memory, ascending.

    Every `every` tokens, or wider in a long prompt; the last border of blocks, from which the same
    prompt or one that goes on otherwise begins; `branch`, where another text has parted; and before
    and behind the last images, where other questions about them begin.
    """
    prompt = len(request.ids)
    step = max(every, -(-prompt // MAX_PER_PROMPT))
    step = -(-step // block_size) * block_size
    last = (prompt - 1) // block_size * block_size
    stops = {*range(step, prompt, step), last, branch}
    if request.runs is not None:
        stops.update(request.runs.borders[-_MAX_BORDERS:])
    return sorted(stop for stop in stops if request.computed < stop < prompt)
