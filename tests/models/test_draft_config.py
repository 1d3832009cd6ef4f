"""What a model file says of a draft head, and the shapes of its tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

import hybrids
from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.config.draft import KEY, MATRICES, DraftConfig, draft_config
from bitnet_ops.config.draft_shapes import draft_shapes
from bitnet_ops.dummy.configs import CONFIGS

WHOLE = DraftConfig(
    6144, "before", 3, ("mtp.fc", "mtp.layers.0.mlp.down_proj"), "grafted from a base"
)


@pytest.mark.parametrize("draft", [DraftConfig(64), DraftConfig(64, digits=1), WHOLE])
def test_what_is_written_of_a_head_is_read_back(draft: DraftConfig) -> None:
    written = json.loads(json.dumps(draft.to_dict()))
    assert DraftConfig.from_dict(written) == draft
    assert draft_config({PRIVATE_BLOCK: {"format_version": 1, KEY: written}}) == draft


def test_a_key_left_out_has_its_default() -> None:
    found = DraftConfig.from_dict({"intermediate_size": 64})
    assert found == DraftConfig(64, feed="after", digits=3, rotated=(), origin="")


@pytest.mark.parametrize("config", [{}, {PRIVATE_BLOCK: None}, {PRIVATE_BLOCK: {KEY: None}}])
def test_a_file_without_the_key_has_no_head(config: dict[str, Any]) -> None:
    assert draft_config(config) is None


@pytest.mark.parametrize(
    "change, expected",
    [
        ([], "bitnet_ops.draft_head to be an object"),
        ({"depth": 2}, "intermediate_size, rotated, origin alone, got 'depth'"),
        ({"feed": "between"}, "draft_head.feed to be 'after' or 'before', got 'between'"),
        ({"digits": 2}, "bitnet_ops.draft_head.digits to be 1 or 3, got '2'"),
        ({"digits": True}, "bitnet_ops.draft_head.digits to be 1 or 3"),
        ({"intermediate_size": 0}, "intermediate_size to be a positive integer"),
        ({"intermediate_size": None}, "intermediate_size to be a positive integer"),
        ({"rotated": "mtp.fc"}, "rotated to be a list of matrices of the head"),
        ({"rotated": ["mtp.norm"]}, "rotated to be a list of matrices of the head"),
        ({"rotated": [["mtp.fc"]]}, "rotated to be a list of matrices of the head"),
        ({"origin": 1}, "bitnet_ops.draft_head.origin to be a text"),
    ],
)  # fmt: skip
def test_an_entry_of_another_form_is_one_line(change: Any, expected: str) -> None:
    entry = {**WHOLE.to_dict(), **change} if isinstance(change, dict) else change
    with pytest.raises(UnsupportedModelError, match=re.escape(expected)) as raised:
        draft_config({PRIVATE_BLOCK: {KEY: entry}})
    assert "\n" not in str(raised.value)


def test_shapes_are_those_of_a_published_head() -> None:
    """Qwen3.5-2B's mtp.* as vLLM's loader lists them: 15 tensors."""
    found = draft_shapes(ModelConfig.from_hf(CONFIGS["bonsai2-2b"]), 6144)
    layer = "mtp.layers.0."
    assert found == {
        "mtp.fc.weight": (2048, 4096),
        "mtp.pre_fc_norm_embedding.weight": (2048,),
        "mtp.pre_fc_norm_hidden.weight": (2048,),
        f"{layer}input_layernorm.weight": (2048,),
        f"{layer}self_attn.q_proj.weight": (4096, 2048),
        f"{layer}self_attn.k_proj.weight": (512, 2048),
        f"{layer}self_attn.v_proj.weight": (512, 2048),
        f"{layer}self_attn.o_proj.weight": (2048, 2048),
        f"{layer}self_attn.q_norm.weight": (256,),
        f"{layer}self_attn.k_norm.weight": (256,),
        f"{layer}post_attention_layernorm.weight": (2048,),
        f"{layer}mlp.gate_proj.weight": (6144, 2048),
        f"{layer}mlp.up_proj.weight": (6144, 2048),
        f"{layer}mlp.down_proj.weight": (2048, 6144),
        "mtp.norm.weight": (2048,),
    }


def test_a_head_of_the_9b_has_as_many_weights_as_its_bundle() -> None:
    """243,290,624: the difference of the published files' parameters (one layer of Q8_0)."""
    shapes = draft_shapes(ModelConfig.from_hf(CONFIGS["bonsai2-9b"]), 12288)
    matrices = {n: s for n, s in shapes.items() if n.removesuffix(".weight") in MATRICES}
    count = sum(rows * columns for rows, columns in matrices.values())
    norms = sum(shape[0] for name, shape in shapes.items() if name not in matrices)
    assert len(matrices) == len(MATRICES) and count + norms == 243_290_624


@pytest.mark.parametrize("name", ["2b-4t", "llama3-8b"])
def test_without_norms_on_queries_and_gates_there_are_none_in_the_head(name: str) -> None:
    model = ModelConfig.from_hf(CONFIGS[name])
    found = draft_shapes(model, 512)
    queries = model.num_attention_heads * model.head_dim
    assert found["mtp.layers.0.self_attn.q_proj.weight"] == (queries, model.hidden_size)
    assert not any("q_norm" in n or "k_norm" in n for n in found)
    sub_norms = {n: shape for n, shape in found.items() if "sub_norm" in n}
    layer = "mtp.layers.0."
    assert sub_norms == (
        {
            f"{layer}self_attn.attn_sub_norm.weight": (queries,),
            f"{layer}mlp.ffn_sub_norm.weight": (512,),
        }
        if name == "2b-4t"
        else {}
    )
    assert len(found) == 13 + len(sub_norms)


def test_the_width_of_the_mlp_is_the_head_s_own() -> None:
    model = ModelConfig.from_hf(hybrids.text_config(hybrids.make("plain", layers=4)))
    wider = draft_shapes(model, 2 * model.intermediate_size)
    assert wider["mtp.layers.0.mlp.down_proj.weight"] == (256, 2 * model.intermediate_size)
    other = dataclasses.replace(model, intermediate_size=7)
    assert draft_shapes(other, 64) == draft_shapes(model, 64)
