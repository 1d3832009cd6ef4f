"""An engine's slots of recurrent states under our step: the same logits as the model alone.

The engine is made up here in the shape of SGLang's: tensors [layers, slots, ...] that it copies and
clears by whole slots, a prefix tree that keeps such copies. Every fault of its book-keeping that is
planted here has to show in the logits.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bitnet_ops.integrations import paged
from bitnet_ops.integrations.states import EngineStates, Track, run_tracked, sizes_of, steps_of
from bitnet_ops.nn.kv_cache import KVCache
from hybrid_models import hybrid

CASES = ("plain", "plain-tied", "rotated", "square")
SLOTS, POSITIONS = 9, 400


def ids_of(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator)


class Engine:
    """Keys and values by position, states by slot; 0 is nobody's, as in SGLang."""

    def __init__(self, model, *, channels_last=False):
        self.model, config = model, model.config
        net = config.delta_net
        attention = config.num_hidden_layers - len(net.layers)
        shape = attention, POSITIONS, 1, config.num_key_value_heads, config.head_dim
        inputs, state = sizes_of(net)
        # what is left of others: a slot is not cleared for whoever starts in it
        self.temporal = torch.full((len(net.layers), SLOTS, *state), 7.0)
        self.conv = torch.full((len(net.layers), SLOTS, *inputs), 7.0)
        if channels_last:  # as SGLang does on CPUs with AMX
            self.conv = self.conv.transpose(2, 3).contiguous().transpose(2, 3)
        self.states = EngineStates(config, self.temporal, self.conv)
        self.pool = paged.EnginePool(torch.zeros(shape), torch.zeros(shape), self.states)
        self.used = 0

    def copy_from(self, source, target):
        """As SGLang's MambaPool copies."""
        for tensor in (self.temporal, self.conv):
            tensor[:, [target]] = tensor[:, [source]]

    def request(self, ids, slot, like=None, shared=0):
        """A sequence; its first positions those of `like`."""
        own = torch.arange(self.used, self.used + len(ids) - shared)
        self.used += len(own)
        positions = own if like is None else torch.cat([like.table[:shared], own])
        return Request(ids, slot, positions, shared)

    def batch(self, new, *, all_rows=False):
        """The step of (request, how many of its next tokens)."""
        counts = torch.tensor([count for _, count in new])
        ends = torch.tensor([r.done + count for r, count in new])
        longest = int(ends.max())
        places = [slice(r.done, r.done + count) for r, count in new]
        table = torch.zeros(len(new), longest, dtype=torch.int64)
        for i, (r, _) in enumerate(new):
            table[i, : ends[i]] = r.table[: ends[i]]
        for r, count in new:
            r.done += count
        return paged.batch_of(
            torch.cat([r.ids[place] for (r, _), place in zip(new, places, strict=True)]),
            torch.cat([torch.arange(place.start, place.stop) for place in places]),
            torch.cat([r.table[place] for (r, _), place in zip(new, places, strict=True)]),
            paged.query_starts(counts), ends, table, all_rows=all_rows,
            state_slots=torch.tensor([r.slot for r, _ in new], dtype=torch.int32),
        )  # fmt: skip

    def step(self, *new, tracks=(), **options):
        batch = self.batch(list(new), **options)
        return run_tracked(self.model.step, batch, self.pool, self.states, list(tracks))


@dataclasses.dataclass
class Request:
    ids: torch.Tensor
    slot: int
    table: torch.Tensor
    done: int


def alone(model, ids):
    """Logits f32 [len(ids), V] of the model's own cache, all tokens at once."""
    return model(ids[None], KVCache(model.config, 1, len(ids), torch.float32))[0]


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return hybrid(request.param)


