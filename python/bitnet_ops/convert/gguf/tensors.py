"""One tensor of a GGUF file -> canonical rows with a scale, or a dense torch tensor.

The data half of the GGUF converter: decodes, checks every value, undoes the order of rows that
interleaved rotary embedding wants. It must not know the metadata beyond what it is given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.convert.errors import reject
from bitnet_ops.convert.gguf.config import head_rows
from bitnet_ops.convert.source import Ternary, Uneven
from bitnet_ops.convert.ternary import SPREAD, check_finite
from bitnet_ops.formats import gguf_layouts as layouts
from bitnet_ops.formats.gguf import Reader, TensorInfo
from bitnet_ops.nn.packing import BLOCK, MIN_SCALE

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Embeddings and heads of these types are stored dense, in the dtype of their scales.
PACKED_DENSE = ("Q2_0", "Q2_0_128", "PQ2_0", "PTQ1_0")
_CODES = {"code_3": "code-3", "scale": "bad-scale", "row_length": "gguf-row-length"}
_CHUNK_ELEMS = 1 << 22
_SMALLEST = 2.0**-126  # the smallest normal float32


def ternary(
    reader: Reader,
    info: TensorInfo,
    *,
    i2s_layout: str,
    factor: float = 1.0,
    exact_scale: float | None = None,
    head_dim: int | None = None,
    assume_online: bool = False,
) -> Ternary:
    """The projection `info`.

    `factor`: of a `.scale` tensor beside it. `exact_scale`: the float32 scale that the file's
    writer has left beside TQ blocks, whose own scale is float16. `head_dim`: undo the permutation
    of q and k. `assume_online`: dense masters may be ternarised by absmean.
    """
    n, k = info.shape
    if info.type.name in DENSE:
        found = _from_dense(info, dense(reader, info), assume_online)
    elif info.type.name in layouts.TERNARY_TYPES:
        found = _from_layout(reader, info, i2s_layout, exact_scale)
    else:
        reject(
            "gguf-not-ternary",
            f"{info.name} as {', '.join((*layouts.TERNARY_TYPES[:4], *DENSE))}",
            info.type.name,
            "it was quantised to other values than -1, 0, 1: export the model again as TQ2_0",
        )
    rows, scale = found.rows, found.scale * factor
    if not (torch.isfinite(scale).all() and factor > 0 and scale.max() >= _SMALLEST):
        reject("bad-scale", f"a finite scale of {info.name} above zero", f"one times {factor}")
    if head_dim is not None:
        if n % head_dim or head_dim % 2:
            reject("shape", f"{info.name} of whole heads of {head_dim} rows", f"{n} rows")
        order = torch.from_numpy(head_rows(n, head_dim))
        rows = rows[order]
        scale = scale[order] if found.group_size else scale
    return dataclasses.replace(found, rows=rows, scale=scale)


def _from_layout(reader: Reader, info: TensorInfo, layout: str, exact: float | None) -> Ternary:
    n, k = info.shape
    try:
        decoded = layouts.decode(info.type.name, reader.data(info.name), n, k, layout)
    except layouts.LayoutError as error:
        reject(_CODES[error.code], f"{info.name} as {info.type.name}", str(error), _hint(info))
    rows = torch.from_numpy(decoded.rows)  # of layout a the mapping itself
    scale = decoded.one_scale()
    if scale is None and decoded.scales.any():
        groups, size, uneven = _group_scales(decoded)
        kind = f"scales for groups of {size} weights"
        remark = f"{kind}; such models were trained without int8 activations"
        return Ternary(rows, groups, remark, size, uneven=uneven)
    if scale is None:
        return Ternary(
            rows,
            torch.tensor([exact or MIN_SCALE], dtype=torch.float32),
            f"{info.name} holds zeros alone",
        )
    if exact is not None:
        if float(np.float16(np.float32(exact))) != scale:
            reject("bad-scale", f"{info.name} with the scale {exact} as float16", f"{scale}")
        scale = exact
    return Ternary(rows, torch.tensor([scale], dtype=torch.float32))


def _group_scales(decoded: layouts.Decoded) -> tuple[Tensor, int, Uneven | None]:
    """f32 [N, groups], the weights of a group, and the groups whose halves differ.

    Blocks of 64 that agree in pairs, to SPREAD of the larger, are groups of 128, which are faster;
    the larger is taken, and blocks of zeros agree with all.
    """
    scales, uneven = decoded.scales, None
    if decoded.block < BLOCK:
        pairs = np.pad(scales, ((0, 0), (0, scales.shape[1] % 2)))
        first, second = pairs[:, ::2], pairs[:, 1::2]
        larger = np.maximum(first, second)
        below = larger - np.where((first == 0) | (second == 0), larger, np.minimum(first, second))
        if (below > larger * SPREAD).any():
            return torch.from_numpy(scales), decoded.block, None
        if below.any():
            relative = float((below[below > 0] / larger[below > 0]).max())
            uneven = Uneven(int((below > 0).sum()), float(below.max()), relative)
        scales = larger
    scales = np.repeat(scales, max(1, decoded.block // BLOCK), axis=1)
    return torch.from_numpy(np.ascontiguousarray(scales)), BLOCK, uneven


def _hint(info: TensorInfo) -> str:
    if info.type.name == "I2_S":
        return "the file is damaged, or of another --i2s-layout than the one that was given"
    return "the file is damaged"


def _from_dense(info: TensorInfo, tensor: Tensor, assume_online: bool) -> Ternary:
    """Values code * scale, exactly; or masters, if the caller says so."""
    check_finite(info.name, tensor)
    scale = float(tensor.abs().max())
    if scale == 0.0:
        codes, remark = torch.zeros(tensor.shape, dtype=torch.int8), "holds zeros alone"
        return Ternary(
            ops.pack(codes), torch.tensor([MIN_SCALE], dtype=torch.float32), f"{info.name} {remark}"
        )
    if _is_ternary(tensor, scale):
        return Ternary(
            ops.pack(tensor.sign().to(torch.int8)), torch.tensor([scale], dtype=torch.float32)
        )
    if not assume_online:
        reject(
            "gguf-not-ternary",
            f"{info.name} with one magnitude beside zero",
            f"other values, as {info.type.name}",
            "if these are masters trained to be ternary, convert with --assume-online",
        )
    codes, absmean = ops.quantize_weights(tensor)
    return Ternary(ops.pack(codes), absmean, "dense masters were ternarised by absmean")


def _is_ternary(tensor: Tensor, magnitude: float) -> bool:
    for piece in tensor.reshape(-1).split(_CHUNK_ELEMS):
        size = piece.abs()
        if not ((size == 0) | (size == magnitude)).all():
            return False
    return True


def dense(reader: Reader, info: TensorInfo) -> Tensor:
    """The tensor in its dtype, zero-copy for F32, F16 and BF16.

    Ternary types of float16 scales come as float16, exactly; other types as float32.
    """
    data: Any = reader.data(info.name)
    if info.type.name in DENSE:
        tensor = torch.from_numpy(data).view(DENSE[info.type.name]).view(info.shape)
    elif info.type.name in PACKED_DENSE and len(info.shape) == 2:
        tensor = _values(info, data)
    else:
        tensor = _dequantised(info, data)
    check_finite(info.name, tensor)
    return tensor


def _values(info: TensorInfo, data: Any) -> Tensor:
    try:
        return torch.from_numpy(layouts.values(info.type.name, data, *info.shape))
    except layouts.LayoutError as error:
        reject(_CODES[error.code], f"{info.name} as {info.type.name}", str(error), _hint(info))


def _dequantised(info: TensorInfo, data: Any) -> Tensor:
    """float32 values through the gguf package, by pieces of rows."""
    try:
        import gguf
    except ImportError:
        reject(
            "gguf-package",
            f"the gguf package, which reads {info.name} ({info.type.name})",
            "none installed",
            "pip install bitnet-ops[gguf]",
        )
    known = info.type.name in gguf.GGMLQuantizationType.__members__
    rows = data.reshape(-1, info.shape[-1] // info.type.block * info.type.block_bytes)
    out = np.empty((len(rows), info.shape[-1]), dtype=np.float32)
    step = max(1, _CHUNK_ELEMS // info.shape[-1])
    try:
        if not known:
            raise NotImplementedError("unknown type")
        kind = gguf.GGMLQuantizationType[info.type.name]
        for begin in range(0, len(rows), step):
            out[begin : begin + step] = gguf.quants.dequantize(rows[begin : begin + step], kind)
    except NotImplementedError as error:
        reject("gguf-type", f"{info.name} of a type that the gguf package reads", f"{error}")
    return torch.from_numpy(out).view(info.shape)
