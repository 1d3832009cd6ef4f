"""How files hold Qwen3.5 hybrids: names beside the decoder, turned tensors, rotations.

The order and forms that a conversion has are Hugging Face's, with the convolution turned to
[kernel, channels]. Two converters change more than names. That of MLX stores the convolution as
[channels, kernel, 1] and norms as what they multiply by; a package of `prism_hadamard_qwen35` says
of every matrix whether its input is rotated, with the signs beside it. Python in such a package is
never run. Sources: mlx-lm 0.32 `qwen3_5.py` and `prism_hadamard_qwen35.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.hybrid import FULL, LINEAR, ROTATION, DeltaNet, Rotation, is_block
from bitnet_ops.config.values import MAX_LAYERS
from bitnet_ops.convert.errors import listed, reject, shown
from bitnet_ops.convert.source import Ternary
from bitnet_ops.formats.gguf import is_strings

Indices = NDArray[np.int64]
Floats = NDArray[np.float32]

# Tensors of one name: whatever they are in a file, they stay float32 here.
_FLOAT32 = ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "A_log", "dt_bias")
CONVOLUTION, GATED_NORM = "linear_attn.conv1d.weight", "linear_attn.norm.weight"
PROJECTIONS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj")
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
# where matrices are of other values: what rotated models were before they were rotated
NOT_TERNARY = (
    "rotated models are ternary in their packed files alone: convert the GGUF or the MLX package; "
    "`bitnet-ops quantize` rounds the weights of a model that was trained to be ternary otherwise"
)
TOWER, DRAFTS = "a tower for images", "layers that draft tokens"
_TOWER = ("model.visual.", "visual.", "vision_tower.")
_DRAFTS = ("mtp.", "model.mtp.")


def is_gate(name: str) -> bool:
    """Whether a decoder's tensor is a matrix that decides what a state forgets and takes."""
    return name.endswith(("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"))


def own_name(name: str) -> str | None:
    """A decoder's tensor as the flat form calls it; None for one beside the decoder."""
    name = _without_prefix(name)
    return None if name.startswith((*_TOWER, *_DRAFTS)) else name


