"""Hybrids: layers of Gated DeltaNet between layers of attention, and rotated matrices (Qwen3.5).

Sources: transformers 5.24 `configuration_qwen3_5.py`; of the rotation the keys that Bonsai 2's
files carry. A published config.json nests the decoder under `text_config`; `flat` brings it to the
form of `Qwen3_5ForCausalLM`, which alone is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from bitnet_ops.config.keys import HARMLESS, MATHS, PRIVATE_BLOCK, READ, REMARKS
from bitnet_ops.config.values import (
    MAX_LAYERS,
    UnsupportedModelError,
    flag,
    integer,
    number,
    reject,
)
from bitnet_ops.errors import printable

FULL, LINEAR = "full_attention", "linear_attention"
# tensors with the signs of a rotation: behind it the width of the input that they belong to
ROTATION = "model.rotation."
_INTERVAL = 4  # every fourth layer has attention where a config.json is silent
_MIN_BLOCK, _MAX_BLOCK = 16, 1 << 13

# keys of a family of hybrids that are read here
KEYS = frozenset(
    """linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads layer_types full_attention_interval partial_rotary_factor
    attn_output_gate output_gate_type mamba_ssm_dtype mlp_only_layers mtp_num_hidden_layers
    mtp_use_dedicated_embeddings num_nextn_predict_layers""".split()
)
# of rope_parameters: they place tokens of images; a text's three positions are equal
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")
# of the outer object: what it shares with the decoder, which transformers reads there
_SHARED = {"architectures", "model_type", "quantization_config", "tie_word_embeddings",
           PRIVATE_BLOCK}  # fmt: skip
_KNOWN = READ | HARMLESS | MATHS.keys() | REMARKS.keys() | KEYS
# its own: the decoder's dictionary, the tower for images (vision/config.py), ids of its tokens
_OUTER = {"text_config", "vision_config", "image_token_id", "video_token_id",
          "vision_start_token_id", "vision_end_token_id", "language_model_only",
          "generation_config"}  # fmt: skip
NESTED = {"qwen3_5": ("qwen3_5_text", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")}


_FLAT = frozenset(inner for inner, *_ in NESTED.values())


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the Gated DeltaNet layers, and which layers they are, from 0 on.

    A value head n has the queries and keys of head n // (value_heads / key_heads). kernel: inputs
    that the causal convolution sees, the current one included.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    @property
    def keys(self) -> int:
        """Features of all keys, as of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class Rotation:
    """Ternary matrices that hold W' where W = (W' H) diag(s): their input becomes H (s x).

    H: normalised Walsh-Hadamard in Sylvester's order, on each block of the input; s: signs, one
    vector for an input width. An embedding's row z means s * (H z).

    blocks: the block of each input width, a power of two that divides it. plain: modules of ternary
    matrices that are not rotated, the embedding and the head included.
    """

    blocks: tuple[tuple[int, int], ...]
    plain: frozenset[str] = frozenset()

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of the tensors that hold the signs."""
        return {f"{ROTATION}{w}.weight": (w // block, block) for w, block in self.blocks}

    def block(self, width: int) -> int:
        """Of an input width; 0: it is not rotated."""
        return dict(self.blocks).get(width, 0)

    def rotates(self, module: str, width: int) -> bool:
        """Whether a Hadamard transform is due of the input of `module`, a ternary matrix."""
        return module not in self.plain and self.block(width) != 0


def flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's config of a published, nested one; any other as it is.

    transformers builds the decoder of its `text_config` alone, and writers put into the outer
    object what they like. So a key that is not known there is passed over (`passed_over` lists
    them), whereas inside it is rejected, since it may change the maths. A key that would mean
    something of the decoder must stand inside: outside alone it is rejected, beside one inside it
    says nothing.

    Raises UnsupportedModelError for that, and for a nested one without a `text_config`.
    """
    if str(config.get("model_type")) not in NESTED:
        return config
    model_type, outer, inner = NESTED[str(config["model_type"])]
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", model_type) != model_type:
        shown = text if not isinstance(text, Mapping) else text.get("model_type")
        raise reject("text_config", shown, f"to be an object of model_type {model_type!r}",
                     "repair config.json")  # fmt: skip
    names = config.get("architectures")
    if names not in (None, [outer], [inner]):
        raise reject("architectures", names, f"[{outer!r}]", "other architectures are not "
                     "implemented")  # fmt: skip
    result = {k: value for k, value in config.items() if k in _KNOWN and k not in _OUTER}
    for key, value in result.items():
        if value is not None and text.get(key) is None and _is_decoders(key, value):
            raise reject(key, str(value)[:60], "to stand in text_config, which describes the "
                         "decoder", "move it there if it holds for the decoder")  # fmt: skip
    for key, value in text.items():
        if key not in ("architectures", "model_type") and value is not None:
            result[key] = value
    # both levels have it, and transformers ties by the outer one
    if config.get("tie_word_embeddings") is not None:
        result["tie_word_embeddings"] = config["tie_word_embeddings"]
    return {**result, "model_type": model_type, "architectures": [inner]}


