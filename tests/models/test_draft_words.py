"""The list of words of a draft head: rows are the trunk's bit for bit, and which words are in it.

What the rows hold is checked by logits against the whole head's and, for ternary tiles of any
number of lanes, against bytes made here from docs/reference/layouts.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.models import draft_words
from bitnet_ops.models.draft_words import DraftWords
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.packing import pack_ternary
from bitnet_ops.nn.storage import FORMATS
from bitnet_ops.nn.tracked import changes
from bounds import assert_equal
from isa_control import ISAS, forced_isa

V = 331  # a last tile of every layout is not full


def dense(form: str, k: int = 192, group: int = 128) -> Callable[[torch.Generator], HeadWeight]:
    def make(g: torch.Generator) -> HeadWeight:
        return HeadWeight.from_dense(torch.randn(V, k, generator=g), form, group)

    return make


def stored(dtype: torch.dtype) -> Callable[[torch.Generator], HeadWeight]:
    def make(g: torch.Generator) -> HeadWeight:
        return HeadWeight.from_dense(torch.randn(V, 77, generator=g).to(dtype), "stored")

    return make


def ternary(
    layout: str, k: int = 320, group: int = 128, half: bool = True
) -> Callable[[torch.Generator], HeadWeight]:
    """group 0: a scale a row. half: scales are numbers of float16, or at least one is not."""

    def make(g: torch.Generator) -> HeadWeight:
        codes = torch.randint(-1, 2, (V, k), generator=g, dtype=torch.int8)
        shape = (V, -(-k // group)) if group else (V,)
        scale = torch.rand(shape, generator=g) + 0.5
        packed = pack_ternary(codes, scale.half().float() if half else scale, group)
        return HeadWeight.from_packed(packed.repack(layout))

    return make


HEADS = {
    "float32": dense("float32", 77),
    "bf16": dense("bf16", 77),
    "float16": stored(torch.float16),
    "int8": dense("int8"),
    "int8, odd K": dense("int8", 301),
    "int4, groups of 64": dense("int4", 192, 64),
    "int4, groups of 128": dense("int4", 301, 128),
    **{layout: ternary(layout) for layout in FORMATS},
    **{f"{layout}, groups of 64": ternary(layout, 192, 64) for layout in FORMATS},
    **{f"{layout}, odd K, float32 scales": ternary(layout, 301, 128, False) for layout in FORMATS},
    **{f"{layout}, scales of rows": ternary(layout, 128, 0) for layout in FORMATS},
}


def texts(g: torch.Generator, calls: int, most: int = 60) -> Iterator[list[int]]:
    """Random ids: some common, some seen once, some calls without any."""
    for _ in range(calls):
        count = int(torch.randint(0, most, (), generator=g))
        common = torch.randint(0, V, (count,), generator=g) // 3
        rare = torch.randint(0, V, (count,), generator=g)
        chosen = torch.rand(count, generator=g) < 0.5
        yield torch.where(chosen, common, rare).tolist()


def check_rows(words: DraftWords, trunk: HeadWeight, x: Tensor, what: str) -> None:
    assert words.ids.unique().numel() == words.ids.numel(), what
    assert_equal(words.head(x), trunk(x)[:, words.ids], what)
    at = torch.arange(len(words.ids))
    assert_equal(words.head.embed(at), trunk.embed(words.ids), what)


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_words_are_the_trunks(name: str, isa: str, rng: torch.Generator) -> None:
    trunk = HEADS[name](rng)
    x = torch.randn(3, trunk.in_features, generator=rng)
    for size in (1, 2, 5, 16, 37, 64, 80, 149, 256, V - 1):
        words = DraftWords(trunk, size)
        assert words.head.head_format == trunk.head_format
        assert (words.head.out_features, len(words.ids)) == (size, size)
        assert words.ids.tolist() == list(range(size))
        check_rows(words, trunk, x, f"{size} words before")
        for ids in [*texts(rng, 3), [V - 1]]:
            words.learn(ids)
        check_rows(words, trunk, x, f"{size} words")
        assert V - 1 in words.ids


@pytest.mark.parametrize("name", ["int8", "int4, groups of 128", *FORMATS])
def test_many_exchanges_keep_every_row(name: str, rng: torch.Generator) -> None:
    trunk = HEADS[name](rng)
    words = DraftWords(trunk, 100)
    x = torch.randn(2, trunk.in_features, generator=rng)
    for i, ids in enumerate(texts(rng, 60)):
        words.learn(ids)
        if i % 5 == 4:
            check_rows(words, trunk, x, f"call {i}")


def test_a_list_of_all_words_is_the_trunks_head(rng: torch.Generator) -> None:
    trunk = HEADS["int8"](rng)
    for size in (V, V + 1, 10**9):
        words = DraftWords(trunk, size)
        assert words.head is trunk
        words.learn([3, 5, 330])
        assert words.ids.tolist() == list(range(V))
        assert 330 in words and V not in words and -1 not in words


def test_signs_are_shared_and_applied(rng: torch.Generator) -> None:
    trunk = HEADS["int8"](rng)
    trunk.signs = torch.randint(0, 2, (3, 64), generator=rng).float() * 2 - 1
    words = DraftWords(trunk, 40)
    words.learn([300, 200])
    assert words.head.signs is trunk.signs
    check_rows(words, trunk, torch.randn(2, 192, generator=rng), "rotated")


def test_a_copy_has_rows_and_a_trunk_of_its_own(rng: torch.Generator) -> None:
    trunk = HEADS["2bit"](rng)
    words = DraftWords(trunk, 60, {310})
    words.learn([200])
    before, x = words.ids.clone(), torch.randn(1, 320, generator=rng)
    both = copy.deepcopy({"trunk": trunk, "words": words})
    copied = both["words"]
    copied.learn([201, 202])
    assert 201 in copied and 200 not in copied and 310 in copied
    check_rows(copied, both["trunk"], x, "the copy")
    both["trunk"].weight.zero_()  # the first trunk has other memory
    assert_equal(words.ids, before)
    check_rows(words, trunk, x, "the first one")


# Which words ----------------------------------------------------------------------------------


class PlainList:
    """The same rules for one word at a time, over plain lists."""

    def __init__(self, size: int, always: set[int]) -> None:
        self.kept = set(range(size // 4)) | always
        self.room = size - len(self.kept)
        others = [i for i in range(size) if i not in self.kept]
        self.leaving = others[: self.room][::-1]  # the next one to leave in front

    def learn(self, word: int) -> None:
        if word not in self.kept:
            self.leaving = [i for i in self.leaving if i != word] + [word]
            self.leaving = self.leaving[-self.room :]

    @property
    def words(self) -> set[int]:
        return self.kept | set(self.leaving)


@pytest.mark.parametrize("always", [set(), {7, 60, 300, 301, 330}])
def test_those_not_seen_for_longest_leave(always: set[int], rng: torch.Generator) -> None:
    size = 100
    words, expected = DraftWords(HEADS["int8"](rng), size, always), PlainList(size, always)
    assert set(words.ids.tolist()) == expected.words
    for ids in texts(rng, 200, most=20):
        for i in ids:
            words.learn([i])
            expected.learn(i)
        assert set(words.ids.tolist()) == expected.words
        assert all(i in words for i in expected.words)
        assert sum(i in words for i in range(V)) == size


def test_a_call_copies_few_rows_and_the_last_ones_seen_first(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_words, "_STEP_ROWS", 4)
    trunk = HEADS["2bit"](rng)
    words = DraftWords(trunk, 100)
    new = list(range(200, 230))
    before = words.ids.clone()
    words.learn([*new, 205])  # 205 again: it is among the last
    assert {229, 228, 227, 205} == {i for i in new if i in words}
    for call in range(2, 9):
        words.learn([])
        assert sum(i in words for i in new) == min(4 * call, 30)
        assert int((words.ids != before).sum()) == min(4 * call, 30)
    assert all(i in words for i in new)
    check_rows(words, trunk, torch.randn(1, 320, generator=rng), "afterwards")


def test_words_that_wait_are_no_more_than_there_are_places(rng: torch.Generator) -> None:
    words = DraftWords(HEADS["int8"](rng), 8)
    words.learn(range(8, V))
    for _ in range(V):
        words.learn([])
    assert words.ids[2:].sort().values.tolist() == list(range(V - 6, V))
    assert words.ids[:2].tolist() == [0, 1]


def test_learning_is_no_change_of_tensors_or_modules(rng: torch.Generator) -> None:
    for name in ("int8", "bf16", "2bit", "1.6bit", "canonical", "int4, groups of 64"):
        words = DraftWords(HEADS[name](rng), 64)
        buffers = [*words.head.buffers(), words.ids]

        def state(tensors: list[Tensor] = buffers) -> list[int]:
            return [changes(), *(t.data_ptr() for t in tensors), *(t._version for t in tensors)]

        before = state()
        old = [t.clone() for t in buffers]
        words.learn(range(100, 140))
        assert state() == before
        assert all(not torch.equal(a, b) for a, b in zip(old, buffers, strict=True)), name


def test_what_a_call_copies_is_bounded_by_bytes(rng: torch.Generator) -> None:
    rows = []
    for k in (64, 1024, 4096, 16384):
        codes = torch.zeros(V, k, dtype=torch.int8)
        packed = pack_ternary(codes, torch.ones(V, -(-k // 128)), 128).repack("2bit")
        rows.append(DraftWords(HeadWeight.from_packed(packed), 64).rows_of_call)
    assert rows[0] == 64 and rows[-1] >= 1
    assert all(more >= fewer for more, fewer in pairwise(rows)) and rows[1] > rows[3]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (0, (), "expected size at least 1, got 0"),
        (-5, (), "expected size at least 1, got -5"),
        (10, (V,), f"expected ids from 0 to {V - 1}, got {V}"),
        (10, (-1,), f"expected ids from 0 to {V - 1}, got -1"),
        (8, range(100, 107), "expected at most 6 ids that always stay in a list of 8, got 7"),
    ],
)
def test_lists_that_cannot_be(
    size: int, always: tuple[int, ...], message: str, rng: torch.Generator
) -> None:
    with pytest.raises(ValueError, match=message):
        DraftWords(HEADS["int8"](rng), size, always)


@pytest.mark.parametrize("wrong", [-1, V])
def test_an_id_that_is_none_is_refused_and_forgotten(wrong: int, rng: torch.Generator) -> None:
    words = DraftWords(HEADS["int8"](rng), 10)
    before = words.ids.tolist()
    with pytest.raises(ValueError, match=f"expected ids from 0 to {V - 1}, got {wrong}"):
        words.learn([wrong])
    assert words.ids.tolist() == before
    words.learn([200])
    assert 200 in words and words.ids.unique().numel() == 10


# Bytes of tiles, for lanes that this CPU may not have -----------------------------------------


def tile_bytes(codes: Tensor, layout: str, lanes: int) -> Tensor:
    """codes int64 [N, K] of 0, 1, 2, K a multiple of 64, N of whole tiles, as layouts.md says."""
    fields = 4 if layout == "2bit" else 5
    rows, k = codes.shape
    parts = codes.view(rows // (fields * lanes), fields, lanes, k // 4, 4)
    if layout == "2bit":
        byte = sum(parts[:, f] << 2 * f for f in range(4))
    else:
        value = sum(parts[:, f] * 3 ** (4 - f) for f in range(5))
        byte = -(-256 * value // 243)
    assert isinstance(byte, Tensor)
    steps = byte.transpose(1, 2).to(torch.uint8).contiguous()  # [tiles, k-steps, lanes, 4]
    return steps.flatten(2) if layout == "2bit" else steps


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("layout", ["2bit", "1.6bit"])
def test_rows_inside_tiles_of_any_lanes(layout: str, lanes: int, rng: torch.Generator) -> None:
    kind = draft_words._TwoBits if layout == "2bit" else draft_words._Base3
    height = lanes * (4 if layout == "2bit" else 5)
    of = torch.randint(0, 3, (3 * height, 128), generator=rng)
    to = torch.randint(0, 3, (2 * height, 128), generator=rng)
    target = tile_bytes(to, layout, lanes)
    copy = kind(tile_bytes(of, layout, lanes), target)
    for _ in range(20):
        ids = torch.randperm(len(of), generator=rng)[:7]
        places = torch.randperm(len(to), generator=rng)[:7]
        to[places] = of[ids]
        copy.rows(ids.tolist(), places.tolist())
        assert_equal(target, tile_bytes(to, layout, lanes))


def test_bytes_made_here_are_the_kernels(rng: torch.Generator) -> None:
    codes = torch.randint(0, 3, (320, 128), generator=rng)
    canonical = ops.pack((codes - 1).to(torch.int8))
    for isa in ISAS:
        with forced_isa(isa):
            for layout, fields in (("2bit", 4), ("1.6bit", 5)):
                made = ops.repack(canonical, 128, layout)
                lanes = made[0, 0].numel() // 4
                rows = 320 // (fields * lanes) * fields * lanes
                assert rows > 0
                expected = tile_bytes(codes[:rows], layout, lanes)
                assert_equal(made[: len(expected)], expected)
