"""Attention policies of whole models: what their text means, the same tokens whatever the way."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitnet_ops
import hybrids
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.attention import PRESETS, AttentionPolicyError
from bitnet_ops.generate.engine import Engine, Finished, Limits, NewToken, SchedulerOptions
from bitnet_ops.models import Decoder
from bitnet_ops.nn.blocks import PoolFullError
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import bytes_of_block, kept_of
from engine_schedules import Form, run_schedule
from tiny_models import SMALL, config_of, random_ids, tiny_model

TEXT = random_ids(3, 1, 330)


def model_with(policy: str) -> Decoder:
    model = tiny_model(SMALL["bitnet-offline"])
    model.set_attention(policy)
    return model


@pytest.fixture(
    scope="module",
    params=[
        "window:70,sinks=4",
        "window:20,sinks=3@1",
        "top_k:0.4,sinks=4,dense_below=0",
        "dynamic:min_ratio=0.2,max_ratio=0.8,dense_below=150@0;threshold:0.5,dense_below=0@1",
    ],
)
def model(request: pytest.FixtureRequest) -> Decoder:
    return model_with(request.param)


def in_chunks(model: Decoder, kv_dtype: torch.dtype, *sizes: int) -> Tensor:
    cache = KVCache(model.config, 1, TEXT.shape[1], kv_dtype)
    return torch.cat([model(part, cache) for part in TEXT.split(list(sizes), dim=1)], dim=1)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@torch.inference_mode()
def test_every_way_of_running_it_is_the_same_bit_for_bit(
    model: Decoder, kv_dtype: torch.dtype
) -> None:
    """At once, in chunks, token by token; the one step, and the ops one by one."""
    whole = in_chunks(model, kv_dtype, 330)
    assert torch.equal(in_chunks(model, kv_dtype, 3, 64, 1, 100, 162), whole)
    assert torch.equal(in_chunks(model, kv_dtype, *[1] * 330), whole)
    model.run_as = "ops"
    try:
        assert torch.equal(in_chunks(model, kv_dtype, 200, *[1] * 6, 124), whole)
    finally:
        model.run_as = "program"
    plain = in_chunks(tiny_model(SMALL["bitnet-offline"]), kv_dtype, 330)
    assert torch.equal(whole[:, :20], plain[:, :20])
    assert not torch.equal(whole[:, -1], plain[:, -1])


@torch.inference_mode()
def alone(model: Decoder, prompt: list[int], count: int) -> list[int]:
    cache = KVCache(model.config, 1, len(prompt) + count, torch.bfloat16)
    tokens = [int(model(torch.tensor([prompt]), cache, 1)[0, -1].argmax())]
    while len(tokens) < count:
        tokens.append(int(model(torch.tensor([tokens[-1:]]), cache)[0, -1].argmax()))
    return tokens


def test_the_engine_gives_the_tokens_of_each_text_alone(model: Decoder) -> None:
    ids = TEXT[0].tolist()
    prompts = [ids[:250], ids[:250], ids[:80], [*ids[:144], 7], ids[100:104]]
    engine = Engine(model, prefill_chunk=37)
    expected = [alone(model, prompt, 9) for prompt in prompts]
    for _ in range(2):  # the second time from the prefix cache
        found = engine.generate(prompts, limits=Limits(9))
        assert [generation.token_ids for generation in found] == expected


@pytest.mark.parametrize("max_drafts", [3, "auto"])
def test_drafts_change_no_token(model: Decoder, max_drafts: Any) -> None:
    """Rejected ones may have stood at the end of a page."""
    prompt = [*TEXT[0, :9].tolist() * 18, 5]
    engine = Engine(model)
    run = engine.start([prompt], limits=Limits(120), max_drafts=max_drafts)
    for _ in run:
        pass
    assert run.generations[0].token_ids == alone(model, prompt, 120)
    if max_drafts != "auto":  # which drafts where they pay, so perhaps nowhere
        assert engine.stats().drafted_tokens > engine.stats().accepted_drafts


SCHEDULES = 500 if os.environ.get("BITNET_CI_ALL") == "1" else 24


def test_schedules(model: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Preemption, trims, prefixes in memory and on disk, drafts: no token changes."""
    chooses = "key_bounds" in kept_of(model.config)
    form = Form(
        model.config.vocab_size,
        longest=220,
        block_sizes=(64, 128) if chooses else (16, 64),
        positions=(256, 384, 384, 512, 6400),
        longest_answer=120,
        watermark=0,
    )
    total = Counter[str]()
    for seed in range(SCHEDULES):
        total += run_schedule(model, form, seed, monkeypatch, tmp_path)
    assert all(total[name] for name in ("rejected", "reused", "preempted", "disk")), total


# What a policy says ----------------------------------------------------------------------------