@pytest.fixture(scope="module")
def small():
    return hybrid("rotated", layers=4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_prompts_in_chunks_and_tokens_in_an_engines_slots(model, channels_last):
    engine = Engine(model, channels_last=channels_last)
    texts = [ids_of(i, n) for i, n in enumerate((70, 3, 41))]
    requests = [engine.request(text, slot) for text, slot in zip(texts, (5, 1, 8), strict=True)]
    expected = [alone(model, text) for text in texts]
    for counts in ((33, 1, 40), (36, 1, 0), (1, 1, 1)):
        new = [(r, n) for r, n in zip(requests, counts, strict=True) if n]
        got = engine.step(*new)
        for row, (r, _) in zip(got, new, strict=True):
            truth = next(e for e, one in zip(expected, requests, strict=True) if one is r)
            assert torch.equal(row, truth[r.done - 1])


def test_all_rows_of_a_step_that_is_cut(small):
    engine, text = Engine(small), ids_of(2, 50)
    other = ids_of(3, 20)
    requests = engine.request(text, 2), engine.request(other, 3)
    new = [(requests[0], 50), (requests[1], 20)]
    got = engine.step(*new, tracks=[Track(0, 17, 6)], all_rows=True)
    assert torch.equal(got, torch.cat([alone(small, text), alone(small, other)]))


@pytest.mark.parametrize("shared", [1, 63, 64, 65, 300])
def test_a_prefix_is_continued_from_a_state_kept_on_the_way(small, shared):
    """Behind any token of a prompt, at its end, and behind one of a decoding step."""
    engine = Engine(small)
    text = ids_of(4, shared + 9)
    first = engine.request(text, 1)
    rows = engine.step((first, shared + 7), tracks=[Track(0, shared, 2)])
    assert torch.equal(rows[0], alone(small, text)[shared + 6])
    engine.step((first, 1), tracks=[Track(0, shared + 8, 3)])
    for slot, length in ((2, shared), (3, shared + 8)):
        branch = torch.cat([text[:length], ids_of(5, 6)])
        engine.copy_from(slot, 4)
        second = engine.request(branch, 4, like=first, shared=length)
        got = engine.step((second, 6))
        assert torch.equal(got[0], alone(small, branch)[-1])


def test_what_was_preempted_begins_again_in_another_requests_slot(small):
    engine, texts = Engine(small), [ids_of(6, 30), ids_of(7, 30)]
    first, second = (engine.request(text, slot) for text, slot in zip(texts, (1, 2), strict=True))
    engine.step((first, 20), (second, 25))
    again = engine.request(texts[0], 2)  # second has left; nobody cleared its slot
    rows = engine.step((again, 30))
    assert torch.equal(rows[0], alone(small, texts[0])[-1])


# Faults -------------------------------------------------------------------------------------------


def wrong_slot(engine, request):
    request.slot = 7


def one_token_late(engine, request):
    """The state behind one token more than the tree says."""
    other = engine.request(request.ids, 7)
    engine.step((other, request.done + 1))
    engine.copy_from(7, request.slot)


def not_copied(engine, request):
    """What somebody has left there is taken for the state of the prefix."""
    engine.temporal[:, request.slot] = 7.0
    engine.conv[:, request.slot] = 7.0


def state_of_another_prefix(engine, request):
    ids = torch.cat([request.ids[:1] + 1, request.ids[1 : request.done]])
    engine.step((engine.request(ids, request.slot), request.done))


def inputs_of_another(engine, request):
    """Half of a state: what the convolution has seen."""
    engine.conv[:, request.slot] = engine.conv[:, 7]


def one_layer_of_another(engine, request):
    engine.temporal[-1, request.slot] = engine.temporal[-1, 7]


FAULTS = (wrong_slot, one_token_late, not_copied, state_of_another_prefix, inputs_of_another,
          one_layer_of_another)  # fmt: skip


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_fault_of_the_book_keeping_shows(small, fault):
    engine, text = Engine(small), ids_of(8, 70)
    first = engine.request(text, 1)
    engine.step((first, 65), tracks=[Track(0, 64, 2)])
    engine.copy_from(2, 3)
    second = engine.request(torch.cat([text[:64], ids_of(9, 4)]), 3, like=first, shared=64)
    if fault is not None:
        fault(engine, second)
    got = engine.step((second, 4))
    assert torch.equal(got[0], alone(small, second.ids)[-1]) == (fault is None)


def test_two_requests_in_one_slot_are_an_error(small):
    engine = Engine(small)
    new = [(engine.request(ids_of(i, 5), 3), 5) for i in (1, 2)]
    with pytest.raises(RuntimeError, match="state_steps with different slots, got 3 twice"):
        engine.step(*new)


def test_what_the_op_cannot_take_is_said(small):
    engine, config = Engine(small), small.config
    made = engine.temporal, engine.conv
    with pytest.raises(ValueError, match="recurrent of float32, got torch.bfloat16; .* choose"):
        EngineStates(config, made[0].bfloat16(), made[1])
    with pytest.raises(ValueError, match=r"inputs \[3, slots, ...\] with .* numbers .*disagree"):
        EngineStates(config, made[0], made[1][:, :, 1:])
    with pytest.raises(ValueError, match="a slot of recurrent side by side, got strides"):
        EngineStates(config, torch.cat([made[0]] * 2, -1)[..., ::2], made[1])
    with pytest.raises(ValueError, match="as many slots of inputs as of states, 9, got 8"):
        EngineStates(config, made[0], made[1][:, 1:])
    with pytest.raises(ValueError, match="recurrent layers, got none"):
        EngineStates(dataclasses.replace(config, delta_net=None), *made)
    batch = engine.batch([(engine.request(ids_of(1, 9), 1), 9)])
    for tracks in ([Track(0, 10, 2)], [Track(0, 0, 2)], [Track(0, 4, 2), Track(0, 5, 3)]):
        with pytest.raises(ValueError, match="one track of sequence 0, behind 1 to 9 positions"):
            steps_of(batch, tracks)
