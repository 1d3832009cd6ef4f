"""BitnetOpsHybridForCausalLM over stand-ins of SGLang's pools: `generate`'s logits, bit for bit.

The forwards are those of SGLang's scheduler: prompts in chunks, several requests, states that it
wants for its prefix tree, and requests that have left. The real ones serve in tests/engines.
"""

from __future__ import annotations

import importlib
import types

import pytest
import torch

import engine_surfaces
from bitnet_ops.integrations import CheckpointError
from bitnet_ops.integrations.states import sizes_of
from bitnet_ops.nn.kv_cache import KVCache
from hybrid_models import hybrid

SLOTS, POSITIONS, CHUNK = 9, 500, 64


class Mode:
    """SGLang's ForwardMode, as far as it is asked."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, question):
        return lambda: question == f"is_{self.name}"


class Sglang:
    """Its pools, its attention backend and its forwards; `count` ranks."""

    def __init__(self, config, count=1):
        net, layers = config.delta_net, config.num_hidden_layers - len(config.delta_net.layers)
        inputs, state = sizes_of(net)
        cache = types.SimpleNamespace(
            temporal=torch.zeros(len(net.layers), SLOTS, *state),
            conv=[torch.zeros(len(net.layers), SLOTS, *inputs)],
        )
        self.requests = types.SimpleNamespace(
            req_to_token=torch.zeros(4, 200, dtype=torch.int32),
            mamba_pool=types.SimpleNamespace(mamba_cache=cache),
            get_mamba_indices=lambda rows: self.slot_of[rows],
            translate_mamba_indices=lambda slots: slots,
        )
        self.slot_of = torch.zeros(4, dtype=torch.int32)
        shape = POSITIONS, config.num_key_value_heads, config.head_dim
        kv = types.SimpleNamespace(
            k_buffer=[torch.zeros(shape) for _ in range(layers)],
            v_buffer=[torch.zeros(shape) for _ in range(layers)],
            _init_data_ptrs_and_strides=lambda: None,
        )
        self.backend = types.SimpleNamespace(
            token_to_kv_pool=types.SimpleNamespace(full_kv_pool=kv),
            req_to_token_pool=self.requests,
        )
        self.parallel = types.SimpleNamespace(tp_size=count, pp_size=1)
        self.free = list(range(1, POSITIONS))

    def surface(self):
        def logits_output(next_token_logits):
            return types.SimpleNamespace(next_token_logits=next_token_logits)

        prefix = "sglang.srt"
        return {
            **engine_surfaces.sglang(),
            f"{prefix}.layers.logits_processor": {
                "LogitsProcessor": lambda config: (
                    lambda ids, rows, head, fb: head.apply(head, rows)
                ),
                "LogitsProcessorOutput": logits_output,
            },
            f"{prefix}.model_executor.forward_context": {"get_attn_backend": lambda: self.backend},
            f"{prefix}.runtime_context": {"get_parallel": lambda: self.parallel},
        }

    def forward(self, model, new, *, decode=False, tracks=None, logprob=False, sampling=None):
        """new: of each request (row, slot, its ids, where it begins); tracks: of each None or
        (SGLang's number of positions, slot).
        """
        counts = torch.tensor([len(ids) for _, _, ids, _ in new])
        starts = torch.tensor([start for *_, start in new])
        for row, slot, ids, start in new:
            self.slot_of[row] = slot
            places = [self.free.pop() for _ in ids]
            self.requests.req_to_token[row, start : start + len(ids)] = torch.tensor(places)
        rows = torch.tensor([row for row, *_ in new])
        where = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        asked = tracks or [None] * len(new)
        lengths = torch.tensor([-1 if t is None else t[0] for t in asked])
        fb = types.SimpleNamespace(
            forward_mode=Mode("decode" if decode else "extend"),
            seq_lens=starts + counts,
            extend_seq_lens=counts,
            extend_prefix_lens=starts,
            req_pool_indices=rows,
            out_cache_loc=torch.cat(
                [self.requests.req_to_token[row, w] for row, w in zip(rows, where, strict=True)]
            ),
            return_logprob=logprob,
            sampling_info=sampling,
            capture_hidden_mode=types.SimpleNamespace(need_capture=lambda: False),
            mamba_track_mask=torch.tensor([t is not None for t in asked]) if tracks else None,
            mamba_track_indices=torch.tensor([-1 if t is None else t[1] for t in asked])
            if tracks
            else None,
            mamba_track_aligned_lens=lambda: (lengths - starts) // CHUNK * CHUNK,
        )
        ids = torch.cat([ids for _, _, ids, _ in new])
        with torch.no_grad():
            found = model(ids, torch.cat(where), fb)
        return found if logprob else found.next_token_logits


@pytest.fixture(scope="module")
def decoder():
    return hybrid("rotated", layers=4)


@pytest.fixture
def engine(decoder):
    return Sglang(decoder.config)


def load(monkeypatch, engine, decoder):
    engine_surfaces.install(monkeypatch, engine.surface())
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    whole = importlib.import_module("bitnet_ops.integrations.sglang.models.whole")
    config = types.SimpleNamespace(vocab_size=decoder.config.vocab_size)
    model = whole.BitnetOpsHybridForCausalLM(config)
    model._head = whole._Head(decoder)
    return model


@pytest.fixture
def model(monkeypatch, engine, decoder):
    return load(monkeypatch, engine, decoder)


def ids_of(seed, count):
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed))


def alone(decoder, ids):
    return decoder(ids[None], KVCache(decoder.config, 1, len(ids), torch.float32))[0]


def test_chunks_of_prompts_and_tokens_of_several_requests(engine, model, decoder):
    a, b = ids_of(1, 80), ids_of(2, 9)
    truth = [alone(decoder, a), alone(decoder, b)]
    rows = engine.forward(model, [(2, 5, a[:50], 0), (1, 3, b[:8], 0)])
    assert torch.equal(rows, torch.stack([truth[0][49], truth[1][7]]))
    rows = engine.forward(model, [(2, 5, a[50:79], 50)])
    assert torch.equal(rows[0], truth[0][78])
    rows = engine.forward(model, [(1, 3, b[8:], 8), (2, 5, a[79:], 79)], decode=True)
    assert torch.equal(rows, torch.stack([truth[1][8], truth[0][79]]))
    rows = engine.forward(model, [(3, 4, a, 0)], logprob=True)
    assert torch.equal(rows, truth[0])


GREEDY = {"is_all_greedy": True, "grammars": [None], "penalizer_orchestrator": None}


@pytest.mark.parametrize(
    ("change", "all_wanted"),
    [
        ({}, False),
        ({"has_custom_logit_processor": False, "logit_bias": None}, False),
        ({"is_all_greedy": False}, True),
        ({"grammars": [None, "JSON"]}, True),
        ({"penalizer_orchestrator": types.SimpleNamespace(is_required=True)}, True),
        ({"penalizer_orchestrator": types.SimpleNamespace(is_required=False)}, False),
        ({"logit_bias": torch.zeros(1)}, True),
        ({"has_custom_logit_processor": True}, True),
        ({"acc_scaling_penalties": torch.ones(1)}, True),
        ({"return_sampling_masks": [False]}, False),
        ({"return_sampling_masks": [False, True]}, True),
    ],
)
def test_only_the_largest_logit_where_nothing_else_is_asked_of_them(
    engine, model, decoder, change, all_wanted
):
    text, asked = ids_of(9, 30), []
    model._head.decoder = types.SimpleNamespace(
        config=decoder.config,
        step=lambda batch, pool: asked.append(batch) or decoder.step(batch, pool),
    )
    sampling = types.SimpleNamespace(**{**GREEDY, **change})
    rows = engine.forward(model, [(1, 1, text, 0)], sampling=sampling)
    truth = alone(decoder, text)[-1]
    assert asked[0].largest == (0 if all_wanted else 1)
    assert rows[0].argmax() == truth.argmax() and rows[0].max() == truth.max()
    assert not all_wanted or torch.equal(rows[0], truth)


@pytest.mark.parametrize("asked", [150, 129, 128, 65])
def test_states_are_kept_behind_whole_chunks_of_a_prompt(engine, model, decoder, asked):
    """SGLang names a number of positions; what is kept is behind the last chunk within it."""
    text, kept = ids_of(3, 150), asked // CHUNK * CHUNK
    rows = engine.forward(model, [(1, 1, text, 0)], tracks=[(asked, 7)])
    assert torch.equal(rows[0], alone(decoder, text)[-1])
    other = torch.cat([text[:kept], ids_of(4, 5)])
    engine.requests.req_to_token[2] = engine.requests.req_to_token[1]
    rows = engine.forward(model, [(2, 7, other[kept:], kept)])
    assert torch.equal(rows[0], alone(decoder, other)[-1])


def test_states_are_kept_behind_a_decoding_step(engine, model, decoder):
    text, other = ids_of(5, 20), ids_of(6, 4)
    engine.forward(model, [(1, 1, text[:19], 0), (2, 2, other[:3], 0)])
    new = [(1, 1, text[19:], 19), (2, 2, other[3:], 3)]
    # the second has left meanwhile: nothing is to be written for it
    before = engine.requests.mamba_pool.mamba_cache.temporal[:, -1].clone()
    engine.forward(model, new, decode=True, tracks=[(0, 6), (0, -1)])
    assert torch.equal(engine.requests.mamba_pool.mamba_cache.temporal[:, -1], before)
    longer = torch.cat([text, ids_of(7, 3)])
    engine.requests.req_to_token[3] = engine.requests.req_to_token[1]
    rows = engine.forward(model, [(3, 6, longer[20:], 20)])
    assert torch.equal(rows[0], alone(decoder, longer)[-1])


def test_what_a_converted_model_does_not_take_is_said(monkeypatch, engine, model, decoder):
    fb = types.SimpleNamespace()
    with pytest.raises(ValueError, match="expected token ids, got input_embeds"):
        model(torch.tensor([1]), torch.tensor([0]), fb, torch.zeros(1, 4))
    with pytest.raises(CheckpointError, match=r"size 1, got 2 and 1; .* --dp 2"):
        load(monkeypatch, Sglang(decoder.config, count=2), decoder)
