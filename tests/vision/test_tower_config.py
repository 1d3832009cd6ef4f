"""Sizes of towers: what is read of each kind of file, and what is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import towers
from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.vision.config import IMAGE_TOKENS, VisionConfig

GGUF = {
    "general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
    "clip.projector_type": "qwen3vl_merger", "clip.use_gelu": True, "clip.vision.image_size": 768,
    "clip.vision.patch_size": 16, "clip.vision.embedding_length": 1152,
    "clip.vision.feed_forward_length": 4304, "clip.vision.block_count": 27,
    "clip.vision.projection_dim": 4096, "clip.vision.attention.head_count": 16,
    "clip.vision.attention.layer_norm_epsilon": 9.999999974752427e-07,
    "clip.vision.spatial_merge_size": 2, "clip.vision.image_mean": [0.5, 0.5, 0.5],
    "clip.vision.image_std": [0.5, 0.5, 0.5], "clip.vision.is_deepstack_layers": [False] * 27,
}  # fmt: skip
IDS = dict(zip(IMAGE_TOKENS, (248_056, 248_053, 248_054), strict=True))


def hf(vision: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"vision_config": {**towers.SMALL.config(), **(vision or {})}, **towers.IDS, **more}


def test_a_published_config() -> None:
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
              "out_hidden_size": 4096, "num_position_embeddings": 2304, "patch_size": 16,
              "temporal_patch_size": 2, "spatial_merge_size": 2, "model_type": "qwen3_5",
              "deepstack_visual_indexes": [], "initializer_range": 0.02, "in_channels": 3,
              "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
    ids = {"image_token_id": 248_056, "vision_start_token_id": 248_053,
           "vision_end_token_id": 248_054, "video_token_id": 248_057}  # fmt: skip
    found = VisionConfig.from_hf({"vision_config": vision, **ids}, towers.PREPROCESSOR)
    assert found == VisionConfig(27, 1152, 16, 4304, 4096)
    assert (found.head_dim, found.position_side, found.patch_features) == (72, 48, 768)
    assert (found.min_pixels, found.max_pixels) == (65_536, 16_777_216)
    assert VisionConfig.from_hf({"vision_config": vision}) == found  # all of these are the defaults
    assert VisionConfig.from_json(found.to_json()) == found


def test_keys_that_a_writer_leaves_out_have_the_defaults_of_transformers() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

    found = VisionConfig.from_hf({"vision_config": {}})
    theirs = Qwen3_5Config()
    names = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size",
             "patch_size", "temporal_patch_size", "spatial_merge_size",
             "num_position_embeddings")  # fmt: skip
    assert {n: getattr(found, n) for n in names} == {
        n: getattr(theirs.vision_config, n) for n in names
    }
    for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
        assert getattr(found, name) == getattr(theirs, name)


def test_other_limits_and_colours() -> None:
    found = VisionConfig.from_hf(hf(), {
        "min_pixels": 4096, "max_pixels": 1_048_576, "image_mean": [0.48, 0.45, 0.4],
        "image_std": [0.26, 0.26, 0.27], "size": None, "resample": 3, "do_resize": True,
        "rescale_factor": 0.00392156862745098})  # fmt: skip
    assert (found.min_pixels, found.max_pixels) == (4096, 1_048_576)
    assert found.image_mean == (0.48, 0.45, 0.4) and found.image_std == (0.26, 0.26, 0.27)
    assert VisionConfig.from_json(found.to_json()) == found


def test_an_mmproj_file() -> None:
    assert VisionConfig.from_gguf(GGUF, IDS) == VisionConfig(27, 1152, 16, 4304, 4096)
    limits = {"clip.vision.image_min_pixels": 8192, "clip.vision.image_max_pixels": 4_194_304}
    found = VisionConfig.from_gguf({**GGUF, **limits}, {token: i for i, token in enumerate(IDS)})
    assert (found.min_pixels, found.max_pixels) == (8192, 4_194_304)
    ids = found.image_token_id, found.vision_start_token_id, found.vision_end_token_id
    assert ids == (0, 1, 2)
    named = {k: v for k, v in GGUF.items() if k != "clip.projector_type"}
    named["clip.vision.projector_type"] = "qwen3vl_merger"  # a file with audio too
    assert VisionConfig.from_gguf(named, IDS).depth == 27


REFUSED_HF = {
    "deepstack": ({"deepstack_visual_indexes": [5, 11, 17]}, {}, "without deepstack_visual"),
    "windows": ({"fullatt_block_indexes": [7]}, {}, "without fullatt_block_indexes, got"),
    "another model": ({"model_type": "qwen2_5_vl"}, {}, "model_type qwen3_5, .*got qwen2_5_vl"),
    "another GELU": ({"hidden_act": "quick_gelu"}, {}, "hidden_act gelu_pytorch_tanh, got quick"),
    "grey": ({"in_channels": 1}, {}, "in_channels 3, got 1"),
    "patches of 14": ({"patch_size": 14}, {}, r"of 16, 2, 2, got \[14, 2, 2\]"),
    "patches not square": ({"patch_size": [16, 14]}, {}, "patch_size as one number"),
    "odd heads": ({"hidden_size": 30}, {}, "a multiple of 4, got 30 and 2"),
    "heads of half a pair": ({"hidden_size": 36}, {}, "a multiple of 4, got 36 and 2"),
    "heads that do not divide": ({"num_heads": 3}, {}, "a multiple of 4, got 32 and 3"),
    "no square": ({"num_position_embeddings": 63}, {}, "num_position_embeddings to be a square"),
    "no depth": ({"depth": 0}, {}, "depth to be an integer from 1 to 4096, got 0"),
    "a depth of text": ({"depth": "2"}, {}, "depth to be an integer"),
    "a huge width": ({"intermediate_size": 1 << 30}, {}, "intermediate_size to be an integer"),
    "CLIP's patches": ({}, {"patch_size": 14}, "patch_size 16 in preprocessor_config.json, got 14"),
    "bilinear": ({}, {"resample": 2}, "resample 3 in preprocessor_config.json, got 2"),
    "values as they are": ({}, {"do_normalize": False}, "do_normalize True in"),
    "another scale": ({}, {"rescale_factor": 1.0}, "rescale_factor 1/255"),
    "two colours": ({}, {"image_mean": [0.5, 0.5]}, "image_mean as three finite numbers"),
    "no deviation": ({}, {"image_std": [0.5, 0.5, 0.0]}, "image_std as three numbers above 0"),
    "limits the wrong way": ({}, {"min_pixels": 4096, "max_pixels": 2048}, "max_pixels to be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_HF)
def test_other_towers_are_refused_by_name(case: str) -> None:
    vision, preprocessor, message = REFUSED_HF[case]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        VisionConfig.from_hf(hf(vision), preprocessor)
    assert str(caught.value).endswith("convert with --no-vision leaves the tower out")


REFUSED_GGUF = {
    "another projector": ({"clip.projector_type": "mlp"}, "projector_type qwen3vl_merger, got mlp"),
    "no projector": ({"clip.projector_type": None}, "qwen3vl_merger, got None"),
    "audio": ({"clip.has_vision_encoder": False}, "has_vision_encoder true, got False"),
    "deepstack": ({"clip.vision.is_deepstack_layers": [False, True]}, r"false, got true of \[1"),
    "another epsilon": ({"clip.vision.attention.layer_norm_epsilon": 1e-5}, "epsilon 1e-06, got"),
    "no sizes": ({"clip.vision.block_count": None}, "block_count to be an integer, got None"),
    "patches of 14": ({"clip.vision.patch_size": 14}, "image_size in whole patches"),
    "no patches": ({"clip.vision.patch_size": 0}, "image_size in whole patches"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_GGUF)
def test_other_mmproj_files_are_refused_by_name(case: str) -> None:
    change, message = REFUSED_GGUF[case]
    with pytest.raises(UnsupportedModelError, match=message):
        VisionConfig.from_gguf({**GGUF, **change}, IDS)


def test_a_vocabulary_without_images_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no <\|image_pad\|>"):
        VisionConfig.from_gguf(GGUF, {token: i for token, i in IDS.items() if "pad" not in token})
    with pytest.raises(UnsupportedModelError, match="vision_config in config.json, got None"):
        VisionConfig.from_hf({})


@pytest.mark.parametrize("change", [{"more": 1}, {"depth": None}, {"image_mean": 0.5}])
def test_json_of_another_form_is_refused(change: dict[str, Any]) -> None:
    values = {**VisionConfig.from_hf(hf()).to_json(), **change}
    with pytest.raises(UnsupportedModelError, match="^vision: expected"):
        VisionConfig.from_json(values)
    for wrong in (None, [], {k: v for k, v in values.items() if k == "depth"}):
        with pytest.raises(UnsupportedModelError, match="^vision: expected"):
            VisionConfig.from_json(wrong)


def test_a_config_is_frozen_and_can_be_a_key() -> None:
    found = VisionConfig.from_hf(hf())
    assert len({found, dataclasses.replace(found), dataclasses.replace(found, depth=3)}) == 2
