"""The case of every op: what it reads, what torch alone would do, and how its result is checked.

Ternary products are checked against sums that torch computes from the unpacked weights; float32 is
exact there: no sum of K <= 131072 int8 values reaches 2^24. Fused ops are checked against their
parts, everything else against plain C++ on one thread, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench.cases import Case, Result, baseline_cycle, cycle, equal, equal_to_scalar
from bitnet_ops.bench.limits import read_limit
from bitnet_ops.bench.memory import Workspace, require_slots
from bitnet_ops.bench.shapes import ModelShape
from bitnet_ops.nn.kv_config import DEFAULT_BLOCK_SIZE, KV_DTYPES
from bitnet_ops.nn.kv_pool import best_layout
from bitnet_ops.nn.packing import PackedWeight, pack_ternary
from bitnet_ops.nn.storage import KV_TYPES

EPS = 1e-5
_CHECK_ROWS = 1024  # at a time, to bound the memory of a check
_CHECK_TOKENS = 32  # from either end of a batch: thousands of tokens would take seconds
_HEAD_CHECK_ROWS = 2048
_BASELINE_TOKENS = 128  # without bfloat16 instructions torch takes ten seconds and more for more
_WINDOW_BYTES = 1 << 24  # of the read pass beside operands that are larger than this
_HEAD_GROUP, _HEAD_TILE = 128, 16  # of an int4 head: features of a scale, rows of a tile


def unpack_fields(weight: Tensor) -> Tensor:
    """int8 [N, 4 R] of -1, 0, 1 from packed uint8 [N, R]: FORMAT.md in four shifts.

    Written a second time on purpose: it checks the op's results and must not share its code.
    """
    blocks = weight.view(weight.shape[0], -1, 1, 32)
    fields = torch.cat([blocks >> shift & 3 for shift in (6, 4, 2, 0)], dim=2)
    return fields.reshape(weight.shape[0], -1).to(torch.int8) - 1


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


def random_matrix(ws: Workspace, n: int, k: int, weight_format: str) -> PackedWeight:
    """A matrix made the way a model makes it: packed, then converted."""
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=ws.generator)
    return pack_ternary(codes).repack(weight_format)


def _ternary_case(
    ws: Workspace,
    name: str,
    shapes: list[tuple[int, int]],
    m: int,
    op: Callable[..., Result],
    expected: Callable[..., Result],
    torch_op: Callable[..., object],
    *,
    hot: bool,
    weight_format: str,
    dtype: str = "bfloat16",
) -> Case:
    """A case of `op` on ternary matrices (N, K), given as tensors.

    `expected` computes the same for `some_tokens(m)` from PackedWeights in another way; `torch_op`
    takes bfloat16 matrices of the same shapes.
    """
    matrices, size = ws.matrices(shapes, weight_format, hot=hot)
    dense, _ = ws.dense.tensors(shapes, torch.bfloat16)
    has_baseline = len(dense) > 1 and m <= _BASELINE_TOKENS

    @functools.cache
    def reference() -> tuple[list[Tensor], Result]:
        made = [random_matrix(ws, n, k, weight_format) for n, k in shapes]
        return [matrix.weight for matrix in made], expected(*made)

    def check() -> bool:
        weights, right = reference()
        got = op(*weights)
        some = [r.view(m, -1)[some_tokens(m)] for r in ([got] if isinstance(got, Tensor) else got)]
        return equal(some, right)

    return Case(
        name=name,
        shape={"M": m, "N": sum(n for n, _ in shapes), "K": shapes[0][1]},
        dtype=dtype,
        bytes=size,
        macs=m * sum(n * k for n, k in shapes),
        integer=True,
        run=cycle(op, matrices, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        baselines={"torch_bf16": baseline_cycle(torch_op, dense, hot=hot)} if has_baseline else {},
        format=weight_format,
    )


def matmul_case(ws: Workspace, n: int, k: int, m: int, *, hot: bool, weight_format: str) -> Case:
    """gemv (M = 1) or gemm with both scales, int8 in, float32 out."""
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=ws.generator)
    x_bf16 = torch.randn(m, k, generator=ws.generator).bfloat16()
    x_scale, scale = torch.full((m,), 0.01), torch.tensor([0.5])
    name, product = ("gemv", ops.gemv) if m == 1 else ("gemm", ops.gemm)
    given = x[0] if m == 1 else x

    def op(weight: Tensor) -> Tensor:
        return product(weight, given, x_scale, scale, (n, k))

    def expected(weight: PackedWeight) -> Result:
        some = some_tokens(m)
        exact = exact_product(weight.to_canonical().weight, x[some])
        return [exact.float() * (scale * x_scale[some])[:, None]]

    chosen: Any = {"hot": hot, "weight_format": weight_format, "dtype": "int8"}
    return _ternary_case(
        ws, name, [(n, k)], m, op, expected, lambda w: F.linear(x_bf16, w), **chosen
    )


def linear_case(ws: Workspace, n: int, k: int, m: int, *, hot: bool, weight_format: str) -> Case:
    """linear: quantisation, product and scales in one call, bfloat16 in and out."""
    x = torch.randn(m, k, generator=ws.generator).bfloat16()
    scale = torch.tensor([k**-0.5])

    def expected(weight: PackedWeight) -> Result:
        q, x_scale = ops.quantize_activations(x[some_tokens(m)])
        exact = exact_product(weight.to_canonical().weight, q)
        return [(exact.float() * (scale * x_scale)[:, None]).bfloat16()]

    return _ternary_case(
        ws,
        "linear",
        [(n, k)],
        m,
        lambda w: ops.linear(x, w, scale, None, (n, k)),
        expected,
        lambda w: F.linear(x, w),
        hot=hot,
        weight_format=weight_format,
    )


def qkv_case(ws: Workspace, model: ModelShape, m: int, *, hot: bool, weight_format: str) -> Case:
    """qkv_forward: norm, quantisation and three products in one call."""
    hidden = model.hidden_size
    shapes = [(model.q_features, hidden), (model.kv_features, hidden), (model.kv_features, hidden)]
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    norm, scale = torch.ones(hidden, dtype=torch.bfloat16), torch.tensor([hidden**-0.5])
    shape = [size for matrix in shapes for size in matrix]

    def op(q: Tensor, k: Tensor, v: Tensor) -> Result:
        return ops.qkv_forward(x, norm, q, scale, k, scale, v, scale, EPS, shape)

    def expected(*weights: PackedWeight) -> Result:
        normed = ops.rms_norm(x[some_tokens(m)], norm, EPS)
        return [ops.linear(normed, w.to_canonical().weight, scale) for w in weights]

    def torch_op(*weights: Tensor) -> object:
        normed = F.rms_norm(x, (hidden,), norm, EPS)
        return [F.linear(normed, w) for w in weights]

    chosen: Any = {"hot": hot, "weight_format": weight_format}
    return _ternary_case(ws, "qkv_forward", shapes, m, op, expected, torch_op, **chosen)


def mlp_case(ws: Workspace, model: ModelShape, m: int, *, hot: bool, weight_format: str) -> Case:
    """mlp_forward: two norms, activation and three products in one call."""
    hidden, inner = model.hidden_size, model.intermediate_size
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    norm, sub_norm = (torch.ones(size, dtype=torch.bfloat16) for size in (hidden, inner))
    scale, down_scale = torch.tensor([hidden**-0.5]), torch.tensor([inner**-0.5])
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    shape = [size for matrix in shapes for size in matrix]

    def op(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = (gate, scale, up, scale, sub_norm, down, down_scale)
        return ops.mlp_forward(x, norm, *weights, EPS, "relu2", shape)

    def expected(*weights: PackedWeight) -> Result:
        gate, up, down = (w.to_canonical().weight for w in weights)
        normed = ops.rms_norm(x[some_tokens(m)], norm, EPS)
        z = ops.relu2_mul(ops.linear(normed, gate, scale), ops.linear(normed, up, scale))
        return [ops.linear(ops.rms_norm(z, sub_norm, EPS), down, down_scale)]

    def torch_op(gate: Tensor, up: Tensor, down: Tensor) -> object:
        normed = F.rms_norm(x, (hidden,), norm, EPS)
        z = F.relu(F.linear(normed, gate)).square() * F.linear(normed, up)
        return F.linear(F.rms_norm(z, (inner,), sub_norm, EPS), down)

    chosen: Any = {"hot": hot, "weight_format": weight_format}
    return _ternary_case(ws, "mlp_forward", shapes, m, op, expected, torch_op, **chosen)


def _eager_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float()
    scale = 127.0 / values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return (values * scale).round().clamp(-128, 127).to(torch.int8), 1.0 / scale


def row_cases(ws: Workspace, model: ModelShape, m: int) -> list[Case]:
    """quantize_activations, rms_norm and relu2_mul at the model's widths: rows of activations,
    which are hot in a model."""
    hidden, inner = model.hidden_size, model.intermediate_size
    widths = (hidden, inner, inner)
    x, gate, up = (torch.randn(m, k, generator=ws.generator).bfloat16() for k in widths)
    norm = torch.ones(hidden, dtype=torch.bfloat16)

    def case(
        name: str, moved: int, op: Callable[..., Result], torch_op: Any, *operands: Tensor
    ) -> Case:
        return Case(
            name=name,
            shape={"M": m, "K": operands[0].shape[1]},
            bytes=moved,
            run=cycle(op, [operands], hot=True),
            read=read_limit(ws.ternary, moved, hot=True),
            check=lambda: equal_to_scalar(lambda: op(*operands)),
            baselines={"torch_bf16": cycle(torch_op, [operands], hot=True)},
        )

    def torch_norm(a: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(a, (hidden,), w, EPS)

    def torch_relu2(g: Tensor, u: Tensor) -> Tensor:
        return F.relu(g).square() * u

    q_bytes, norm_bytes = 3 * m * hidden + 4 * m, 4 * m * hidden + 2 * hidden
    quantize = ops.quantize_activations
    return [
        case("quantize_activations", q_bytes, quantize, _eager_quantize, x),
        case("rms_norm", norm_bytes, lambda a, w: ops.rms_norm(a, w, EPS), torch_norm, x, norm),
        case("relu2_mul", 6 * m * inner, ops.relu2_mul, torch_relu2, gate, up),
    ]


def _heads(ws: Workspace, model: ModelShape, head_format: str) -> tuple[list[list[Any]], int]:
    """Heads [weight, scale] in cold memory, and the bytes of one; any byte is a valid weight."""
    vocab, hidden = model.vocab_size, model.hidden_size
    tiles, groups = -(-vocab // _HEAD_TILE), -(-hidden // _HEAD_GROUP)
    shape: tuple[int, ...]
    dtype, shape, scale = torch.bfloat16, (vocab, hidden), None
    if head_format == "int8":
        dtype, scale = torch.int8, torch.full((vocab,), 0.01)
    elif head_format == "int4":
        dtype, shape = torch.uint8, (tiles, groups * _HEAD_GROUP // 8, 64)
        scale = torch.full((tiles, groups, _HEAD_TILE), 0.01, dtype=torch.bfloat16)
    found, size = ws.dense.tensors([shape], dtype)
    return [[weight, scale] for (weight,) in found], size + (
        scale.nbytes if scale is not None else 0
    )


def head_case(ws: Workspace, model: ModelShape, head_format: str = "bf16") -> Case:
    """lm_head for one token, cold."""
    vocab, hidden = model.vocab_size, model.hidden_size
    heads, size = _heads(ws, model, head_format)
    dense, _ = _heads(ws, model, "bf16")
    x = torch.randn(1, hidden, generator=ws.generator).bfloat16()

    def check() -> bool:
        weight, scale = heads[0]
        few = _HEAD_CHECK_ROWS // (_HEAD_TILE if head_format == "int4" else 1)
        part = (weight[:few], None if scale is None else scale[:few])
        some = ops.lm_head(x, *part)
        whole = ops.lm_head(x, weight, scale, (vocab, hidden))[:, : some.shape[-1]]
        same = torch.equal(whole, some[:, : whole.shape[-1]])
        return same and equal_to_scalar(lambda: ops.lm_head(x, *part))

    return Case(
        name="lm_head",
        shape={"M": 1, "N": vocab, "K": hidden},
        bytes=size,
        macs=vocab * hidden,
        run=cycle(lambda w, s: ops.lm_head(x, w, s, (vocab, hidden)), heads, hot=False),
        read=read_limit(ws.ternary, min(size, _WINDOW_BYTES), hot=False),
        check=check,
        baselines={"torch_bf16": baseline_cycle(lambda w, _: F.linear(x, w), dense, hot=False)},
        format=head_format,
    )


def _caches(
    ws: Workspace, shape: tuple[int, int, int, int], kv_dtype: str
) -> tuple[list[list[Tensor]], int]:
    """Keys, values and the scales of int8, [B, KV, L, D], cold; and the bytes of one set."""
    kind, dtype = KV_TYPES[kv_dtype], KV_DTYPES[kv_dtype]
    # no byte of ternary weights is a NaN of an 8-bit float, for it would hold the code 3
    eight_bits = kind.itemsize == 1 and dtype.is_floating_point
    found, size = (ws.ternary if eight_bits else ws.dense).tensors([shape, shape], dtype)
    require_slots(found, f"a cache of {shape[2]} tokens", hot=False)
    if not kind.has_scales:
        return found, size
    # any byte is a valid code; scales in memory of their own, as a cache has them
    scaled = [kv + [torch.full(shape[:-1], 0.01) for _ in "kv"] for kv in found]
    return scaled, size + 8 * math.prod(shape[:-1])


def attention_case(
    ws: Workspace, model: ModelShape, context: int, kv_dtype: str = "bfloat16"
) -> Case:
    """paged_attention of one new token over one block of `context` tokens in rows, cold."""
    found, size = _caches(ws, _cache_shape(model, context), kv_dtype)
    caches = [[t.transpose(1, 2) for t in tensors] for tensors in found]
    query, scale = _one_query(ws, model), model.head_dim**-0.5
    where = torch.tensor([0, 1]), torch.tensor([context]), torch.zeros(1, 1, dtype=torch.int64)

    def decode(keys: Tensor, values: Tensor, *scales: Tensor) -> Tensor:
        key_scale, value_scale = scales or (None, None)
        return ops.paged_attention(query, keys, values, *where, scale, key_scale, value_scale)

    return _decode_case(ws, model, context, kv_dtype, "attention", decode, caches, size)


def pool_layout(model: ModelShape, kv_dtype: str) -> str:
    """How the engine's pool lies for that model."""
    return best_layout(KV_DTYPES[kv_dtype], DEFAULT_BLOCK_SIZE, model.head_dim)


