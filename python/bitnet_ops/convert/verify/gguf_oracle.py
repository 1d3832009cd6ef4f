"""A GGUF file as the reference of --verify: decoded a second time, another way.

The second decoding shares nothing with the first: TQ1_0 and TQ2_0 go through the gguf package, I2_S
and Q2_0 element by element from their definition, q and k are turned back by reshaping. The forward
is plain_forward.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.convert.errors import reject
from bitnet_ops.convert.gguf.config import PERMUTED
from bitnet_ops.convert.gguf.source import GgufSource, scale_name
from bitnet_ops.convert.verify.plain_forward import PlainOracle

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 20
_Q2_BLOCKS = {"Q2_0": 64, "Q2_0_128": 128, "PQ2_0": 128}


class GgufOracle(PlainOracle):
    """The file as a reference: projections as fp32 values, and the logits of a plain forward."""

    name = "plain fp32 forward of the file, decoded a second time"

    def __init__(self, source: GgufSource) -> None:
        super().__init__(source)
        self._gguf = source

    def _read(self, name: str) -> Tensor:
        info, gguf = self._gguf.infos[name], self._gguf
        values = _values(info.type.name, gguf.reader.data(info.name), info.shape, gguf.i2s_layout)
        return values.view(info.shape)

    def projection(self, weight_name: str) -> tuple[Tensor, Tensor]:
        """(codes int8 [N, K], the scale of every weight f32 [N, K])."""
        gguf, values = self._gguf, self._read(weight_name)
        info = gguf.infos[weight_name]
        if gguf.plan.scheme.assumed and info.type.name in _DENSE:
            reject("gguf-verify", "projections that are ternary in the file", "masters")
        exact = gguf.exact_scales.get(info.name)
        if exact is not None:
            values = values.sign() * exact
        if scale_name(weight_name) in gguf.infos:
            values = values * float(self._read(scale_name(weight_name)))
        if gguf.architecture.permuted and weight_name.endswith(PERMUTED):
            n, k = values.shape
            half = gguf.plan.config.head_dim // 2
            values = values.view(-1, half, 2, k).transpose(1, 2).reshape(n, k)
        return values.sign().to(torch.int8), values.abs()


def _values(kind: str, data: Any, shape: tuple[int, ...], layout: str) -> Tensor:
    if kind in _DENSE:
        return torch.from_numpy(data.copy()).view(_DENSE[kind]).float()
    if kind == "I2_S":
        return torch.from_numpy(_i2s_values(data, shape, layout))
    if kind in _Q2_BLOCKS:
        return torch.from_numpy(_q2_values(data, _Q2_BLOCKS[kind]))
    if kind == "PTQ1_0":
        return torch.from_numpy(_ptq1_values(data))
    try:
        import gguf
    except ImportError:
        reject(
            "gguf-package", "the gguf package for --verify", "none", "pip install bitnet-ops[gguf]"
        )
    number = gguf.GGMLQuantizationType[kind]
    rows = data.reshape(shape[0], -1)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(rows, number)))


def _i2s_values(data: Any, shape: tuple[int, ...], layout: str) -> Any:
    """For every weight of the stream its byte and bits, as Microsoft's quantiser places them."""
    n, k = shape
    scale = np.frombuffer(data[n * k // 4 :][:4].tobytes(), dtype="<f4")[0]
    out = np.empty(n * k, dtype=np.float32)
    for begin in range(0, n * k, _CHUNK):
        i = np.arange(begin, min(begin + _CHUNK, n * k))
        if layout == "c":
            byte, lane = i // (4 * k) * k + i % k, i // k % 4
        else:
            block = 128 if layout == "a" else 64
            byte, lane = i // block * (block // 4) + i % (block // 4), i % block // (block // 4)
        codes = (data[byte] >> (6 - 2 * lane).astype(np.uint8)) & 3
        out[i] = (codes.astype(np.float32) - 1) * scale
    return out


def _ptq1_values(data: Any) -> Any:
    """For every weight of a block its byte, and how many digits of that byte come before its own.

    A byte b stands for the fraction b / 256, whose first ternary digits are the codes.
    """
    blocks = data.reshape(-1, 28)
    j = np.arange(128)
    byte = np.where(j < 80, j % 16, np.where(j < 120, 16 + j % 8, 24 + j % 2))
    place = np.where(j < 80, j // 16, np.where(j < 120, (j - 80) // 8, (j - 120) // 2))
    scales = blocks[:, 26:].copy().view("<f2").astype(np.float32)
    out = np.empty((len(blocks), 128), dtype=np.float32)
    for begin in range(0, len(blocks), _CHUNK // 128):
        part = slice(begin, begin + _CHUNK // 128)
        scaled = blocks[part, byte].astype(np.int64) * 3 ** (place + 1)
        out[part] = (scaled // 256 % 3 - 1) * scales[part]
    return out


def _q2_values(data: Any, block: int) -> Any:
    record = np.dtype([("d", "<f2"), ("q", "u1", (block // 4,))])
    blocks = np.frombuffer(data.tobytes(), dtype=record)
    out = np.empty((len(blocks), block), dtype=np.float32)
    for lane in range(4):
        codes = (blocks["q"] >> np.uint8(2 * lane)) & np.uint8(3)
        out[:, lane::4] = (codes.astype(np.float32) - 1) * blocks["d"].astype(np.float32)[:, None]
    return out
