"""Cases of the ternary products: gemv, gemm, linear, qkv_forward, mlp_forward.

It must not know how anything is timed. Results are checked against sums that torch computes from
the unpacked weights; float32 is exact there: no sum of K <= 131072 int8 values reaches 2^24.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.bench.cases import Case, cycle, require_slots, rival_cycle
from bitnet_ops.bench.harness import Run
from bitnet_ops.bench.limits import read_limit
from bitnet_ops.bench.shapes import ModelShape
from bitnet_ops.bench.workspace import Workspace, unpack_fields

EPS = 1e-5
_CHECK_ROWS = 1024  # at a time, to bound the memory of a check


def row_bytes(k: int) -> int:
    """Bytes of a packed row of K weights."""
    return 32 * -(-k // 128)


def carve(slot: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Consecutive packed matrices (N, K) inside one slot."""
    pieces, at = [], 0
    for n, k in shapes:
        size = n * row_bytes(k)
        pieces.append(slot[at : at + size].view(n, row_bytes(k)))
        at += size
    return pieces


def ternary_slots(
    ws: Workspace, shapes: list[tuple[int, int]], *, hot: bool
) -> tuple[list[list[Tensor]], int]:
    """Slots with one packed matrix a shape, and the bytes of a slot."""
    size = sum(n * row_bytes(k) for n, k in shapes)
    slots = ws.ternary.slots(size)
    require_slots(slots, "+".join(f"{n}x{k}" for n, k in shapes), hot)
    return [carve(slot, shapes) for slot in (slots[:1] if hot else slots)], size


def exact_product(weight: Tensor, x: Tensor) -> Tensor:
    """int32 [M, N] of packed weight [N, R] and int8 x [M, K], without our ops."""
    parts = [
        F.linear(x.float(), unpack_fields(rows)[:, : x.shape[1]].float())
        for rows in weight.split(_CHECK_ROWS)
    ]
    return torch.cat(parts, dim=1).to(torch.int32)


def matmul_case(ws: Workspace, n: int, k: int, m: int, *, hot: bool) -> Case:
    """gemv (M = 1) or gemm with both scales, int8 in, float32 out."""
    slots, size = ternary_slots(ws, [(n, k)], hot=hot)
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=ws.generator)
    x_scale, scale = torch.full((m,), 0.01), torch.tensor([0.5])
    name, op = ("gemv", ops.gemv) if m == 1 else ("gemm", ops.gemm)
    given = x[0] if m == 1 else x
    weight = slots[0][0]
    expected = functools.cache(lambda: exact_product(weight, x).view(given.shape[:-1] + (n,)))

    def check() -> bool:
        exact = expected()
        factor = scale * (x_scale if m == 1 else x_scale[:, None])
        return torch.equal(op(weight, given), exact) and torch.equal(
            op(weight, given, x_scale, scale), exact.float() * factor
        )

    return Case(
        name=name,
        shape={"M": m, "N": n, "K": k},
        dtype="int8",
        memory="hot" if hot else "cold",
        bytes=size,
        macs=m * n * k,
        integer=True,
        run=cycle(lambda w: op(w, given, x_scale, scale), slots, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        rivals=product_rivals(ws, n, k, m, hot=hot),
    )


def torch_has_int8() -> bool:
    """Whether torch's int8 product runs on int8 instructions; else it is a scalar loop."""
    features = _runtime.cpu_features()
    return features.get("avx512_vnni", False) or features.get("amx_int8", False)


def product_rivals(ws: Workspace, n: int, k: int, m: int, *, hot: bool) -> dict[str, Run]:
    """torch's own product at the same shape: bfloat16 linear, int8 where the CPU has it."""
    rivals = {}
    dense = dense_slots(ws, [(n, k)])
    if len(dense) > 1:
        x = torch.randn(m, k, generator=ws.generator).bfloat16()
        rivals["torch_bf16"] = rival_cycle(lambda w: F.linear(x, w), dense, hot=hot)
    slots = ws.ternary.slots(n * k)
    if torch_has_int8() and len(slots) > 1:
        x_i8 = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=ws.generator)
        columns = [(slot.view(torch.int8).view(n, k).t(),) for slot in slots]
        rivals["torch_int8"] = rival_cycle(lambda w: torch._int_mm(x_i8, w), columns, hot=hot)
    return rivals