def _is_decoders(key: str, value: object) -> bool:
    """Whether a key of an outer object would change what the decoder computes."""
    if key in _SHARED or key in HARMLESS or key in REMARKS or key.startswith(("mtp_", "num_nextn")):
        return False
    return key not in MATHS or value not in MATHS[key][0]


def passed_over(config: Mapping[str, Any]) -> list[str]:
    """Keys of a nested config's outer object that nothing here knows."""
    if str(config.get("model_type")) not in NESTED:
        return []
    return sorted(k for k, v in config.items() if v is not None and k not in _KNOWN | _OUTER)


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, nested or flat, of whatever package, is a hybrid's."""
    text = _of_texts(config)
    return "linear_num_value_heads" in text or text.get("model_type") in _FLAT


def _of_texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json, nested or flat, that is the decoder's."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def refuse_states(who: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model with states, `who` being an engine that keeps none.

    config: a config.json, as `has_states` takes it.
    """
    if has_states(config):
        text = _of_texts(config)
        raise UnsupportedModelError(
            f"{who}: expected a model whose layers all have attention, got "
            f"{printable(text.get('model_type'))} with layers of Gated DeltaNet, which keep "
            "states; serve it with bitnet-ops serve, sglang or vllm, which convert it, or run it "
            "with generate, chat or bitnet_ops.load"
        )


def read_delta_net(config: Mapping[str, Any]) -> DeltaNet | None:
    """The Gated DeltaNet layers of a flat config.json; None where every layer has attention."""
    _check_options(config)
    count = integer(config, "num_hidden_layers", maximum=MAX_LAYERS)
    layers = tuple(i for i, kind in enumerate(_kinds(config, count)) if kind == LINEAR)
    result = DeltaNet(
        layers,
        key_heads=integer(config, "linear_num_key_heads", 16),
        value_heads=integer(config, "linear_num_value_heads", 32),
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        kernel=integer(config, "linear_conv_kernel_dim", 4),
    )
    if result.value_heads % result.key_heads:
        raise reject("linear_num_value_heads", result.value_heads,
                     f"to be a multiple of linear_num_key_heads {result.key_heads}",
                     "repair config.json")  # fmt: skip
    for name, value, maximum in (
        ("linear_key_head_dim", result.key_dim, MAX_KEY_DIM),
        ("linear_value_head_dim", result.value_dim, MAX_KEY_DIM),
    ):
        if value % STATE_COLUMNS or value > maximum:
            raise reject(name, value, f"to be a multiple of {STATE_COLUMNS} up to {maximum}",
                         "states of other sizes are not implemented")  # fmt: skip
    if not 2 <= result.kernel <= MAX_KERNEL:
        raise reject("linear_conv_kernel_dim", result.kernel, f"to be from 2 to {MAX_KERNEL}",
                     "other convolutions are not implemented")  # fmt: skip
    return result if layers else None


STATE_COLUMNS = 32  # as csrc/kernels/kernel_table.h has it
MAX_KEY_DIM, MAX_KERNEL = 256, 8


def _check_options(config: Mapping[str, Any]) -> None:
    """Reject what asks for another forward pass than that of transformers' class."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),  # transformers has it in the convolution too
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([],),
    }
    for name, values in allowed.items():
        value = config.get(name)
        if value is not None and value not in values:
            raise reject(name, value, f"to be absent or {values[0]!r}",
                         "another forward pass is not implemented")  # fmt: skip
    for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise reject(name, value, "to be a count", "repair config.json")
    if config.get("mtp_use_dedicated_embeddings") is not None:
        flag(config, "mtp_use_dedicated_embeddings", False)


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """FULL or LINEAR of every layer."""
    stated = config.get("layer_types")
    if stated is None:
        interval = integer(config, "full_attention_interval", _INTERVAL)
        if interval > layers:
            raise reject("full_attention_interval", interval,
                         f"to be at most num_hidden_layers {layers}",
                         "a model without attention is not implemented")  # fmt: skip
        return [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    known = isinstance(stated, list) and all(kind in (FULL, LINEAR) for kind in stated)
    if not known or len(stated) != layers or FULL not in stated:
        expected = f"to be {layers} of {FULL!r} and {LINEAR!r}, one {FULL!r} at least"
        raise reject("layer_types", str(stated)[:60], expected, "other layers are not implemented")
    return list(stated)


def read_rotary_dim(config: Mapping[str, Any], head_dim: int) -> tuple[int, Mapping[str, Any]]:
    """(features of a head that are turned, config.json without what says so).

    Also without the keys of rope_parameters that place the tokens of images.
    """
    factors: dict[str, float] = {}
    if (share := config.get("partial_rotary_factor")) is not None:
        factors["partial_rotary_factor"] = number("partial_rotary_factor", share)
    plain = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(block := config.get(name), Mapping):
            continue
        if (share := block.get("partial_rotary_factor")) is not None:
            factors[f"{name}.partial_rotary_factor"] = number(
                f"{name}.partial_rotary_factor", share
            )
        dropped = ("partial_rotary_factor", *_IMAGE_ROPE)
        plain[name] = {key: value for key, value in block.items() if key not in dropped}
    if len(set(factors.values())) > 1:
        raise reject("partial_rotary_factor", factors, "to be the same in every spelling",
                     "keep one of them")  # fmt: skip
    share = next(iter(factors.values()), 0.25)
    dim = int(head_dim * share) if 0 < share <= 1 else 0
    if dim < 2 or dim % 2:
        raise reject("partial_rotary_factor", share,
                     f"to leave an even number of a head's {head_dim} features",
                     "repair config.json")  # fmt: skip
    return dim, plain


def read_sections(config: Mapping[str, Any], rotary_dim: int) -> tuple[int, int, int] | None:
    """How many pairs of a head turn by time, height and width, where images are placed so.

    None: the config does not say it, or in another form than that of `ops.rope`; then the model
    reads texts alone.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(block := config.get(name), Mapping) or "mrope_section" not in block:
            continue
        counts = block["mrope_section"]
        good = isinstance(counts, list) and len(counts) == 3 and block.get("mrope_interleaved")
        if good and all(type(n) is int and n >= 0 for n in counts):
            pairs, (time, height, width) = rotary_dim // 2, counts
            fits = 3 * height - 2 < pairs and 3 * width - 1 < pairs
            return (time, height, width) if fits and sum(counts) == pairs else None
    return None


def is_block(size: object) -> TypeGuard[int]:
    """Whether blocks can have that size: a power of two."""
    return type(size) is int and _MIN_BLOCK <= size <= _MAX_BLOCK and not size & (size - 1)


def read_rotation(found: Mapping[str, Any]) -> Rotation | None:
    """The rotation that the converter has written into its private block.

    `{"blocks": {"2048": 1024}, "plain": ["model.embed_tokens"]}`
    """
    block = found.get("rotation")
    if block is None:
        return None
    blocks = block.get("blocks") if isinstance(block, Mapping) else None
    plain = block.get("plain", []) if isinstance(block, Mapping) else None
    if not isinstance(blocks, Mapping) or not isinstance(plain, list):
        raise reject("bitnet_ops.rotation", str(block)[:60], "to have blocks and plain",
                     "convert the model again")  # fmt: skip
    sizes = []
    for width, size in blocks.items():
        good = isinstance(width, str) and width.isascii() and width.isdigit() and len(width) < 8
        if not good or not is_block(size) or not int(width) or int(width) % size:
            raise reject("bitnet_ops.rotation.blocks", str(blocks)[:60],
                         "to give every width a power of two that divides it",
                         "convert the model again")  # fmt: skip
        sizes.append((int(width), size))
    return Rotation(tuple(sorted(sizes)), frozenset(map(str, plain)))


def written_rotation(rotation: Rotation) -> dict[str, Any]:
    """What `read_rotation` reads."""
    blocks = {str(width): block for width, block in rotation.blocks}
    return {"blocks": blocks, "plain": sorted(rotation.plain)}