def _without_prefix(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def tower_name(name: str) -> str | None:
    """A tensor of the tower for images by its name inside it; None for any other."""
    name = _without_prefix(name)
    return next((name.removeprefix(p) for p in _TOWER if name.startswith(p)), None)


def draft_name(name: str) -> str | None:
    """A tensor of layers that draft tokens, `mtp.` and so on; None for any other."""
    name = _without_prefix(name)
    return name[name.index("mtp.") :] if name.startswith(_DRAFTS) else None


def counted(kinds: Iterable[str]) -> list[str]:
    """A remark on tensors beside a decoder, one of `kinds` for each."""
    found = [f"{count} of {kind}" for kind, count in Counter(kinds).items()]
    return [f"tensors left out: {', '.join(found)}"] if found else []


def stored_shapes(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a checkpoint may have for a tensor that has `shape` here."""
    if not name.endswith(CONVOLUTION):
        return [shape]
    kernel, channels = shape
    return [(channels, 1, kernel), (channels, kernel, 1)]


def shape_here(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape here of a tensor with `shape` in a checkpoint."""
    if not name.endswith(CONVOLUTION) or len(shape) != 3:
        return shape
    return shape[1] * shape[2], shape[0]


def has_summed_norms(shapes: Mapping[str, tuple[int, ...]], *, package: bool) -> bool:
    """Whether norms hold 1 + w, as MLX's converter leaves them beside its convolutions.

    mlx-lm adds the 1 where it finds convolutions of Hugging Face's form. Without any it takes a
    package as it lies.
    """
    last = {shape[-1] == 1 for name, shape in shapes.items() if name.endswith(CONVOLUTION)}
    if len(last) > 1:
        reject("shape", "all convolutions [channels, 1, kernel], or all [channels, kernel, 1]",
               "both", "the checkpoint is of two converters")  # fmt: skip
    return last.pop() if last else package


def as_here(name: str, tensor: Tensor) -> Tensor:
    """A dense tensor of a checkpoint in the form that a conversion has.

    A_log goes the way of a GGUF file, which holds -exp(A_log) in float32 and so rounds it by up to
    half a place: one model has the same bits from whichever source.
    """
    if name.endswith("A_log"):
        found = _log_of(tensor.float().exp())
        return torch.where(found.isfinite(), found, tensor.float())  # beyond what exp can hold
    if name.endswith(CONVOLUTION):
        tensor = tensor.flatten(1).t()
    return tensor.float().contiguous() if name.endswith(_FLOAT32) else tensor


def to_transformers(name: str, tensor: Tensor, model: ModelConfig) -> Tensor:
    """The contrary: a dense tensor of a conversion as transformers' class of the model has it."""
    if name.endswith(CONVOLUTION):
        return tensor.t().unsqueeze(1)
    if name.endswith("norm.weight") and not name.endswith(GATED_NORM):
        return tensor.float() - offset if (offset := model.family.norm_offset) else tensor
    return tensor


# MLX packages with rotations ----------------------------------------------------------------------

PACKAGE = "prism_hadamard_qwen35"
_NAMESPACES = {1: "mlx-lm-text", 2: "mlx-vlm-qwen3_5"}
_OPTIONS = {"bits": 2, "group_size": 128, "mode": "affine"}
# keys of its config.json beside those of qwen3_5, with the only value known; None: any
_STATED = {
    "base_model_type": "qwen3_5", "gdn_activation_layout": "grouped", "schema_version": None,
    "tensor_namespace": None, "requires_runtime": None, "hadamard_config": None, "modules": None,
}  # fmt: skip
_RECORD = {"path", "block", "embedding", "dtype"}


def read_package(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """(config.json of the plain MLX package, the block of every matrix, 0: not rotated)."""
    schema = config.get("schema_version")
    namespace = _NAMESPACES.get(schema) if type(schema) is int else None
    if namespace is None or config.get("tensor_namespace") != namespace:
        found = f"schema {schema!r} with {config.get('tensor_namespace')!r}"
        expected = " or ".join(f"schema {n} with {name!r}" for n, name in _NAMESPACES.items())
        _reject(expected, found)
    for key, value in _STATED.items():
        if value is not None and config.get(key, value) != value:
            _reject(f"{key} {value!r}", repr(config[key]))
    if config.get("quantization") != _OPTIONS:
        _reject(f"quantization {_OPTIONS}", repr(config.get("quantization")))
    rows = config.get("modules")
    if not isinstance(rows, list) or not rows:
        _reject("modules, a list of its matrices", repr(rows))
    blocks: dict[str, int] = {}
    for row in rows:
        good = isinstance(row, Mapping) and set(row) == _RECORD and row["dtype"] == "float16"
        good = good and isinstance(row["path"], str) and row["path"] not in blocks
        good = good and (row["block"] == 0 or is_block(row["block"]))
        if not good or row["embedding"] is not (row["path"] == "model.embed_tokens"):
            _reject("modules of one path each, a block of 0 or a power of two, embedding true of "
                    "model.embed_tokens alone and dtype float16", repr(row))  # fmt: skip
        blocks[row["path"]] = row["block"]
    plain = {key: value for key, value in config.items() if key not in _STATED}
    if "text_config" in config:
        return {**plain, "model_type": "qwen3_5", "architectures": None}, blocks
    names = ["Qwen3_5ForCausalLM"]
    return {**plain, "model_type": "qwen3_5_text", "architectures": names}, blocks


def _reject(expected: str, found: str) -> NoReturn:
    reject("mlx-rotation", f"a package {PACKAGE} of {expected}", found[:120],
           "other packages are not implemented")  # fmt: skip


class PackageRotation:
    """The rotation of a package, of which every matrix has a block and signs of its own.

    blocks: as `read_package` gives them. matrices: the shape of every packed weight by its stored
    name; tensors: of every tensor dtype and shape.
    """

    def __init__(
        self,
        blocks: Mapping[str, int],
        matrices: Mapping[str, tuple[int, int]],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> None:
        modules = {str(own_name(n)).removesuffix(".weight"): n for n in matrices}
        if wrong := sorted(set(modules) ^ set(blocks)):
            _reject("modules that are its packed matrices", f"a disagreement about {listed(wrong)}")
        self._signs: dict[int, list[str]] = {}  # by width
        found: dict[int, int] = {}
        for module, block in blocks.items():
            weight = modules[module]
            width, signs = matrices[weight][1], f"{weight.removesuffix('.weight')}.signs"
            if not block:
                continue
            if width % block or found.setdefault(width, block) != block:
                _reject(f"one block for each width, which it divides (here {found.get(width)})",
                        f"{block} of {module}, whose inputs are {width}")  # fmt: skip
            if tensors.get(signs) != ("F32", (width,)):
                _reject(f"{signs} F32 [{width}]", str(tensors.get(signs, "no such tensor")))
            self._signs.setdefault(width, []).append(signs)
        plain = frozenset(module for module, block in blocks.items() if not block)
        self.rotation = Rotation(tuple(sorted(found.items())), plain) if found else None

    def signs(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor `name`, f32 [width / block, block]; `read` gives stored tensors."""
        assert self.rotation is not None
        width = int(name.removeprefix(ROTATION).removesuffix(".weight"))
        first, *others = self._signs[width]
        result = read(first)
        for other in others:
            if not torch.equal(read(other), result):
                _reject("one vector of signs for each width", f"others in {other} than in {first}")
        check_signs(first, result)
        return result.view(-1, self.rotation.block(width))


def check_signs(name: str, signs: Tensor) -> None:
    """Reject values other than -1 and +1."""
    if not bool((signs.abs() == 1).all()):
        bad = float(signs[signs.abs() != 1][0])
        reject("rotation-signs", f"signs -1 and +1 in {name}", f"{bad:g}", "the file is damaged")


# GGUF: the architecture qwen35 --------------------------------------------------------------------

# names of a layer's tensors beside those of other architectures, GGUF -> Hugging Face
GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GGUF_WHOLE_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
GGUF_KEYS = frozenset(
    """ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size
    full_attention_interval attention.recurrent_layers nextn_predict_layers
    rope.dimension_sections""".split()
)
_GGUF_TOWER = ("v.", "mm.")
_INTERVAL = 4


class _Keys(Protocol):
    """The keys of one architecture (gguf_config.py)."""

    def __contains__(self, key: str) -> bool: ...
    def name(self, key: str) -> str: ...
    def array(self, key: str) -> list[Any] | None: ...
    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int: ...


def gguf_config(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """What config.json has of a hybrid."""
    layers, value_heads = gguf_layers(keys), keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if inner % value_heads:
        expected = f"{keys.name('ssm.inner_size')} as {value_heads} heads of one size"
        reject("gguf-metadata", expected, str(inner))
    turned = keys.integer("rope.dimension_count", head_dim)
    sections = keys.array("rope.dimension_sections")
    if sections is not None and (len(sections) > 4 or sum(sections) != turned // 2):
        expected = f"{keys.name('rope.dimension_sections')} that add up to {turned // 2} pairs"
        reject("gguf-maths", expected, str(sections)[:60], "other embeddings are not implemented")
    return {
        "num_hidden_layers": layers,
        "layer_types": _gguf_kinds(keys, layers),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "partial_rotary_factor": turned / head_dim,
        **_image_rope(sections),
    }


def _image_rope(sections: list[Any] | None) -> dict[str, Any]:
    """How many pairs place images, in time, height and width; a fourth count is never used."""
    if sections is None or any(sections[3:]):
        return {}
    block = {"rope_type": "default", "mrope_section": sections[:3], "mrope_interleaved": True}
    return {"rope_scaling": block}


def gguf_layers(keys: _Keys) -> int:
    """Layers of the decoder; those that draft tokens count as blocks too, and come last."""
    blocks = keys.integer("block_count")
    drafts = keys.integer("nextn_predict_layers", 0, minimum=0)
    if not 1 <= blocks - drafts <= MAX_LAYERS:
        expected = f"1 to {MAX_LAYERS} layers by {keys.name('block_count')} and "
        reject("gguf-metadata", expected + keys.name("nextn_predict_layers"), f"{blocks}, {drafts}")
    return blocks - drafts


def _gguf_kinds(keys: _Keys, layers: int) -> list[str]:
    flags = keys.array("attention.recurrent_layers")
    if flags is None:
        interval = keys.integer("full_attention_interval", _INTERVAL)
        flags = [(i + 1) % interval != 0 for i in range(layers)]
    elif len(flags) not in (layers, keys.integer("block_count")) or any(
        flag not in (0, 1) for flag in flags
    ):
        expected = f"{keys.name('attention.recurrent_layers')}, a flag for each of {layers} layers"
        reject("gguf-metadata", expected, str(flags)[:60])
    return [LINEAR if flag else FULL for flag in flags[:layers]]


def gguf_beside(name: str, layers: int, blocks: int) -> str | None:
    """What a tensor beside the decoder's `layers` belongs to; None for one of the decoder.

    `blocks`: of the file, the last of which draft tokens. One beyond them is nobody's.
    """
    if name.startswith(_GGUF_TOWER):
        return TOWER
    number = _block(name)
    return DRAFTS if number is not None and layers <= number < blocks else None


def _block(name: str) -> int | None:
    parts = name.split(".")
    number = parts[1] if parts[0] == "blk" and len(parts) > 2 else ""
    return int(number) if number.isascii() and number.isdigit() else None


def check_drafts(names: Iterable[str], layers: int) -> None:
    """Reject a first block behind the decoder's that has no tensor of a layer that drafts.

    Of a file whose `block_count` is too small it would be a layer of the decoder.
    """
    inner = [name.split(".", 2)[2] for name in names if _block(name) == layers]
    if inner and not any(name.startswith("nextn.") for name in inner):
        reject("gguf-metadata", f"nextn tensors in blk.{layers}, a layer that drafts by block_count"
               " and nextn_predict_layers", listed(sorted(inner)), "these keys do not fit the "
               "file's tensors")  # fmt: skip


# llama.cpp tiles value heads: head key * r + j of Hugging Face's is head j * keys + key of a file,
# where r value heads share a key head. Rotated columns of ssm_out are the exception.


def tiled_rows(name: str, net: DeltaNet) -> Indices | None:
    """For every row of a tensor here the row in a file that holds it; None: in order.

    Of the convolution the channels, whatever side they lie on.
    """
    if net.key_heads == net.value_heads:
        return None
    heads = np.arange(net.value_heads).reshape(-1, net.key_heads).T.reshape(-1)
    inside = name.removesuffix(".weight").rpartition("linear_attn.")[2]
    if inside in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return heads
    rows = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
    if inside == "in_proj_z":
        return rows
    if inside in ("in_proj_qkv", "conv1d"):
        return np.concatenate([np.arange(2 * net.keys), 2 * net.keys + rows])
    return None


def tiled_columns(name: str, net: DeltaNet, rotation: Rotation | None) -> Indices | None:
    """The same of columns: of an output projection that is not rotated."""
    module = name.removesuffix(".weight")
    if not module.endswith("linear_attn.out_proj"):
        return None
    if rotation is not None and rotation.rotates(module, net.values):
        return None
    return tiled_rows("linear_attn.in_proj_z", net)


def moved_groups(scales: Floats, order: Indices, size: int, head: int, name: str) -> Floats:
    """Scales [N, groups] of `size` columns each, once the columns are in another order.

    order: for every column where it was; it moves whole heads of `head`. NaN: of a group without
    weights, which any scale fits; 0 comes of it. ConvertError where weights of several scales meet
    in a group.
    """
    whole = np.pad(order, (0, -len(order) % size), mode="edge")
    parts = whole.reshape(-1, size) // size  # of every new group the old ones
    moved = scales[:, parts[:, 0]]
    for at in range(1, size):
        if np.array_equal(parts[:, at], parts[:, at - 1]):
            continue  # columns that have moved together
        found = scales[:, parts[:, at]]
        if ((found != moved) & ~np.isnan(found) & ~np.isnan(moved)).any():
            reject("group-scales", f"heads of {name} of whole groups of {size} weights",
                   f"heads of {head}, whose scales would meet in a group",
                   "they cannot be put in order")  # fmt: skip
        moved = np.fmax(moved, found)
    return np.nan_to_num(moved, nan=0.0)


def with_columns(found: Ternary, order: Indices, head: int, name: str) -> Ternary:
    """A ternary matrix with its columns in another order, which moves whole heads of `head`."""
    codes, scale = ops.unpack(found.rows, len(order))[:, torch.from_numpy(order)], found.scale
    if size := found.group_size:
        groups = scale.numpy()
        moved = moved_groups(np.where(groups == 0, np.nan, groups), order, size, head, name)
        scale = torch.from_numpy(np.ascontiguousarray(moved))
    return dataclasses.replace(found, rows=ops.pack(codes), codes=None, scale=scale)


def from_gguf(name: str, tensor: Tensor) -> Tensor:
    """A dense tensor of a file, its heads in order, in the form that a conversion has."""
    if name.endswith("A_log"):
        if not bool((tensor < 0).all()):
            reject("gguf-values", f"{name} as -exp(A_log), below 0", f"{float(tensor.max()):g}")
        return _log_of(tensor.float().neg())
    return as_here(name, tensor)


def _log_of(decay: Tensor) -> Tensor:
    return decay.double().log().float().contiguous()


def to_gguf(name: str, tensor: Tensor, net: DeltaNet) -> Tensor:
    """The contrary of `from_gguf`, heads tiled."""
    if name.endswith(CONVOLUTION):
        tensor = tensor.t()
    if name.endswith("A_log"):
        stated, tensor = tensor, tensor.double().exp().neg().float()
        if (lost := (tensor == 0) | tensor.isinf()).any():
            reject("gguf-values", f"{name} whose exponential float32 holds",
                   f"{float(stated[lost][0]):g}")  # fmt: skip
    order = tiled_rows(name, net)
    return tensor if order is None else tensor[torch.from_numpy(np.argsort(order))]


def gguf_keys(model: ModelConfig, prefix: str) -> dict[str, tuple[str, Any]]:
    """The keys of a hybrid, as a writer takes them."""
    net, pairs = model.delta_net, model.rotary_dim // 2
    assert net is not None
    interval = next(i for i in range(model.num_hidden_layers) if i not in net.layers) + 1
    regular = [i for i in range(model.num_hidden_layers) if (i + 1) % interval]
    flags = [i in net.layers for i in range(model.num_hidden_layers)]
    keys: dict[str, tuple[str, Any]] = {
        "ssm.conv_kernel": ("uint32", net.kernel),
        "ssm.state_size": ("uint32", net.key_dim),
        "ssm.group_count": ("uint32", net.key_heads),
        "ssm.time_step_rank": ("uint32", net.value_heads),
        "ssm.inner_size": ("uint32", net.values),
        "rope.dimension_sections": ("[int32]", [-(-pairs // 3), (pairs + 1) // 3, pairs // 3, 0]),
    }
    if list(net.layers) == regular:
        keys["full_attention_interval"] = ("uint32", interval)
    else:
        keys["attention.recurrent_layers"] = ("[bool]", flags)
    return {f"{prefix}.{key}": value for key, value in keys.items()}


# Keys of rotations. Version 2: a table that is the head too, for which version 1 has no key.

HADAMARD = "prism.hadamard."
_FIXED = {
    "version": (1, 2),
    "tied_output": (True, False),
    "transform": ("normalized-sylvester-walsh-hadamard",),
    "axis": ("input-last-dimension",),
    "sign_mode": ("explicit", "identity"),
    "gdn_v_grouped": (True, False),
}
_ABSENT = {"gdn_v_grouped": True, "tied_output": False}
HADAMARD_KEYS = frozenset(
    HADAMARD + key
    for key in (
        *_FIXED, "block_size", "sign_widths", "sign_values", "weight_names", "inverse_weight_names"
    )
)  # fmt: skip
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_TURNED = {
    "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_output",
    "ffn_gate", "ffn_up", "ffn_down", "ssm_out",
}  # fmt: skip


@dataclass(frozen=True)
class GgufRotation:
    """The rotation that a file's keys state, and the signs of each width."""

    rotation: Rotation
    signs: dict[int, NDArray[np.float32]]

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, f32 [width / block, block]."""
        width = int(name.removeprefix(ROTATION).removesuffix(".weight"))
        return torch.from_numpy(self.signs[width]).view(-1, self.rotation.block(width))


def gguf_rotation(
    metadata: Mapping[str, Any],
    matrices: Mapping[str, tuple[str, int]],
    net: DeltaNet | None,
    tied: bool,
    drafts: Callable[[str], bool] = lambda name: False,
) -> GgufRotation | None:
    """The rotation of a file, None where no key speaks of one.

    `matrices`: of every matrix in it the module and the width of its input, by the file's name.
    `tied`: it has no head. `drafts`: whether a name is that of a layer which is left out.
    """
    stated = {k.removeprefix(HADAMARD): v for k, v in metadata.items() if k.startswith(HADAMARD)}
    if not stated:
        return None
    for key, allowed in _FIXED.items():
        value = stated.get(key, _ABSENT.get(key))
        if type(value) is not type(allowed[0]) or value not in allowed:
            _reject_key(key, " or ".join(map(repr, allowed)), value)
    shared = stated.get("tied_output", False)
    if not shared and stated["version"] != 1:
        _reject_key("version", "1, or 2 with tied_output", stated["version"])
    block = stated.get("block_size")
    if not is_block(block):
        _reject_key("block_size", "a power of two", block)
    names = [name for name in _listed(stated, "weight_names") if not drafts(name)]
    inverse = _listed(stated, "inverse_weight_names", needed=False)
    if shared and not (stated["version"] == 2 and tied and _EMBEDDING in inverse):
        expected = f"False but in version 2, with {_EMBEDDING} rotated and no {_HEAD}"
        _reject_key("tied_output", expected, shared)
    rotated = set(names) | set(inverse)
    for key, listing in (("weight_names", names), ("inverse_weight_names", inverse)):
        for name in listing:
            if not _may_rotate(name, key, tied) or name not in matrices:
                _reject_key(key, "names of matrices of the file that may be rotated", name)
    widths = sorted({matrices[name][1] for name in rotated})
    if wrong := [width for width in widths if width % block]:
        _reject_key("block_size", f"a divisor of the inputs of {wrong[0]}", block)
    signs = _signs(stated, widths)
    rotates_out = any(name.endswith(".ssm_out.weight") for name in rotated)
    if net is not None and net.key_heads != net.value_heads and rotates_out:
        if stated.get("gdn_v_grouped") is not True:
            _reject_key("gdn_v_grouped", "True where value heads outnumber key heads",
                        stated.get("gdn_v_grouped"))  # fmt: skip
    plain = frozenset(module for name, (module, _) in matrices.items() if name not in rotated)
    return GgufRotation(Rotation(tuple((w, block) for w in widths), plain), signs)


def rotation_keys(
    rotation: Rotation, signs: Mapping[int, Tensor], names: Mapping[str, str], *, tied: bool
) -> dict[str, tuple[str, Any]]:
    """The keys that state a rotation. `names`: of every rotated matrix by its module.

    A rotated table that is the head too (`tied`) makes it version 2.
    """
    blocks = {block for _, block in rotation.blocks}
    if len(blocks) > 1:
        reject("gguf-rotation", "one block for all widths", str(dict(rotation.blocks)),
               "GGUF has no words for several")  # fmt: skip
    embedding = [name for name in names.values() if name == _EMBEDDING]
    shared = tied and bool(embedding)
    keys: dict[str, tuple[str, Any]] = {
        "version": ("uint32", 2 if shared else 1),
        **({"tied_output": ("bool", True)} if shared else {}),
        "block_size": ("uint32", blocks.pop()),
        "transform": ("string", _FIXED["transform"][0]),
        "axis": ("string", _FIXED["axis"][0]),
        "sign_mode": ("string", "explicit"),
        "sign_widths": ("[int32]", list(signs)),
        "sign_values": ("[int32]", [int(s) for part in signs.values() for s in part.flatten()]),
        "weight_names": ("[string]", [name for name in names.values() if name != _EMBEDDING]),
        "inverse_weight_names": ("[string]", embedding),
        "gdn_v_grouped": ("bool", True),
    }
    return {f"{HADAMARD}{key}": value for key, value in keys.items()}


def _reject_key(key: str, expected: str, found: object) -> NoReturn:
    reject("gguf-rotation", f"{HADAMARD}{key} {expected}", shown(found, 80),
           "other rotations are not implemented")  # fmt: skip


def _listed(stated: Mapping[str, Any], key: str, *, needed: bool = True) -> list[str]:
    names = stated.get(key, None if needed else [])
    if not is_strings(names) or len(set(names)) != len(names):
        _reject_key(key, "a list of names, each once", names)
    return list(names)


def _may_rotate(name: str, key: str, tied: bool) -> bool:
    if key == "inverse_weight_names" or name == _EMBEDDING:
        return name == _EMBEDDING and (key == "inverse_weight_names" or tied)
    parts = name.split(".")
    inner = len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _TURNED
    return name == _HEAD or inner


def _signs(stated: Mapping[str, Any], widths: list[int]) -> dict[int, NDArray[np.float32]]:
    """By width; of sign_mode "identity" ones, which may also be stated."""
    sizes, values = stated.get("sign_widths"), stated.get("sign_values")
    identity = stated["sign_mode"] == "identity"
    if identity and values is None:
        return {width: np.ones(width, dtype=np.float32) for width in widths}
    sizes = sizes.tolist() if isinstance(sizes, np.ndarray) else None
    if sizes is None or len(set(sizes)) != len(sizes) or not all(type(s) is int for s in sizes):
        _reject_key("sign_widths", "widths, each once", sizes)
    if missing := [width for width in widths if width not in sizes]:
        _reject_key("sign_widths", f"with the width {missing[0]} of a listed matrix", sizes)
    if not isinstance(values, np.ndarray) or len(values) != sum(sizes) or min(sizes) < 1:
        count = len(values) if isinstance(values, np.ndarray) else values
        _reject_key("sign_values", f"of {sum(sizes)} signs, as sign_widths add up to", count)
    good = (values == 1) | ((values == -1) & (not identity))
    if not good.all():
        _reject_key("sign_values", "+1 alone" if identity else "-1 and +1", values[~good][0])
    ends = np.cumsum(sizes)
    parts = {s: values[e - s : e].astype(np.float32) for s, e in zip(sizes, ends, strict=True)}
    return {width: parts[width] for width in widths}
