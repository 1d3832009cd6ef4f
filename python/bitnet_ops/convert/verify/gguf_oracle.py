"""`convert --verify` for GGUF files: the result against the file, which is decoded a second time.

The second decoding shares nothing with the first: TQ1_0 and TQ2_0 go through the gguf package, I2_S
and Q2_0 element by element from their definition, q and k are turned back by reshaping. The forward
is plain_forward.py's. It must not know how model.bin was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.convert.errors import refuse
from bitnet_ops.convert.gguf.config import PERMUTED
from bitnet_ops.convert.verify.comparison import Verification, our_logits, sample_sequences
from bitnet_ops.convert.verify.plain_forward import PlainOracle
from bitnet_ops.convert.verify.texts import text_sequences
from bitnet_ops.formats import sglbitnt
from bitnet_ops.formats.gguf import Reader

if TYPE_CHECKING:
    from bitnet_ops.convert.gguf.source import GgufPlan

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 20


def verify_gguf(
    reader: Reader, plan: GgufPlan, folder: Path, i2s_layout: str, text: Path | None = None
) -> Verification:
    """Compare a finished model (its folder or .bin file) with the GGUF file it was made of.

    The result's `failures` says what is wrong.
    """
    oracle = GgufOracle(reader, plan, i2s_layout)
    if text is None:
        sequences, label = sample_sequences(folder, plan)  # type: ignore[arg-type]
    else:
        sequences, label = text_sequences(folder, plan.config, text), f"text {text.name}"
    result = Verification(oracle.name, "a GGUF file is not its to read", label)
    _compare_weights(plan, folder, oracle, result)
    reference, ours = oracle.logits(sequences), our_logits(folder, sequences)
    for ids, expected, found in zip(sequences, reference, ours, strict=True):
        result.logits.add(ids, expected, found)
    result.failures += result.logits.failures()
    return result


def _compare_weights(
    plan: GgufPlan, folder: Path, oracle: GgufOracle, result: Verification
) -> None:
    """Every value of every projection: code times scale must be equal to the last bit."""
    with sglbitnt.Reader(sglbitnt.model_file(folder)) as ours:
        for name, spec in plan.specs.items():
            if spec.kind != "ternary":
                continue
            expected, _ = oracle.projection(name)
            scales = ours.scales(name)
            if ours.tensors[name].group_size:
                scales = scales.repeat_interleave(128, dim=1)[:, : spec.shape[1]]
            codes = ops.unpack(ours.tensor(name), spec.shape[1])
            different = int((codes.float() * scales != expected).sum())
            result.projections += 1
            result.weights += expected.numel()
            result.weights_different += different
            if different:
                share = different / expected.numel()
                result.failures.append(f"{share:.3%} of the weights of {name} differ")


class GgufOracle(PlainOracle):
    """The file as a reference: projections as fp32 values, and the logits of a plain forward."""

    name = "plain fp32 forward of the file, decoded a second time"

    def __init__(self, reader: Reader, plan: GgufPlan, i2s_layout: str) -> None:
        super().__init__(self, plan)  # type: ignore[arg-type]
        self._reader, self._gguf, self._layout = reader, plan, i2s_layout

    def tensor(self, name: str) -> Tensor:
        """The tensor with the Hugging Face name `name`, fp32."""
        info = self._gguf.infos[name]
        values = _values(info.type.name, self._reader.data(info.name), info.shape, self._layout)
        return values.view(info.shape)

    def _read(self, name: str) -> Tensor:
        return self.tensor(name)

    def projection(self, weight_name: str) -> tuple[Tensor, float]:
        """(values fp32 [N, K], 1.0): scales may differ from group to group."""
        from bitnet_ops.convert.gguf.source import scale_name

        plan, values = self._gguf, self.tensor(weight_name)
        if plan.assumed_online and plan.infos[weight_name].type.name in _DENSE:
            refuse("gguf-verify", "projections that are ternary in the file", "masters")
        exact = plan.exact_scales.get(plan.infos[weight_name].name)
        if exact is not None:
            values = values.sign() * exact
        if scale_name(weight_name) in plan.infos:
            values = values * float(self.tensor(scale_name(weight_name)))
        if plan.architecture.permuted and weight_name.endswith(PERMUTED):
            n, k = values.shape
            half = plan.config.head_dim // 2
            values = values.view(-1, half, 2, k).transpose(1, 2).reshape(n, k)
        return values, 1.0


def _values(kind: str, data: Any, shape: tuple[int, ...], layout: str) -> Tensor:
    if kind in _DENSE:
        return torch.from_numpy(data.copy()).view(_DENSE[kind]).float()
    if kind == "I2_S":
        return torch.from_numpy(_i2s_values(data, shape, layout))
    if kind.startswith("Q2_0"):
        return torch.from_numpy(_q2_values(data, 128 if kind.endswith("128") else 64))
    try:
        import gguf
    except ImportError:
        refuse(
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


def _q2_values(data: Any, block: int) -> Any:
    record = np.dtype([("d", "<f2"), ("q", "u1", (block // 4,))])
    blocks = np.frombuffer(data.tobytes(), dtype=record)
    out = np.empty((len(blocks), block), dtype=np.float32)
    for lane in range(4):
        codes = (blocks["q"] >> np.uint8(2 * lane)) & np.uint8(3)
        out[:, lane::4] = (codes.astype(np.float32) - 1) * blocks["d"].astype(np.float32)[:, None]
    return out