def paged_attention_case(
    ws: Workspace, model: ModelShape, context: int, kv_dtype: str = "bfloat16"
) -> Case:
    """paged_attention of one new token over a pool as `KVPool` has it, cold."""
    block, dim = DEFAULT_BLOCK_SIZE, model.head_dim
    layout = pool_layout(model, kv_dtype)
    blocks = -(-context // block)
    found, size = _caches(ws, (blocks, model.num_key_value_heads, block, dim), kv_dtype)
    pools = [[t.transpose(1, 2) for t in tensors] for tensors in found]
    query = _one_query(ws, model)
    where = torch.tensor([0, 1]), torch.tensor([context]), torch.arange(blocks)[None]

    def decode(keys: Tensor, values: Tensor, *scales: Tensor) -> Tensor:
        key_scale, value_scale = scales or (None, None)
        return ops.paged_attention(
            query, keys, values, *where, dim**-0.5, key_scale, value_scale, layout
        )

    return _decode_case(ws, model, context, kv_dtype, "paged_attention", decode, pools, size)


def _cache_shape(model: ModelShape, context: int) -> tuple[int, int, int, int]:
    return 1, model.num_key_value_heads, context, model.head_dim


def _one_query(ws: Workspace, model: ModelShape) -> Tensor:
    shape = 1, model.num_attention_heads, model.head_dim
    return torch.randn(shape, generator=ws.generator).bfloat16()


def _decode_case(
    ws: Workspace,
    model: ModelShape,
    context: int,
    kv_dtype: str,
    name: str,
    decode: Callable[..., Tensor],
    caches: list[list[Tensor]],
    size: int,
) -> Case:
    """`decode` over caches of `size` bytes, beside torch's attention over as many positions."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    plain, _ = _caches(ws, _cache_shape(model, context), "bfloat16")
    query = _one_query(ws, model)[:, :, None]

    def torch_op(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return Case(
        name=name,
        shape={"M": 1, "context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
        bytes=size,
        macs=2 * heads * context * dim,
        run=cycle(decode, caches, hot=False),
        read=read_limit(ws.ternary, min(size, _WINDOW_BYTES), hot=False),
        check=lambda: equal_to_scalar(lambda: decode(*caches[0])),
        baselines={"torch_bf16": baseline_cycle(torch_op, plain, hot=False)},
        format="-" if kv_dtype == "bfloat16" else kv_dtype,
    )