def policies(text: str, **changes: Any) -> list[str | None]:
    config = dataclasses.replace(config_of(SMALL["bitnet-offline"]), **changes).with_attention(text)
    return [str(p) if (p := config.policy(i)) else None for i in range(config.num_hidden_layers)]


def test_what_policies_mean() -> None:
    layers = config_of(SMALL["bitnet-offline"]).num_hidden_layers
    assert policies("window:256") == ["window=256"] * layers
    assert policies("window:256,sinks=4,stride=8") == ["window=256 sinks=4 stride=8"] * layers
    assert policies("top_k:0.25,sinks=4") == ["top_k=0.25 sinks=4"] * layers
    assert policies("threshold:0.1,dense_below=0") == ["threshold=0.1 dense_below=0"] * layers
    mixed = "dynamic:max_ratio=0.5,min_ratio=0.1"
    assert policies(mixed) == ["min_ratio=0.1 max_ratio=0.5"] * layers
    assert policies("window:256,sinks=0") == ["window=256"] * layers
    assert policies("window:9@1") == [None, "window=9", *[None] * (layers - 2)]
    assert policies(" window:9@0;window:8@1 ")[:2] == ["window=9", "window=8"]
    for preset, text in PRESETS.items():
        assert policies(preset) == policies(text)
    own = (5, *[0] * (layers - 1))
    assert policies("window:3", windows=own) == [None, *["window=3"] * (layers - 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window:-1", "window an integer of at least 1, got '-1'"),
        ("window:0", "window an integer of at least 1, got '0'"),
        ("window:4.5", "window an integer of at least 1, got '4.5'"),
        ("window:", "window an integer of at least 1, got ''"),
        ("window:4,sinks=-2", "sinks an integer of at least 0, got '-2'"),
        ("window:4,sinks=1,sinks=2", "each once, got 'sinks'"),
        ("window:4,ratio=1", "keys of window, sinks, stride, each once, got 'ratio'"),
        ("top_k:0", "top_k above 0 and at most 1, got '0'"),
        ("top_k:1.1", "top_k above 0 and at most 1, got '1.1'"),
        ("top_k:nan", "top_k above 0 and at most 1, got 'nan'"),
        ("threshold:-0.5", "threshold above 0 and at most 1, got '-0.5'"),
        ("dynamic:min_ratio=0.5", "max_ratio, got nothing"),
        ("dynamic:min_ratio=0,max_ratio=0.5", "min_ratio above 0 and at most 1, got '0'"),
        ("dynamic:min_ratio=0.5,max_ratio=1.5", "max_ratio above 0 and at most 1, got '1.5'"),
        ("dynamic:min_ratio=0.5,max_ratio=0.4", "min_ratio at most max_ratio, got 0.5"),
        ("dynamic:0.5", "each once, got 'dynamic'"),
        ("windows:4", "one of window:..., top_k:.*got 'windows:4'"),
        ("", "one of window:..., top_k:.*got ''"),
        ("window:4@", "layers as 0-3,7, got ''"),
        ("window:4@1-", "layers as 0-3,7, got '1-'"),
        ("window:4@99", "layers from 0 to 1, got '99'"),
        ("window:4@1-0", "layers from 0 to 1, got '1-0'"),
        ("window:4@1;window:5", "one policy a layer, got two for layer 1"),
    ],
)
def test_what_is_not_clear_is_refused(text: str, words: str) -> None:
    with pytest.raises(AttentionPolicyError, match=f"^attention: expected .*{words}"):
        policies(text, num_hidden_layers=2)


def test_a_policy_beside_a_window_of_the_models_own_is_refused() -> None:
    with pytest.raises(AttentionPolicyError, match="got 0, which has a window of its own .5 pos"):
        policies("window:3@0", windows=(5, 0), num_hidden_layers=2)
    with pytest.raises(AttentionPolicyError, match="got one whose layer 0 has a window of its own"):
        policies("window:3", windows=(5, 5), num_hidden_layers=2)


def test_a_policy_on_a_layer_without_attention_is_refused() -> None:
    """Where it names no layers, it is not that layer's."""
    config = ModelConfig.from_hf(hybrids.nested_config(hybrids.make()))
    layer = config.delta_net.layers[0] if config.delta_net else -1
    with pytest.raises(AttentionPolicyError, match=f"got {layer}, which has no attention"):
        config.with_attention(f"window:3@{layer}")
    assert config.with_attention("window:3").policy(layer) is None


def test_load_takes_a_policy() -> None:
    with pytest.raises(AttentionPolicyError, match="a policy as text, got a int"):
        bitnet_ops.load(attention=256)  # type: ignore[arg-type]
    lm = bitnet_ops.load(attention="window:256,sinks=4@0")
    assert "window=256 sinks=4" in str(lm.model.listing)
    assert lm.config.policy(1) is None
    with pytest.raises(AttentionPolicyError):
        bitnet_ops.load(attention="window")


