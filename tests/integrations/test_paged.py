"""An engine's own KV cache under our step: the same logits as the model alone, bit for bit.

The engine is made up here: a tensor a layer, slots given out at random, as SGLang does.
"""

from __future__ import annotations

import pytest
import torch

from bitnet_ops.integrations import paged
from bitnet_ops.nn.kv_cache import KVCache
from tiny_models import SMALL, random_ids, tiny_model

SLOTS = 96


class Engine:
    """What SGLang keeps: buffers [slots, KV, D] a layer, and a table of slots a request."""

    def __init__(self, config, dtype, seed):
        shape = SLOTS, config.num_key_value_heads, config.head_dim
        self.buffers = [
            [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)] for _ in "kv"
        ]
        self.table = torch.zeros((3, 32), dtype=torch.int32)
        self.free = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed)).tolist()

    def take(self, request, begin, end):
        slots = [self.free.pop() for _ in range(begin, end)]
        self.table[request, begin:end] = torch.tensor(slots, dtype=torch.int32)
        return slots

    def pool(self):
        stacked = []
        for i, buffers in enumerate(self.buffers):
            whole = paged.stack_layers(buffers)
            self.buffers[i] = list(whole.unbind(0))
            stacked.append(paged.in_blocks(whole, 1))
        return paged.EnginePool(*stacked)


@pytest.mark.parametrize("family", ["bitnet-offline", "llama3-8b-like", "falcon3-like"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_and_tokens_in_an_engines_slots(family, dtype):
    model = tiny_model(SMALL[family])
    engine = Engine(model.config, dtype, seed=3)
    pool, lengths = engine.pool(), [9, 1, 5]
    ids = [random_ids(i, 1, length + 1) for i, length in enumerate(lengths)]
    slots = [slot for r, length in enumerate(lengths) for slot in engine.take(r, 0, length)]
    sizes = torch.tensor(lengths)
    batch = paged.batch_of(
        torch.cat([row[0, :-1] for row in ids]),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.tensor(slots),
        paged.query_starts(sizes),
        sizes,
        engine.table[:, : max(lengths)],
    )
    first = model.step(batch, pool)
    slots = [engine.take(r, length, length + 1)[0] for r, length in enumerate(lengths)]
    batch = paged.batch_of(
        torch.cat([row[0, -1:] for row in ids]),
        sizes,
        torch.tensor(slots),
        torch.arange(len(lengths) + 1),
        sizes + 1,
        engine.table[:, : max(lengths) + 1],
    )
    second = model.step(batch, pool)
    for r, row in enumerate(ids):
        cache = KVCache(model.config, 1, 16, dtype)
        assert torch.equal(first[r], model(row[:, :-1], cache)[0, -1])
        assert torch.equal(second[r], model(row[:, -1:], cache)[0, -1])
    # what the engine itself sees of its buffers is what the step has written
    written = engine.buffers[0][0].float().abs().sum((1, 2)) > 0
    assert int(written.sum()) == sum(lengths) + len(lengths)


def test_all_rows_of_a_prompt_have_states():
    model = tiny_model(SMALL["bitnet-offline"])
    engine = Engine(model.config, torch.float32, seed=4)
    ids = random_ids(7, 1, 6)
    new = torch.tensor([6])
    batch = paged.batch_of(
        ids[0],
        torch.arange(6),
        torch.tensor(engine.take(0, 0, 6)),
        paged.query_starts(new),
        new,
        engine.table[:1, :6],
        all_rows=True,
    )
    states = model.step_states(batch, engine.pool())
    assert torch.equal(model.head(states), model(ids)[0])


def test_layers_that_lie_in_one_tensor_stay_where_they_are():
    whole = torch.zeros(3, 8, 2, 4, dtype=torch.bfloat16)
    stacked = paged.stack_layers(list(whole.unbind(0)))
    assert stacked.data_ptr() == whole.data_ptr() and stacked.shape == whole.shape
    apart = paged.stack_layers([whole[0], whole[2]])
    assert apart.data_ptr() != whole.data_ptr() and apart.shape == (2, 8, 2, 4)


def test_what_the_ops_cannot_take_is_said():
    with pytest.raises(ValueError, match="float32 or bfloat16, got torch.float8_e5m2"):
        paged.stack_layers([torch.zeros(2, 1, 4, dtype=torch.float8_e5m2)])
    with pytest.raises(ValueError, match="layers of one shape and dtype"):
        paged.stack_layers([torch.zeros(2, 1, 4), torch.zeros(3, 1, 4)])
