"""How files hold Qwen3.5 hybrids: names beside the decoder, turned tensors, rotations.

The order and forms that a conversion has are Hugging Face's, with the convolution turned to
[kernel, channels]. Two converters change more than names. That of MLX stores the convolution as
[channels, kernel, 1] and norms as what they multiply by; a package of `prism_hadamard_qwen35` says
of every matrix whether its input is rotated, with the signs beside it. Python in such a package is
never run. Sources: mlx-lm 0.32 `qwen3_5.py` and `prism_hadamard_qwen35.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitnet_ops.config.hybrid import Rotation, is_block
from bitnet_ops.convert.errors import listed, reject
from bitnet_ops.models.tensors import ROTATION

# Tensors of one name: whatever they are in a file, they stay float32 here.
_FLOAT32 = ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "A_log", "dt_bias")
CONVOLUTION, GATED_NORM = "linear_attn.conv1d.weight", "linear_attn.norm.weight"
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_TOWER = ("model.visual.", "visual.", "vision_tower.")
_DRAFTS = ("mtp.", "model.mtp.")


def own_name(name: str) -> str | None:
    """A decoder's tensor as the flat form calls it; None for one beside the decoder."""
    name = _without_prefix(name)
    return None if name.startswith((*_TOWER, *_DRAFTS)) else name


def _without_prefix(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def left_out(names: Iterable[str]) -> list[str]:
    """A remark on the tensors of a checkpoint beside its decoder, if there are any."""
    plain = [_without_prefix(name) for name in names]
    kinds = {"a tower for images": _TOWER, "layers that draft tokens": _DRAFTS}
    counts = {kind: sum(n.startswith(parts) for n in plain) for kind, parts in kinds.items()}
    found = [f"{count} of {kind}" for kind, count in counts.items() if count]
    return [f"tensors left out: {', '.join(found)}"] if found else []


def stored_shapes(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a checkpoint may have for a tensor that has `shape` here."""
    if not name.endswith(CONVOLUTION):
        return [shape]
    kernel, channels = shape
    return [(channels, 1, kernel), (channels, kernel, 1)]


def has_summed_norms(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether norms hold 1 + w, as MLX's converter leaves them beside its convolutions."""
    last = {shape[-1] == 1 for name, shape in shapes.items() if name.endswith(CONVOLUTION)}
    if len(last) > 1:
        reject("shape", "all convolutions [channels, 1, kernel], or all [channels, kernel, 1]",
               "both", "the checkpoint is of two converters")  # fmt: skip
    return last == {True}


def as_here(name: str, tensor: Tensor) -> Tensor:
    """A dense tensor of a checkpoint in the form that a conversion has."""
    if name.endswith(CONVOLUTION):
        tensor = tensor.flatten(1).t()
    return tensor.float().contiguous() if name.endswith(_FLOAT32) else tensor


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


def rotation_shapes(rotation: Rotation | None) -> dict[str, tuple[int, int]]:
    """Names and shapes of the tensors that hold its signs."""
    blocks = () if rotation is None else rotation.blocks
    return {f"{ROTATION}{width}.weight": (width // block, block) for width, block in blocks}