# Memory ----------------------------------------------------------------------------------------

WINDOW = "window:70,sinks=4"
BLOCKS = 1 + 3 + 1  # of 64: of the sinks, those that a window touches, and the one it leaves


def long_model(positions: int = 4096) -> Decoder:
    model = model_with(WINDOW)
    model.config = dataclasses.replace(model.config, max_position_embeddings=positions)
    return model


def engine_of(model: Decoder, blocks: int, **options: Any) -> Engine:
    """An engine with so many blocks of 64 positions."""
    block = bytes_of_block(model.config, 64, torch.bfloat16)
    return Engine(model, kv_cache_mb=blocks * block / 2**20, **options)


def test_a_stream_holds_as_many_blocks_however_long_it_is() -> None:
    """And its tokens are those of a cache that gives nothing back."""
    model, prompt = long_model(), TEXT[0, :30].tolist()
    engine = engine_of(model, 8)
    engine.add(prompt, limits=Limits(1500))
    tokens, used = [], []
    while engine.has_work:
        tokens += [e.token_id for e in engine.step() if isinstance(e, NewToken)]
        used.append(engine.stats().used_blocks)
    assert max(used) == max(used[200:700]) == max(used[900:]) <= BLOCKS
    assert tokens == alone(model, prompt, 1500)


def test_a_prompt_needs_room_for_what_is_read_alone() -> None:
    """900 tokens in 8 blocks of 64; and twice: the second one goes on where the window begins."""
    model, prompt = long_model(), random_ids(9, 900).tolist()
    engine = engine_of(model, 8, scheduling=SchedulerOptions(64, 4))
    expected = alone(model, prompt, 40)
    for _ in range(2):
        (found,) = engine.generate([prompt], limits=Limits(40))
        assert found.token_ids == expected
    answered = [*prompt, *expected]
    before = engine.stats().reused_tokens
    (found,) = engine.generate([answered], limits=Limits(5))
    assert found.token_ids == alone(model, answered, 5)
    assert engine.stats().reused_tokens - before >= 900, "the window was there"
    dense = tiny_model(SMALL["bitnet-offline"])
    with pytest.raises(PoolFullError):
        engine_of(dense, 7).generate([prompt[:510]], limits=Limits(1))


def test_preempted_streams_come_to_the_same_tokens() -> None:
    model = long_model()
    prompts = [random_ids(i, 40 + 5 * i).tolist() for i in range(4)]
    options = SchedulerOptions(64, 4, watermark=0)
    engine = engine_of(model, 11, scheduling=options)
    found = engine.generate(prompts, limits=Limits(200))
    assert engine.stats().preemptions > 0
    for prompt, generation in zip(prompts, found, strict=True):
        assert generation.token_ids == alone(model, prompt, 200)
    assert engine.stats().used_blocks == 0


def test_caches_with_bounds_are_copied_and_saved(tmp_path: Path) -> None:
    """A fork, and a state that is loaded elsewhere, go on as the cache that they come from."""
    model = model_with("top_k:0.4,dense_below=0")
    cache = KVCache(model.config, 1, 330, torch.int8)
    with torch.inference_mode():
        model(TEXT[:, :300], cache)
        cache.save(tmp_path / "cache")
        other = KVCache(model.config, 1, 330, torch.int8)
        other.restore(tmp_path / "cache")
        caches = [cache.fork(), other, cache]
        found = [model(TEXT[:, 300:], one) for one in caches]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


def test_the_engine_counts_what_attention_reads() -> None:
    """Of 200 tokens by the definition of a window; all of a model without a policy."""
    engine = Engine(model_with("window:64"))
    engine.generate([TEXT[0, :200].tolist()], limits=Limits(1))
    pages = sum(p // 64 + 1 for p in range(200))
    assert 0.5 < engine.stats().attention_read < 1
    read = sum(p // 64 - max(0, p - 63) // 64 + 1 for p in range(200))
    assert engine.stats().attention_read == pytest.approx(read / pages, rel=0.1)  # by groups
    both = Engine(model_with("top_k:0.5,dense_below=128@0"))
    for tokens in (100, 330):  # in one step each; the short one reads all
        both.add(TEXT[0, :tokens].tolist(), limits=Limits(1))
    ended = [event for _ in range(9) for event in both.step() if isinstance(event, Finished)]
    assert ended[0].attention_read == 1
    pages = [p // 64 + 1 for p in range(330)]
    read = [n if p < 128 else math.ceil(n / 2) for p, n in enumerate(pages)]
    assert ended[1].attention_read == pytest.approx(sum(read) / sum(pages), rel=0.03)  # by groups
    plain = Engine(tiny_model(SMALL["bitnet-offline"]))
    plain.generate([TEXT[0, :100].tolist()], limits=Limits(1))
    assert plain.stats().attention_read == 1
