"""MLX packages of 2-bit ternary weights, seen as the floating tensors that they stand for.

A quantised module has weight uint32 [N, K / 16] (16 codes a word, the lowest bits first), scales
and biases [N, K / group_size]; a weight is code * scale + bias. Ternary ones have bias = -scale, so
that codes 0, 1, 2 mean -1, 0, +1 and code 3 nothing; anything else is rejected. Values are exact in
the dtype of the scales. Source: MLX's documentation of `quantize`. It must not know what a tensor
is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.convert.errors import listed, reject

_KEYS = ("quantization", "quantization_config")  # mlx-lm writes the same into both
_OPTIONS = {"group_size", "bits", "mode", "quant_method"}
_GROUPS = (32, 64, 128)
_CODES = 16  # a word
_CHUNK_WORDS = 1 << 20
_PARTS = tuple(f".{part}" for part in "scales biases".split())


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that an MLX package lies beside it."""
    return isinstance(config.get("quantization"), Mapping)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without its quantisation, once that is known to be one of 2 bits in groups."""
    block = config["quantization"]
    other = config.get("quantization_config")
    if other is not None and other != block:
        reject("mlx", "quantization_config as quantization says", repr(other)[:80])
    modules = {k: v for k, v in block.items() if k not in _OPTIONS}
    wrong = [k for k, v in modules.items() if v not in (True, False) and not isinstance(v, dict)]
    if wrong:
        reject("mlx", "the options of MLX's quantization alone", listed(wrong))
    for name, options in [("quantization", block), *modules.items()]:
        if isinstance(options, Mapping):
            _check_options(name, options)
    return {k: v for k, v in config.items() if k not in _KEYS}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    bits, group = options.get("bits"), options.get("group_size")
    mode = options.get("mode", "affine")
    if bits != 2 or group not in _GROUPS or mode != "affine":
        expected = f"{name} affine with 2 bits in groups of 32, 64 or 128"
        reject("mlx", expected, f"{mode} with {bits} bits in groups of {group}",
               "other MLX packages hold no ternary weights: convert the original")  # fmt: skip


def quantized(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, int]]:
    """name of a weight -> its logical shape [N, K], of every module with scales and biases.

    `shapes`: dtype and shape of every tensor of the package.
    """
    found = {}
    for name, (dtype, shape) in shapes.items():
        module = name.removesuffix(".weight")
        parts = [module + part for part in _PARTS]
        if dtype != "U32" or module == name or not all(part in shapes for part in parts):
            continue
        n, words = shape if len(shape) == 2 else (0, 0)
        k = _CODES * words
        (kind, form), (_, other) = (shapes[part] for part in parts)
        groups = form[1] if len(form) == 2 else 0
        fits = groups > 0 and k % groups == 0 and k // groups in _GROUPS
        if not n or not fits or form != other or form[0] != n or kind not in ("F16", "BF16", "F32"):
            got = f"uint32 {list(shape)} with scales {kind} {list(form)}, biases {list(other)}"
            reject("mlx", f"{name} [N, K / 16] with floating scales and biases of groups", got)
        found[name] = (n, k)
    if not found:
        reject("mlx", "modules of uint32 weights with scales and biases", "none")
    return found


def parts_of(name: str) -> tuple[str, ...]:
    """The names of the scales and biases of a quantised weight."""
    module = name.removesuffix(".weight")
    return tuple(module + part for part in _PARTS)


def dequantized(name: str, tensor: Callable[[str], Tensor]) -> Tensor:
    """The values [N, K] of the quantised weight `name`, in the dtype of its scales."""
    words = tensor(name).view(torch.int32)
    scales, offsets = (tensor(part) for part in parts_of(name))
    if not torch.isfinite(scales).all() or not (scales >= 0).all():
        reject("bad-scale", f"finite scales of 0 and above in {parts_of(name)[0]}", "another one")
    if not torch.equal(offsets, -scales):
        row, group = (offsets != -scales).nonzero()[0].tolist()
        got = f"{float(offsets[row, group]):.6g} beside {float(scales[row, group]):.6g}"
        reject("mlx-bias", f"biases = -scales in {parts_of(name)[1]}", f"{got} at [{row}, {group}]",
               "the package holds other values than -s, 0 and s")  # fmt: skip
    n, k = len(words), _CODES * words.shape[1]
    size, values = k // scales.shape[1], torch.empty(n, k, dtype=scales.dtype)
    shifts = torch.arange(0, 2 * _CODES, 2, dtype=torch.int32)
    step = max(1, _CHUNK_WORDS // words.shape[1])
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        codes = (words[part].unsqueeze(-1) >> shifts & 3).flatten(1)
        if (codes == 3).any():
            row, column = (codes == 3).nonzero()[0].tolist()
            reject("code-3", f"codes 0, 1, 2 in {name}", f"code 3 at [{begin + row}, {column}]",
                   "the package is damaged, or not ternary")  # fmt: skip
        signs = (codes - 1).to(scales.dtype).view(len(codes), -1, size)
        values[part] = (signs * scales[part].unsqueeze(-1)).flatten(1) + 0.0  # no -0
    return values
