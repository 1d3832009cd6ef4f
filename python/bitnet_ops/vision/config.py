"""The sizes of a tower for images, its tokens and the limits of its pixels (Qwen3.5).

Sources: transformers 5.12 `configuration_qwen3_5.py`, whose defaults hold for keys that are absent,
since that is how its writer leaves defaults out; llama.cpp's converter of Qwen3-VL for the keys of
an mmproj file. Towers of other maths are refused by name: their features would be wrong numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bitnet_ops.config.values import MAX_LAYERS, UnsupportedModelError

IMAGE_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
PROJECTOR = "qwen3vl_merger"
EPSILON = 1e-6  # of every norm; no file states it
# of the published preprocessor_config.json, for a file without one
MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216
_HALVES = (0.5, 0.5, 0.5)
_MAX_WIDTH = 1 << 17  # no published tower has a tenth of it
_MODEL_TYPES = {"qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"}
_WITHOUT = "convert with --no-vision leaves the tower out"
_RESCALE, _BICUBIC = 1 / 255, 3
# of towers with other maths, by what they say beside ours
_OTHER_MATHS = ("deepstack_visual_indexes", "fullatt_block_indexes", "window_size")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of a tower, ids of its tokens, and what preprocessing needs.

    depth: blocks. hidden_size: of a patch. out_hidden_size: of a row, that of the text model.
    num_position_embeddings: of a square grid of learned positions. image_token_id: of the token in
    whose places the rows go. image_mean, image_std: of the three colours, of values from 0 to 1.
    min_pixels, max_pixels: areas that an image is resized to lie between.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304
    image_token_id: int = 248_056
    vision_start_token_id: int = 248_053
    vision_end_token_id: int = 248_054
    image_mean: tuple[float, ...] = _HALVES
    image_std: tuple[float, ...] = _HALVES
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        _integer("depth", self.depth, MAX_LAYERS)
        for name in ("hidden_size", "num_heads", "intermediate_size", "out_hidden_size"):
            _integer(name, getattr(self, name), _MAX_WIDTH)
        _integer("num_position_embeddings", self.num_position_embeddings, 1 << 22)
        for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
            _integer(name, getattr(self, name), 2**31 - 1, least=0)
        shape = self.patch_size, self.temporal_patch_size, self.spatial_merge_size
        if shape != (16, 2, 2):
            names = "patch_size, temporal_patch_size, spatial_merge_size"
            _refuse(f"{names} of 16, 2, 2", list(shape), "other patches are not implemented")
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            expected = "hidden_size of num_heads heads whose width is a multiple of 4"
            _refuse(expected, f"{self.hidden_size} and {self.num_heads}")
        if self.position_side**2 != self.num_position_embeddings:
            _refuse("num_position_embeddings to be a square", self.num_position_embeddings)
        for name in ("image_mean", "image_std"):
            _colours(name, getattr(self, name))
        smallest = (self.patch_size * self.spatial_merge_size) ** 2
        _integer("min_pixels", self.min_pixels, 1 << 40)
        _integer("max_pixels", self.max_pixels, 1 << 40, least=max(self.min_pixels, smallest))

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def position_side(self) -> int:
        """Rows, and columns, of the grid of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_features(self) -> int:
        """Values of a patch of a still image: three colours, rows, columns."""
        return 3 * self.patch_size**2

    def to_json(self) -> dict[str, Any]:
        """A dict of numbers and lists for a file's config."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: object) -> VisionConfig:
        """What `to_json` made; UnsupportedModelError for anything else."""
        if not isinstance(values, Mapping):
            _refuse("an object with the sizes of a tower", values)
        names = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(names))
        required = [n for n, f in names.items() if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if unknown or missing:
            _refuse(f"the keys {', '.join(names)}", f"{unknown or 'none'} more, {missing} missing")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**given)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None = None
    ) -> VisionConfig:
        """Of a published config.json, the outer object, and of preprocessor_config.json."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            _refuse("vision_config in config.json", vision)
        _check_maths(vision)
        sizes = {
            "depth": vision.get("depth", 27),
            "hidden_size": vision.get("hidden_size", 1152),
            "num_heads": vision.get("num_heads", 16),
            "intermediate_size": vision.get("intermediate_size", 4304),
            "out_hidden_size": vision.get("out_hidden_size", 3584),
            "patch_size": _one("patch_size", vision.get("patch_size", 16)),
            "temporal_patch_size": _one(
                "temporal_patch_size", vision.get("temporal_patch_size", 2)
            ),
            "spatial_merge_size": vision.get("spatial_merge_size", 2),
            "num_position_embeddings": vision.get("num_position_embeddings", 2304),
        }
        names = "image_token_id", "vision_start_token_id", "vision_end_token_id"
        ids = {name: config[name] for name in names if config.get(name) is not None}
        return cls(**sizes, **ids, **_preprocessing(preprocessor or {}, sizes))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], ids: Mapping[str, int]) -> VisionConfig:
        """Of an mmproj file; `ids`: of IMAGE_TOKENS in the text model's vocabulary."""
        check_projector(metadata)
        absent = [token for token in IMAGE_TOKENS if token not in ids]
        if absent:
            _refuse("the tokens of images in the vocabulary", f"no {', '.join(absent)}")
        values = {name: _gguf(metadata, key) for name, key in _GGUF_SIZES.items()}
        size, patch = _gguf(metadata, "image_size"), values["patch_size"]
        if not patch or size % patch:
            _refuse("clip.vision.image_size in whole patches", f"{size} and {patch}")
        epsilon = metadata.get("clip.vision.attention.layer_norm_epsilon", EPSILON)
        if not isinstance(epsilon, float) or not math.isclose(epsilon, EPSILON, rel_tol=1e-5):
            _refuse(f"clip.vision.attention.layer_norm_epsilon {EPSILON:g}", epsilon)
        mean, std = (metadata.get(f"clip.vision.image_{k}", _HALVES) for k in ("mean", "std"))
        limits = {
            name: int(metadata[f"clip.vision.image_{name}"])
            for name in ("min_pixels", "max_pixels")
            if isinstance(metadata.get(f"clip.vision.image_{name}"), int)
        }
        pad, start, end = (ids[token] for token in IMAGE_TOKENS)
        return cls(
            **values,
            num_position_embeddings=(size // patch) ** 2,
            image_token_id=pad,
            vision_start_token_id=start,
            vision_end_token_id=end,
            image_mean=_floats("image_mean", mean),
            image_std=_floats("image_std", std),
            **limits,
        )


_GGUF_SIZES = {
    "depth": "block_count",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "out_hidden_size": "projection_dim",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
}


def check_projector(metadata: Mapping[str, Any]) -> None:
    """Refuse an mmproj file of another tower than ours."""
    kinds = [metadata.get(f"clip.{key}projector_type") for key in ("", "vision.")]
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind != PROJECTOR:
        _refuse(f"clip.projector_type {PROJECTOR}", kind, "other projectors are not implemented")
    if metadata.get("clip.has_vision_encoder", True) is not True:
        _refuse("clip.has_vision_encoder true", metadata["clip.has_vision_encoder"])
    flags = metadata.get("clip.vision.is_deepstack_layers")
    if flags is not None and any(flags):
        layers = [i for i, flag in enumerate(flags) if flag]
        _refuse("clip.vision.is_deepstack_layers all false", f"true of {layers}",
                "features for layers of the text model are not implemented")  # fmt: skip


def _check_maths(vision: Mapping[str, Any]) -> None:
    kind = vision.get("model_type", "qwen3_5")
    if kind not in _MODEL_TYPES:
        _refuse(f"vision_config of model_type {', '.join(sorted(_MODEL_TYPES))}", kind)
    for name in _OTHER_MATHS:
        if vision.get(name):
            _refuse(
                f"vision_config without {name}", vision[name], "such towers are not implemented"
            )
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        _refuse("vision_config with hidden_act gelu_pytorch_tanh", vision["hidden_act"])
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    if channels != 3:
        _refuse("vision_config with in_channels 3", channels)


def _preprocessing(found: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What preprocessor_config.json says of pixels; refuses steps that are not taken here."""
    fixed = {
        "patch_size": sizes["patch_size"],
        "temporal_patch_size": sizes["temporal_patch_size"],
        "merge_size": sizes["spatial_merge_size"],
        "resample": _BICUBIC,
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
    }
    for name, expected in fixed.items():
        if found.get(name, expected) not in (None, expected):
            _refuse(f"{name} {expected} in preprocessor_config.json", found[name])
    rescale = found.get("rescale_factor")
    if rescale is not None and not math.isclose(rescale, _RESCALE, rel_tol=1e-6):
        _refuse("rescale_factor 1/255 in preprocessor_config.json", rescale)
    size = found.get("size") or {}
    if not isinstance(size, Mapping):
        _refuse("size as an object in preprocessor_config.json", size)
    limits = {
        "min_pixels": found.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
        "max_pixels": found.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
    }
    mean, std = (found.get(name) or _HALVES for name in ("image_mean", "image_std"))
    return {**limits, "image_mean": _floats("image_mean", mean),
            "image_std": _floats("image_std", std)}  # fmt: skip


# Single values ------------------------------------------------------------------------------------


def _refuse(
    expected: str, got: object, remedy: str = "such towers are not implemented"
) -> NoReturn:
    raise UnsupportedModelError(f"vision: expected {expected}, got {got}; {remedy}; {_WITHOUT}")


def _integer(name: str, value: object, most: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        _refuse(f"{name} to be an integer from {least} to {most}", value, "repair the config")


def _one(name: str, value: Any) -> Any:
    """A size that may be written as a list of equal ones."""
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            _refuse(f"{name} as one number", value)
        return value[0]
    return value


def _gguf(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(f"clip.vision.{key}")
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse(f"clip.vision.{key} to be an integer", value, "the file is no tower for images")
    return int(value)


def _floats(name: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(
            round(float(value), 7) for value in values
        )  # float32 of a GGUF: 0.5, 0.4814547
    except (TypeError, ValueError):
        _refuse(f"{name} as three numbers", values, "repair the config")


def _colours(name: str, values: Sequence[float]) -> None:
    numbers = isinstance(values, tuple) and len(values) == 3
    numbers = numbers and all(isinstance(value, int | float) for value in values)
    if not numbers or not all(math.isfinite(v) for v in values):
        _refuse(f"{name} as three finite numbers", values, "repair the config")
    if name == "image_std" and not all(value > 0 for value in values):
        _refuse(f"{name} as three numbers above 0", values, "repair the config")
