"""Cases of the ternary products: gemv, gemm, linear, qkv_forward, mlp_forward.

It must not know how anything is timed. Results are checked against sums that torch computes from
the unpacked weights; float32 is exact there: no sum of K <= 131072 int8 values reaches 2^24.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench.cases import Case, cycle, rival_cycle
from bitnet_ops.bench.harness import Run
from bitnet_ops.bench.limits import read_limit
from bitnet_ops.bench.shapes import ModelShape
from bitnet_ops.bench.weights import CANONICAL, Matrix, pack_random, slots
from bitnet_ops.bench.workspace import Workspace, unpack_fields

EPS = 1e-5
_CHECK_ROWS = 1024  # at a time, to bound the memory of a check
_RIVAL_TOKENS = 128
_CHECK_TOKENS = 32  # from either end of a batch: thousands of tokens would take seconds


def exact_product(weight: Tensor, x: Tensor) -> Tensor:
    """int32 [M, N] of packed weight [N, R] and int8 x [M, K], without our ops."""
    parts = [
        F.linear(x.float(), unpack_fields(rows)[:, : x.shape[1]].float())
        for rows in weight.split(_CHECK_ROWS)
    ]
    return torch.cat(parts, dim=1).to(torch.int32)


def some_tokens(m: int) -> Tensor:
    """The tokens of a batch of m whose results are checked: all, or those at either end."""
    tokens = torch.arange(m)
    return torch.cat([tokens[:_CHECK_TOKENS], tokens[_CHECK_TOKENS:][-_CHECK_TOKENS:]])


def checked_matrix(slot: Matrix, ws: Workspace) -> Matrix:
    """What a check multiplies by: the slot itself; in a private layout a matrix that was converted.

    Cold memory holds valid bytes of a private layout, but not the padding that the layout wants.
    """
    if slot.format == CANONICAL:
        return slot
    return pack_random(slot.n, slot.k, slot.format, ws.generator)


def matmul_case(
    ws: Workspace, n: int, k: int, m: int, *, hot: bool, weight_format: str = CANONICAL
) -> Case:
    """gemv (M = 1) or gemm with both scales, int8 in, float32 out."""
    matrices, size = slots(ws, [(n, k)], weight_format, hot=hot)
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=ws.generator)
    x_scale, scale = torch.full((m,), 0.01), torch.tensor([0.5])
    name, op = ("gemv", ops.gemv) if m == 1 else ("gemm", ops.gemm)
    given = x[0] if m == 1 else x
    extra = matrices[0][0].extra

    def check() -> bool:
        matrix = checked_matrix(matrices[0][0], ws)
        some = some_tokens(m)
        exact = exact_product(matrix.canonical(), x[some])
        sums = op(matrix.data, given, **extra).view(m, n)[some]
        scaled = op(matrix.data, given, x_scale, scale, **extra).view(m, n)[some]
        expected = exact.float() * (scale * x_scale[some])[:, None]
        return torch.equal(sums, exact) and torch.equal(scaled, expected)

    return Case(
        name=name,
        shape={"M": m, "N": n, "K": k},
        dtype="int8",
        memory="hot" if hot else "cold",
        bytes=size,
        macs=m * n * k,
        integer=True,
        run=cycle(lambda w: op(w.data, given, x_scale, scale, **extra), matrices, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=functools.cache(check),
        rivals=product_rivals(ws, n, k, m, hot=hot),
        format=weight_format,
    )


def product_rivals(ws: Workspace, n: int, k: int, m: int, *, hot: bool) -> dict[str, Run]:
    """torch's own product at the same shape: bfloat16 linear, and int8 on prepacked weights."""
    rivals = {}
    dense = dense_slots(ws, [(n, k)])
    # without bfloat16 instructions torch takes ten seconds and more for more tokens
    if len(dense) > 1 and m <= _RIVAL_TOKENS:
        x = torch.randn(m, k, generator=ws.generator).bfloat16()
        rivals["torch_bf16"] = rival_cycle(lambda w: F.linear(x, w), dense, hot=hot)
    return rivals | int8_rivals(n, k, m, ws.generator)