def dense_slots(ws: Workspace, shapes: list[tuple[int, int]]) -> list[list[Tensor]]:
    """Slots with one bfloat16 matrix (N, K) a shape."""
    slots = ws.dense.slots(2 * sum(n * k for n, k in shapes))
    found = []
    for slot in slots:
        flat = slot.view(torch.bfloat16)
        pieces = flat.split([n * k for n, k in shapes])
        found.append([p.view(n, k) for p, (n, k) in zip(pieces, shapes, strict=True)])
    return found


def linear_case(ws: Workspace, n: int, k: int, m: int, *, hot: bool) -> Case:
    """linear: quantisation, product and scales in one call, bfloat16 in and out."""
    slots, size = ternary_slots(ws, [(n, k)], hot=hot)
    x = torch.randn(m, k, generator=ws.generator).bfloat16()
    scale = torch.tensor([k**-0.5])
    weight = slots[0][0]

    def check() -> bool:
        q, x_scale = ops.quantize_activations(x)
        expected = exact_product(weight, q).float() * (scale * x_scale)[:, None]
        return torch.equal(ops.linear(x, weight, scale), expected.bfloat16())

    return Case(
        name="linear",
        shape={"M": m, "N": n, "K": k},
        dtype="bfloat16",
        memory="hot" if hot else "cold",
        bytes=size,
        macs=m * n * k,
        integer=True,
        run=cycle(lambda w: ops.linear(x, w, scale), slots, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        rivals=product_rivals(ws, n, k, m, hot=hot),
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
) -> Case:
    slots, size = ternary_slots(ws, shapes, hot=hot)
    dense = dense_slots(ws, shapes)

    def check() -> bool:
        got, expected = fused(*slots[0]), composed(*slots[0])
        pairs = zip(_tuple(got), _tuple(expected), strict=True)
        return all(torch.equal(g, e) for g, e in pairs)

    return Case(
        name=name,
        shape={"M": m, "N": sum(n for n, _ in shapes), "K": shapes[0][1]},
        dtype="bfloat16",
        memory="hot" if hot else "cold",
        bytes=size,
        macs=m * sum(n * k for n, k in shapes),
        integer=True,
        run=cycle(fused, slots, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        rivals={"torch_bf16": rival_cycle(rival, dense, hot=hot)} if len(dense) > 1 else {},
    )


def _tuple(value: object) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def qkv_case(ws: Workspace, model: ModelShape, m: int, *, hot: bool) -> Case:
    """qkv_forward: norm, quantisation and three products in one call."""
    hidden = model.hidden_size
    shapes = [(model.q_features, hidden), (model.kv_features, hidden), (model.kv_features, hidden)]
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    gain, scale = torch.ones(hidden, dtype=torch.bfloat16), torch.tensor([hidden**-0.5])

    def fused(q: Tensor, k: Tensor, v: Tensor) -> object:
        return ops.qkv_forward(x, gain, q, scale, k, scale, v, scale, EPS)

    def composed(*weights: Tensor) -> object:
        normed = ops.rms_norm(x, gain, EPS)
        return tuple(ops.linear(normed, w, scale) for w in weights)

    def rival(*weights: Tensor) -> object:
        normed = F.rms_norm(x, (hidden,), gain, EPS)
        return tuple(F.linear(normed, w) for w in weights)

    return _fused_case(ws, "qkv_forward", shapes, m, fused, composed, rival, hot=hot)


def mlp_case(ws: Workspace, model: ModelShape, m: int, *, hot: bool) -> Case:
    """mlp_forward: two norms, activation and three products in one call."""
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    gain, sub_gain = (torch.ones(size, dtype=torch.bfloat16) for size in (hidden, inner))
    scale, down_scale = torch.tensor([hidden**-0.5]), torch.tensor([inner**-0.5])

    def fused(gate: Tensor, up: Tensor, down: Tensor) -> object:
        return ops.mlp_forward(
            x, gain, gate, scale, up, scale, sub_gain, down, down_scale, EPS, "relu2"
        )

    def composed(gate: Tensor, up: Tensor, down: Tensor) -> object:
        normed = ops.rms_norm(x, gain, EPS)
        z = ops.relu2_mul(ops.linear(normed, gate, scale), ops.linear(normed, up, scale))
        return ops.linear(ops.rms_norm(z, sub_gain, EPS), down, down_scale)

    def rival(gate: Tensor, up: Tensor, down: Tensor) -> object:
        normed = F.rms_norm(x, (hidden,), gain, EPS)
        z = F.relu(F.linear(normed, gate)).square() * F.linear(normed, up)
        return F.linear(F.rms_norm(z, (inner,), sub_gain, EPS), down)

    return _fused_case(ws, "mlp_forward", shapes, m, fused, composed, rival, hot=hot)
