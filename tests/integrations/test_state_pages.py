"""One pool of pages for keys, values and states, as vLLM keeps it: the logits of the model alone.

The engine is made up here: it hands out pages, of which each is a block of keys and values or the
states of a sequence, and copies a page where another sequence, or the next page, goes on from it.
Every fault of its book-keeping that is planted here has to show, in the logits or as an error.
"""

from __future__ import annotations

import pytest
import torch

from bitnet_ops.integrations import paged
from bitnet_ops.integrations.states import EngineStates, sizes_of
from bitnet_ops.nn.kv_cache import KVCache
from hybrid_models import hybrid

PAGES, BLOCK = 24, 16


def ids_of(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator)


class Engine:
    """Pages float32 [PAGES, floats], full of what must not be read."""

    def __init__(self, model, pages=PAGES):
        config, self.model = model.config, model
        net = config.delta_net
        inputs, state = sizes_of(net)
        layers = len(net.layers)
        attention = config.num_hidden_layers - layers
        heads, dim = config.num_key_value_heads, config.head_dim
        sizes = [layers * torch.Size(shape).numel() for shape in (state, inputs)]
        keys = attention * heads * 2 * BLOCK * dim
        # one more behind the last, for views of other memory
        memory = torch.full((pages + 1, max(sum(sizes), keys) + 16), float("nan"))
        self.pages = memory[:pages]
        recurrent, inputs = (
            part.unflatten(1, (layers, *shape)).transpose(0, 1)
            for part, shape in zip(
                self.pages[:, : sum(sizes)].split(sizes, 1), (state, inputs), strict=True
            )
        )
        split = self.pages[:, :keys].unflatten(1, (attention, heads, 2, BLOCK, dim))
        key, value = split.permute(3, 1, 0, 4, 2, 5)
        self.states = EngineStates(config, recurrent, inputs)
        self.pool = paged.EnginePool(key, value, self.states)
        self.free = list(range(1, pages))

    def take(self, count=1):
        return [self.free.pop() for _ in range(count)]

    def request(self, ids, blocks=(), state=None, done=0):
        """A sequence whose first `done` positions lie in `blocks`, its state in a page."""
        more = -(-len(ids) // BLOCK) - len(blocks)
        own = self.take() if state is None else [state]
        return Request(ids, [*blocks, *self.take(more)], own[0], done)

    def step(self, *new):
        """Logits behind the next tokens of (request, how many)."""
        parts = [(r, slice(r.done, r.done + count)) for r, count in new]
        positions = [torch.arange(place.start, place.stop) for _, place in parts]
        longest = max(len(r.blocks) for r, _ in parts)
        table = torch.zeros(len(new), longest, dtype=torch.int32)
        for i, (r, _) in enumerate(parts):
            table[i, : len(r.blocks)] = torch.tensor(r.blocks)
        slots = [
            table[i, at.div(BLOCK, rounding_mode="floor")].long() * BLOCK + at % BLOCK
            for i, at in enumerate(positions)
        ]
        for r, place in parts:
            r.done = place.stop
        batch = paged.batch_of(
            torch.cat([r.ids[place] for r, place in parts]), torch.cat(positions),
            torch.cat(slots), paged.query_starts(torch.tensor([n for _, n in new])),
            torch.tensor([r.done for r, _ in parts]), table,
            state_slots=torch.tensor([r.state for r, _ in parts]),
        )  # fmt: skip
        return self.model.step(batch, self.pool)


class Request:
    def __init__(self, ids, blocks, state, done):
        self.ids, self.blocks, self.state, self.done = ids, blocks, state, done


def alone(model, ids):
    return model(ids[None], KVCache(model.config, 1, len(ids), torch.float32))[0]


@pytest.fixture(scope="module", params=("plain", "square"))
def model(request):
    return hybrid(request.param)


@pytest.fixture(scope="module")
def small():
    return hybrid("rotated", layers=4)


def test_pages_of_both_kinds_lie_between_each_other(model):
    engine = Engine(model)
    texts = [ids_of(i, n) for i, n in enumerate((70, 3, 41))]
    requests = [engine.request(text) for text in texts]
    expected = [alone(model, text) for text in texts]
    for counts in ((33, 1, 40), (36, 1, 0), (1, 1, 1)):
        new = [(r, n) for r, n in zip(requests, counts, strict=True) if n]
        truth = [expected[requests.index(r)][r.done + n - 1] for r, n in new]
        assert torch.equal(engine.step(*new), torch.stack(truth))


def test_a_page_is_used_as_the_other_kind_afterwards(small):
    engine = Engine(small, pages=5)
    for seed in range(3):
        ids = ids_of(seed, 40)
        request = engine.request(ids)
        assert torch.equal(engine.step((request, 40))[0], alone(small, ids)[39])
        engine.free = [request.state, *request.blocks]  # the state's page is a block's next


def prefix(engine, ids, length):
    """(blocks, page of the state) behind the first `length` ids, as a prefix cache keeps them."""
    request = engine.request(ids[:length])
    engine.step((request, length))
    return request.blocks, request.state


def test_a_prefix_is_reused_with_a_copy_of_its_state(small):
    engine, ids = Engine(small), ids_of(5, 70)
    blocks, state = prefix(engine, ids, 48)
    expected = alone(small, ids)
    for _ in range(2):  # the checkpoint stays what it was
        (page,) = engine.take()
        engine.pages[page] = engine.pages[state]
        request = engine.request(ids, blocks, page, done=48)
        assert torch.equal(engine.step((request, 22))[0], expected[69])


def shows(engine, ids, blocks, page):
    request = engine.request(ids, blocks, page, done=48)
    return not torch.equal(engine.step((request, 22))[0], alone(engine.model, ids)[69])


def test_a_reused_prefix_with_a_wrong_state_shows(small):
    engine, ids = Engine(small), ids_of(5, 70)
    blocks, _ = prefix(engine, ids, 48)
    _, early = prefix(engine, ids, 47)  # one token before
    _, others = prefix(engine, ids_of(6, 70), 48)  # of another request
    (fresh,) = engine.take()
    engine.pages[fresh] = 0.0  # no copy was made
    assert all(shows(engine, ids, blocks, page) for page in (early, others, fresh))


def test_a_page_that_somebody_else_has_is_rejected(small):
    engine, ids = Engine(small), ids_of(7, 40)
    request, other = engine.request(ids), engine.request(ids_of(8, 40))
    own = request.state
    for page in (request.blocks[0], other.blocks[2], request.blocks[2]):
        request.state = page
        with pytest.raises(RuntimeError, match=f"with slots that hold no keys and values of this "
                           f"step, got {page}, a block of one of its sequences"):  # fmt: skip
            engine.step((request, 40), (other, 40))
        request.done = other.done = 0
    request.state = own
    assert torch.equal(engine.step((request, 40), (other, 40))[0], alone(small, ids)[39])


def shifted(tensor, floats):
    """The same view of memory so many floats further on."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + floats)


@pytest.mark.parametrize(
    ("name", "floats", "message"),
    [
        ("inputs", -8, "expected inputs in its own memory, got memory shared with recurrent"),
        ("recurrent", 8, "expected inputs in its own memory, got memory shared with recurrent"),
        # what lies at the end of a page would reach into the next one
        ("inputs", 64, "inputs in its own memory, got memory shared"),
    ],
)
def test_states_that_lie_otherwise_are_rejected(small, name, floats, message):
    engine, ids = Engine(small), ids_of(9, 20)
    caches = engine.pool.caches()
    engine.pool._caches = {**caches, name: shifted(caches[name], floats)}
    request = engine.request(ids)
    with pytest.raises(RuntimeError, match=message):
        engine.step((request, 20))


def test_blocks_of_another_size_are_rejected(small):
    """Keys in the memory of states that are cut otherwise: slot n is not block n."""
    engine, ids = Engine(small), ids_of(9, 20)
    key, value = engine.pool.key_pool, engine.pool.value_pool
    strides = key.stride(0), key.stride(1) - 64, *key.stride()[2:]
    engine.pool._caches = engine.pool.caches() | {
        name: pool.as_strided(pool.shape, strides, pool.storage_offset())
        for name, pool in (("key", key), ("value", value))
    }
    with pytest.raises(RuntimeError, match="or slot n within block n of key_pool, got memory sh"):
        engine.step((engine.request(ids), 20))