def int8_rivals(n: int, k: int, m: int, generator: torch.Generator) -> dict[str, Run]:
    """int8 linears of torch: uint8 activations, one int8 matrix prepacked, so always hot."""
    return {
        "torch_int8_onednn": _lazy(lambda: _onednn_linear(n, k, m, generator)),
        "torch_int8_fbgemm": _lazy(lambda: _fbgemm_linear(n, k, m, generator)),
    }


def _lazy(make: Callable[[], Callable[[], object]]) -> Run:
    """Weights are made and packed when the rival is first run, and not while others are timed."""
    made = functools.cache(make)
    return Run(lambda _: made()(), warm=True)


def _onednn_linear(n: int, k: int, m: int, generator: torch.Generator) -> Callable[[], object]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    packed = torch.ops.onednn.qlinear_prepack(weight, [m, k])
    x = torch.randint(0, 128, (m, k), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int64)
    op = torch.ops.onednn.qlinear_pointwise.default
    arguments: Any = (
        x,
        0.05,
        0,
        packed,
        scales,
        zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return lambda: op(*arguments)


def _fbgemm_linear(n: int, k: int, m: int, generator: torch.Generator) -> Callable[[], object]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch is about to move its quantised tensors
            weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
            quantized = torch._make_per_tensor_quantized_tensor(weight, 0.01, 0)
            packed = torch.ops.quantized.linear_prepack(quantized, None)
            values = torch.randn(m, k, generator=generator)
            x = torch.quantize_per_tensor(values, 0.05, 64, torch.quint8)
    finally:
        torch.backends.quantized.engine = before
    op = torch.ops.quantized.linear.default
    return lambda: op(x, packed, 1.0, 0)


def dense_slots(ws: Workspace, shapes: list[tuple[int, int]]) -> list[list[Tensor]]:
    """Slots with one bfloat16 matrix (N, K) a shape."""
    slots = ws.dense.slots(2 * sum(n * k for n, k in shapes))
    found = []
    for slot in slots:
        flat = slot.view(torch.bfloat16)
        pieces = flat.split([n * k for n, k in shapes])
        found.append([p.view(n, k) for p, (n, k) in zip(pieces, shapes, strict=True)])
    return found


def linear_case(
    ws: Workspace, n: int, k: int, m: int, *, hot: bool, weight_format: str = CANONICAL
) -> Case:
    """linear: quantisation, product and scales in one call, bfloat16 in and out."""
    matrices, size = slots(ws, [(n, k)], weight_format, hot=hot)
    extra = matrices[0][0].extra
    x = torch.randn(m, k, generator=ws.generator).bfloat16()
    scale = torch.tensor([k**-0.5])

    def check() -> bool:
        matrix = checked_matrix(matrices[0][0], ws)
        some = some_tokens(m)
        q, x_scale = ops.quantize_activations(x[some])
        expected = exact_product(matrix.canonical(), q).float() * (scale * x_scale)[:, None]
        got = ops.linear(x, matrix.data, scale, **extra)[some]
        return torch.equal(got, expected.bfloat16())

    return Case(
        name="linear",
        shape={"M": m, "N": n, "K": k},
        dtype="bfloat16",
        memory="hot" if hot else "cold",
        bytes=size,
        macs=m * n * k,
        integer=True,
        run=cycle(lambda w: ops.linear(x, w.data, scale, **extra), matrices, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        rivals=product_rivals(ws, n, k, m, hot=hot),
        format=weight_format,
    )


def _fused_case(
    ws: Workspace,
    name: str,
    shapes: list[tuple[int, int]],
    m: int,
    fused: Callable[..., object],
    composed: Callable[..., object],
    rival: Callable[..., object],
    *,
    hot: bool,
    weight_format: str,
) -> Case:
    matrices, size = slots(ws, shapes, weight_format, hot=hot)
    dense = dense_slots(ws, shapes)

    def check() -> bool:
        checked = [checked_matrix(one, ws) for one in matrices[0]]
        pairs = zip(_tuple(fused(*checked)), _tuple(composed(*checked)), strict=True)
        return all(torch.equal(g, e) for g, e in pairs)

    return Case(
        name=name,
        shape={"M": m, "N": sum(n for n, _ in shapes), "K": shapes[0][1]},
        dtype="bfloat16",
        memory="hot" if hot else "cold",
        bytes=size,
        macs=m * sum(n * k for n, k in shapes),
        integer=True,
        run=cycle(fused, matrices, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        rivals={"torch_bf16": rival_cycle(rival, dense, hot=hot)} if len(dense) > 1 else {},
        format=weight_format,
    )


def _tuple(value: object) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _sizes(*matrices: Matrix) -> dict[str, Any]:
    """The argument of a fused op that gives the rows of private layouts."""
    if matrices[0].format == CANONICAL:
        return {}
    return {"out_features": [matrix.n for matrix in matrices]}


def qkv_case(
    ws: Workspace, model: ModelShape, m: int, *, hot: bool, weight_format: str = CANONICAL
) -> Case:
    """qkv_forward: norm, quantisation and three products in one call."""
    hidden = model.hidden_size
    shapes = [(model.q_features, hidden), (model.kv_features, hidden), (model.kv_features, hidden)]
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    gain, scale = torch.ones(hidden, dtype=torch.bfloat16), torch.tensor([hidden**-0.5])

    def fused(q: Matrix, k: Matrix, v: Matrix) -> object:
        return ops.qkv_forward(
            x, gain, q.data, scale, k.data, scale, v.data, scale, EPS, **_sizes(q, k, v)
        )

    def composed(*weights: Matrix) -> object:
        normed = ops.rms_norm(x, gain, EPS)
        return tuple(ops.linear(normed, w.data, scale, **w.extra) for w in weights)

    def rival(*weights: Tensor) -> object:
        normed = F.rms_norm(x, (hidden,), gain, EPS)
        return tuple(F.linear(normed, w) for w in weights)

    return _fused_case(
        ws, "qkv_forward", shapes, m, fused, composed, rival, hot=hot, weight_format=weight_format
    )


def mlp_case(
    ws: Workspace, model: ModelShape, m: int, *, hot: bool, weight_format: str = CANONICAL
) -> Case:
    """mlp_forward: two norms, activation and three products in one call."""
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    gain, sub_gain = (torch.ones(size, dtype=torch.bfloat16) for size in (hidden, inner))
    scale, down_scale = torch.tensor([hidden**-0.5]), torch.tensor([inner**-0.5])

    def fused(gate: Matrix, up: Matrix, down: Matrix) -> object:
        weights = (gate.data, scale, up.data, scale, sub_gain, down.data, down_scale)
        return ops.mlp_forward(x, gain, *weights, EPS, "relu2", **_sizes(gate, down))

    def composed(gate: Matrix, up: Matrix, down: Matrix) -> object:
        normed = ops.rms_norm(x, gain, EPS)
        z = ops.relu2_mul(
            ops.linear(normed, gate.data, scale, **gate.extra),
            ops.linear(normed, up.data, scale, **up.extra),
        )
        normed = ops.rms_norm(z, sub_gain, EPS)
        return ops.linear(normed, down.data, down_scale, **down.extra)

    def rival(gate: Tensor, up: Tensor, down: Tensor) -> object:
        normed = F.rms_norm(x, (hidden,), gain, EPS)
        z = F.relu(F.linear(normed, gate)).square() * F.linear(normed, up)
        return F.linear(F.rms_norm(z, (inner,), sub_gain, EPS), down)

    return _fused_case(
        ws, "mlp_forward", shapes, m, fused, composed, rival, hot=hot, weight_format=weight_format
    )
