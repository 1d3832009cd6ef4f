"""The allocator of KV blocks against a model of dicts and lists; then 100,000 random operations.

Nothing here knows tensors.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from bitnet_ops.nn.blocks import (
    BlockAllocator,
    Contents,
    PoolFullError,
    block_key,
    root_key,
)

CONTENTS = st.builds(
    Contents.of, st.sampled_from([b"p", b"q"]), st.lists(st.integers(0, 2), min_size=1, max_size=3)
)


def contents_of(number: int) -> Contents:
    return Contents.of(b"", [number])


# Against a model -------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    """Sequences as lists of blocks, contents as a dict, cached blocks as a list."""

    @initialize(blocks=st.integers(1, 12))
    def start(self, blocks: int) -> None:
        self.allocator = BlockAllocator(blocks)
        self.blocks = blocks
        self.sequences: list[list[int]] = []
        self.known: dict[int, Contents] = {}
        self.cached: list[int] = []  # free but known, used longest ago first
        self.found: set[int] = set()  # by a second sequence, since they got their contents

    def held(self) -> list[int]:
        return [block for sequence in self.sequences for block in sequence]

    def free(self) -> int:
        return self.blocks - len(set(self.held()))

    def evict(self, taken: int) -> None:
        """Taking so many blocks leaves no more cached than free ones."""
        while len(self.cached) > self.free() - taken:
            self.unknown(self.cached.pop(0))

    def unknown(self, block: int) -> None:
        del self.known[block]
        self.found.discard(block)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > self.free():
            with pytest.raises(PoolFullError) as caught:
                self.allocator.allocate(count)
            assert (caught.value.needed, caught.value.free) == (count, self.free())
            return
        self.evict(count)
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & {*self.held(), *self.cached}
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.booleans())
    def free_one(self, data: st.DataObject, keep: bool) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.allocator.free(sequence, keep=keep)
        gone = [b for b in reversed(sequence) if b not in self.held() and b in self.known]
        first = [b for b in gone if not keep and b not in self.found]
        self.cached = [*first, *self.cached, *(b for b in gone if b not in first)]
        self.found -= {b for b in sequence if b not in self.held() and b not in self.known}

    @rule(contents=st.lists(CONTENTS, max_size=4))
    def touch(self, contents: list[Contents]) -> None:
        found = list(dict.fromkeys(self.allocator.match([c.key for c in contents])))
        self.allocator.touch(found)
        again = [b for b in reversed(found) if b in self.cached]
        self.cached = [*(b for b in self.cached if b not in again), *again]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        part = sequence[: data.draw(st.integers(0, len(sequence)))]
        self.allocator.share(part)
        self.found |= {*part}
        self.sequences.append(part)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s]))
        at = data.draw(st.integers(0, len(sequence) - 1))
        block, shared = sequence[at], self.held().count(sequence[at]) > 1
        if shared and not self.free():
            with pytest.raises(PoolFullError):
                self.allocator.writable(block)
            return
        if shared:
            self.evict(1)
        elif block in self.known:
            self.unknown(block)
        sequence[at] = self.allocator.writable(block)
        assert (sequence[at] != block) == shared
        assert self.held().count(sequence[at]) == 1

    @precondition(lambda self: self.held())
    @rule(data=st.data(), contents=CONTENTS)
    def register(self, data: st.DataObject, contents: Contents) -> None:
        block = data.draw(st.sampled_from(self.held()))
        self.allocator.register(block, contents)
        if contents not in self.known.values():
            if block in self.known:
                self.unknown(block)
            self.known[block] = contents

    @rule(contents=st.lists(CONTENTS, max_size=4))
    def match(self, contents: list[Contents]) -> None:
        found = self.allocator.match([c.key for c in contents])
        assert [self.known[b] for b in found] == contents[: len(found)]
        assert len(found) == len(contents) or contents[len(found)] not in self.known.values()
        found = list(dict.fromkeys(found))
        assert self.allocator.count_free(found) == sum(b in self.cached for b in found)
        self.allocator.share(found)
        self.found |= {*found}
        self.cached = [b for b in self.cached if b not in found]
        self.sequences.append(found)

    @rule(wanted=CONTENTS)
    def nearest(self, wanted: Contents) -> None:
        def length(block: int) -> int:
            known, ids = self.known[block], wanted.token_ids
            if known.parent != wanted.parent:
                return 0
            return max(n for n in range(4) if list(known.token_ids[:n]) == list(ids[:n])[:n]
                       and n <= min(len(ids), len(known.token_ids)))  # fmt: skip

        best = max(map(length, self.known), default=0)
        found = self.allocator.nearest(wanted.parent, wanted.token_ids)
        assert (0 if found is None else found[1]) == best
        assert found is None or length(found[0]) == best > 0
        assert self.allocator.nearest(wanted.parent, []) is None

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget_one(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.known)))
        self.allocator.forget([block])
        self.unknown(block)
        self.cached = [b for b in self.cached if b != block]

    @rule()
    def forget_all(self) -> None:
        self.allocator.forget_all()
        self.found -= {*self.known}
        self.known, self.cached = {}, []

    @rule(count=st.integers(1, 3))
    def grow(self, count: int) -> None:
        self.allocator.add_blocks(count)
        self.blocks += count

    @rule()
    def reclaim(self) -> None:
        blocks = self.allocator.reclaim()
        assert not set(blocks) & {*self.held(), *self.cached}
        assert self.allocator.reclaim() == []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        a, held = self.allocator, self.held()
        assert (a.blocks, a.free_blocks, a.used_blocks, a.cached_blocks) == (
            self.blocks,
            self.free(),
            len(set(held)),
            len(self.cached),
        )
        for block in range(self.blocks):
            assert a.references(block) == held.count(block)
        assert list(map(a.contents, range(self.blocks))) == list(
            map(self.known.get, range(self.blocks))
        )
        for block, contents in self.known.items():
            assert a.match([contents.key]) == [block]


TestModel = Model.TestCase
TestModel.settings = hypothesis.settings(max_examples=300, stateful_step_count=60)


def test_100_000_random_operations_lose_no_block() -> None:
    """Allocate, fork, write, register, match, free, grow and reclaim; at the end all are free."""
    random_ = random.Random(12)
    allocator = BlockAllocator(60)
    sequences: list[list[int]] = []
    operations = dict.fromkeys(("new", "fork", "write", "free", "full", "hit", "grow"), 0)
    for i in range(100_000):
        kind = random_.choices(["new", "fork", "write", "free"], [5, 2, 3, 5])[0]
        sequence = random_.choice(sequences) if sequences else []
        try:
            if kind == "new":
                keys = {contents_of(random_.randrange(12)).key for _ in range(random_.randrange(4))}
                hits = allocator.match(keys)
                allocator.share(hits)
                sequences.append(hits)
                operations["hit"] += bool(hits)
                new = allocator.allocate(random_.randrange(8))
                hits += new
                for block in new[: random_.randrange(3)]:
                    allocator.register(block, contents_of(random_.randrange(12)))
            elif kind == "fork":
                allocator.share(sequence)
                sequences.append(list(sequence))
            elif kind == "write" and sequence:
                at = random_.randrange(len(sequence))
                sequence[at] = allocator.writable(sequence[at])
            elif kind == "free" and sequences:
                allocator.free(sequences.pop(random_.randrange(len(sequences))))
            operations[kind] += 1
        except PoolFullError:
            operations["full"] += 1
        if i % 100 == 0:
            held = Counter(block for s in sequences for block in s)
            assert allocator.used_blocks == len(held)
            assert all(allocator.references(b) == held[b] for b in range(allocator.blocks))
            assert allocator.used_blocks + allocator.free_blocks == allocator.blocks
        if i % 10_000 == 0:
            allocator.reclaim()
            allocator.add_blocks(1)
            operations["grow"] += 1
    assert min(operations.values()) >= 10, operations
    for sequence in sequences:
        allocator.free(sequence)
    assert (allocator.used_blocks, allocator.free_blocks) == (0, allocator.blocks)
    allocator.forget_all()
    assert allocator.cached_blocks == 0
    assert sorted(allocator.allocate(allocator.blocks)) == list(range(70))


# Choices ---------------------------------------------------------------------------------------


def test_least_recently_used_contents_go_first_and_tails_before_heads() -> None:
    allocator = BlockAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(2)
    for block in first + second:
        allocator.register(block, contents_of(block))
    allocator.free(first)
    allocator.free(second)
    allocator.share([first[0]])  # used again
    allocator.free([first[0]])
    assert allocator.cached_blocks == 4
    taken = [allocator.allocate(1)[0] for _ in range(5)]
    assert taken == [4, first[1], second[1], second[0], first[0]], "4 had no contents"


def test_what_the_background_leaves_goes_first_unless_others_have_used_it() -> None:
    allocator = BlockAllocator(5)
    conversation, title = allocator.allocate(1), allocator.allocate(3)
    for block in conversation + title:
        allocator.register(block, contents_of(block))
    allocator.free(conversation)
    allocator.share(title[:1])
    allocator.free(title[:1])
    allocator.free(title, keep=False)
    taken = [allocator.allocate(1)[0] for _ in range(5)]
    assert taken == [4, title[2], title[1], *conversation, title[0]]


def test_used_memory_is_taken_before_untouched() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    assert allocator.allocate(1)[0] in blocks
    assert allocator.reclaim() == [1] and allocator.reclaim() == []


def test_a_block_freed_too_often_is_an_error() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.free([block])
    for wrong in (lambda: allocator.free([block]), lambda: allocator.share([block]),
                  lambda: allocator.register(block, contents_of(1))):  # fmt: skip
        with pytest.raises(ValueError, match="expected a block in use"):
            wrong()


def test_a_full_pool_names_needed_and_free_blocks() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    with pytest.raises(PoolFullError, match="expected 5 free blocks, got 2 of 3; ") as caught:
        allocator.allocate(5)
    assert allocator.free_blocks == 2, "all or none"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.needed, again.free, str(again)) == (5, 2, str(caught.value))


@pytest.mark.parametrize("blocks", [0, -1])
def test_a_pool_has_blocks(blocks: int) -> None:
    with pytest.raises(ValueError, match="expected blocks to add above 0"):
        BlockAllocator(blocks)


def test_keys_tell_tokens_places_and_adapters_apart() -> None:
    roots = [root_key(), root_key(""), root_key("a")]
    keys = {block_key(root, ids) for root in roots for ids in ([1, 2], [2, 1], [1], [513])}
    assert len(keys) == 12
    once = block_key(root_key(), [1, 2])
    assert block_key(root_key(), [1, 2]) == once != block_key(once, [1, 2])
