"""Synthetic models: every part valid, the same in memory and in a file, sized like real ones.

Sizes are those of the originals' config.json. Nothing here asserts a speed or reads a text.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import jinja2
import pytest
import torch

from bitnet_ops.cli import main
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import DraftConfig, draft_config
from bitnet_ops.dummy import model as dummy
from bitnet_ops.dummy.configs import CONFIGS, GROUPED, _bonsai2
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.language_model import load
from bitnet_ops.loading.draft import read_draft_head
from bitnet_ops.models import expected_tensors
from bitnet_ops.nn.digits import from_digits
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.packing import PackedWeight
from bitnet_ops.vision.config import IMAGE_TOKENS
from bitnet_ops.vision.weights import load_tower, vision_config
from bitnet_ops.vision.weights import shapes as vision_shapes


def parameters(name: str) -> int:
    return sum(math.prod(spec.shape) for spec in expected_tensors(dummy.config(name)).values())


def test_shapes_are_those_of_the_real_models() -> None:
    assert round(parameters("2b-4t") / 1e6) == 2413  # BitNet b1.58 2B4T
    assert round(parameters("0.7b") / 1e6) == 778  # bitnet_b1_58-large: 679 and two matrices of 49
    assert parameters("bonsai-1.7b") == 1_720_028_160  # as published
    assert parameters("bonsai-4b") == 4_021_784_576
    assert parameters("bonsai-8b") == 8_188_548_096
    assert parameters("llama3-8b") == 8_030_261_248  # Meta's Llama 3 8B
    assert parameters("llama2-7b") == 6_738_415_616  # Llama 2 7B
    assert parameters("2048x24") == 1_188_136_960
    assert round(parameters("falcon3-7b") / 1e7) == 746
    assert round(parameters("bitcpm-3b") / 1e6) == 3606  # 7.21 GB in bfloat16
    assert round(parameters("bitcpm-0.5b") / 1e6) == 434
    # every tensor of the language model, less the signs of the rotation
    for size, count in (
        ("2b", 1_881_825_088),
        ("4b", 4_205_751_296),
        ("9b", 8_953_803_264),
        ("27b", 26_895_998_464),
    ):
        rotation = dummy.config(f"bonsai2-{size}").rotation
        assert rotation is not None
        signs = sum(width for width, _ in rotation.blocks)
        assert parameters(f"bonsai2-{size}") - signs == count
    for size, count in (("2b", 331_416_576), ("9b", 456_010_480)):  # of mmproj files, to the byte
        vision = vision_config(CONFIGS[f"bonsai2-{size}-images"])
        assert vision is not None
        assert sum(math.prod(shape) for shape in vision_shapes(vision).values()) == count
        assert vision.out_hidden_size == dummy.config(f"bonsai2-{size}-images").hidden_size
        assert dummy.config(f"bonsai2-{size}-images").rope_sections == (11, 11, 10)
    assert dummy.config("2b-4t").num_key_value_heads == 5
    assert dummy.config("0.7b").head_dim == 96


def test_codes_are_random_and_valid() -> None:
    tensors = dummy.tensors("tiny")
    zeros, total, seen = 0, 0, set()
    for tensor in tensors.values():
        if isinstance(tensor, PackedWeight):
            codes = tensor.codes()  # rejects a code 3 and a wrong padding code
            zeros += int((codes == 0).sum())
            total += codes.numel()
            seen |= {bytes(row) for row in tensor.weight.numpy()}
    assert 0.38 < zeros / total < 0.42
    rows = sum(t.out_features for t in tensors.values() if isinstance(t, PackedWeight))
    assert len(seen) == rows  # no two rows alike


def test_bonsai_has_yarn_and_scales_of_groups() -> None:
    """A few of its tensors: a whole one takes gigabytes."""
    config = dummy.config("bonsai-8b")
    assert config.rope_scaling is not None and config.rope_scaling.kind == "yarn"
    assert config.max_position_embeddings == 4 * config.rope_scaling.original == 65536
    assert not config.tie_word_embeddings and config.qk_norm and config.vocab_size == 151669
    name = "model.layers.0.self_attn.k_proj.weight"
    specs = {name: expected_tensors(config)[name]}
    pool = dummy._pool(specs, 0)
    tensor = dummy._tensor(name, specs[name], pool, grouped=True)
    assert isinstance(tensor, PackedWeight)
    assert tensor.scale.shape == (1024, 32) and tensor.group_size == 128
    assert tensor.scale.unique().numel() > 30  # bfloat16 has 39 numbers from 0.9 to 1.1


def test_a_hybrid_is_rotated_and_remembers(tmp_path: Path) -> None:
    """In the published form but smaller, since a whole one takes gigabytes."""
    source = _bonsai2(4, 512, 768, heads=2, kv_heads=1, value_heads=16, tied=True, block=256)
    source |= {"vocab_size": 600, "bos_token_id": 1, "eos_token_id": 2}
    specs = expected_tensors(ModelConfig.from_hf(source))
    dummy._write_model(tmp_path / "model.bin", source, specs, 0, grouped=True)
    model = load(tmp_path).model
    signs = [t for name, t in model.state_dict().items() if "rotation" in name]
    assert len(signs) == 3 and all(t.unique().tolist() == [-1, 1] for t in signs)
    first = torch.arange(20)[None].repeat(2, 1)
    first[1, 0] = 599  # what a token nineteen places before did to the last one
    with torch.inference_mode():
        logits = model(first, KVCache(model.config, 2, 20))
    assert torch.isfinite(logits).all() and 0.1 < float(logits.std()) < 2
    assert float((logits[0, -1] - logits[1, -1]).abs().max()) > 0.01


def test_a_file_with_scales_of_groups(tmp_path: Path) -> None:
    source = {**CONFIGS["tiny"], "bitnet_ops": {"format_version": 1}}
    specs = dict(expected_tensors(dummy.config("tiny")))
    dummy._write_model(tmp_path / "model.bin", source, specs, 0, grouped=True)
    model = load(tmp_path).model
    assert model.model.layers[0].mlp.down_proj.group_size == 128
    with torch.inference_mode():
        logits = model(torch.arange(20)[None], KVCache(model.config, 1, 20))
    assert torch.isfinite(logits).all() and 0.1 < float(logits.std()) < 2


def test_a_seed_gives_a_model() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    first, same, other = (dummy.tensors("tiny", seed)[name] for seed in (3, 3, 4))
    assert isinstance(first, PackedWeight) and isinstance(same, PackedWeight)
    assert isinstance(other, PackedWeight)
    assert torch.equal(first.weight, same.weight)
    assert not torch.equal(first.weight, other.weight)


def test_activations_stay_near_one() -> None:
    model = dummy.decoder("tiny")
    ids = torch.arange(64).unsqueeze(0)
    with torch.inference_mode():
        logits = model(ids, KVCache(model.config, 1, 64))
    assert torch.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 2


def test_the_file_is_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dummy", "tiny", str(tmp_path / "new"), "--seed", "5"]) == 0
    assert "model.bin" in capsys.readouterr().out
    prompt, limits = [[1, 2, 3]], Limits(12)
    loaded = load(tmp_path / "new").engine.generate(prompt, limits=limits)
    built = Engine(dummy.decoder("tiny", seed=5)).generate(prompt, limits=limits)
    assert loaded[0].token_ids == built[0].token_ids


def test_a_model_that_reads_images(tmp_path: Path) -> None:
    file = dummy.write("tiny-images", tmp_path / "new")
    tower = load_tower(file)
    assert tower is not None and tower.config.depth == 2
    rows = tower(torch.rand(24, 768) * 2 - 1, [(4, 6)])[0]
    assert rows.shape == (6, 64) and 0.1 < float(rows.std()) < 3
    with load(file.parent) as lm:
        ids = {token: lm.tokenizer.backend.token_to_id(token) for token in IMAGE_TOKENS}
        assert ids == dict(zip(IMAGE_TOKENS, (326, 327, 328), strict=True))
        assert len(lm.engine.generate([[5, 6, 7]], limits=Limits(3))[0].token_ids) == 3
        plain = lm.tokenizer.render_chat([{"role": "user", "content": "What?"}])
    assert plain == "<s>User: What?</s>Assistant: "
    about = json.loads((file.parent / "tokenizer_config.json").read_text())
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    text = jinja2.Template(about["chat_template"]).render(
        messages=[{"role": "user", "content": parts}], bos_token="<s>", eos_token="</s>",
        add_generation_prompt=True)  # fmt: skip
    assert text == "<s>User: <|vision_start|><|image_pad|><|vision_end|>What?</s>Assistant: "
    assert dummy.write("tiny", tmp_path / "blind") and load_tower(tmp_path / "blind") is None


def test_a_model_with_a_head_that_drafts(tmp_path: Path) -> None:
    """The same in memory and in a file, beside the trunk of a model without one."""
    file = dummy.write("tiny-draft", tmp_path / "new", seed=5)
    found = read_draft_head(file)
    assert found is not None
    built, tensors = dummy.draft_head("tiny-draft", seed=5)
    assert found[0] == built == DraftConfig(448, origin="random numbers")
    for name, tensor in tensors.items():
        stored = found[1][name]
        if isinstance(tensor, PackedWeight):
            assert isinstance(stored, PackedWeight) and torch.equal(stored.weight, tensor.weight)
            assert torch.equal(stored.scale, tensor.scale)
            values = from_digits(stored)
            spread = float(values.square().mean()) * values.shape[1]
            assert 0.8 < spread < 1.25, name  # inputs near 1 come out near 1
            assert values.unique().numel() > 27  # levels of more than one scale
        else:
            assert isinstance(stored, torch.Tensor) and torch.equal(stored, tensor)
    dummy.write("tiny", tmp_path / "plain", seed=5)
    with load(file.parent) as lm, load(tmp_path / "plain") as plain:
        first, second = (
            one.engine.generate([[5, 6, 7]], limits=Limits(8))[0] for one in (lm, plain)
        )
        assert first.token_ids == second.token_ids
    with pytest.raises(ValueError, match="with a draft head, got 'tiny'"):
        dummy.draft_head("tiny")


@pytest.mark.parametrize("name", ["2b-4t-draft", "bonsai2-2b-draft", "bonsai2-9b-draft"])
def test_models_with_heads_are_otherwise_those_without(name: str) -> None:
    plain = name.removesuffix("-draft")
    assert dummy.config(name) == dummy.config(plain)
    assert (name in GROUPED) == (plain in GROUPED)
    draft = draft_config(CONFIGS[name])
    assert draft is not None and draft.intermediate_size == dummy.config(name).intermediate_size


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(
        ValueError, match="expected a name among 2b-4t, 0.7b, bonsai-1.7b, .*, got '7b'"
    ):
        dummy.decoder("7b")
