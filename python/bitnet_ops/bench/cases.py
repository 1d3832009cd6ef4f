"""What `bench ops` times: each op at one shape, hot or cold, beside torch, and a check of it.

A result is right when it equals that of plain C++ on one thread, bit for bit. Products are checked
against the canonical rows of the same weight.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.bench.harness import Timed
from bitnet_ops.bench.limits import ReadLimit, read_limit
from bitnet_ops.bench.memory import Workspace, require_slots
from bitnet_ops.bench.shapes import ModelShape
from bitnet_ops.nn.kv_config import DEFAULT_BLOCK_SIZE, KV_DTYPES
from bitnet_ops.nn.kv_pool import best_layout
from bitnet_ops.nn.packing import pack_ternary
from bitnet_ops.nn.storage import KV_TYPES

EPS = 1e-5
_CHECK_TOKENS = 4  # from either end of a batch: plain C++ would take minutes for thousands
_HEAD_CHECK_ROWS = 2048
_BASELINE_TOKENS = 128  # without bfloat16 instructions torch takes ten seconds and more for more
_WINDOW_BYTES = 1 << 24  # of the read pass beside operands that are larger than this
_HEAD_GROUP, _HEAD_TILE = 128, 16  # of an int4 head: features of a scale, rows of a tile


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    shape: what the op's sizes are called: M tokens, N output and K input features, or others.
    bytes: what one call has to read (cold operands), or to read and write (small hot ones).
    check: True when the op's result is right; it runs on the ISA and threads in force.
    macs: multiply-adds of one call; `integer`: they are int8 and have the int8 peak as a limit.
    baselines: name -> the same work by torch alone.
    format: of the weights that are read, where the op has more than one.
    call: the op with next to no work, so that its time is that of Python, torch and the arguments;
        None: a call of another op stands for it.
    dtype: of the activations that go in.
    """

    name: str
    shape: dict[str, int]
    bytes: int
    run: Timed
    read: ReadLimit
    check: Callable[[], bool]
    macs: int = 0
    integer: bool = False
    baselines: dict[str, Timed] = field(default_factory=dict)
    format: str = "-"
    dtype: str = "bfloat16"
    call: Callable[[], object] | None = None

    @property
    def memory(self) -> str:
        """cold: every call reads other memory, cycled over far more than the last cache holds;
        hot: every call reads what the call before it read."""
        return "hot" if self.run.warm else "cold"


def cycle(
    function: Callable[..., object], operands: Sequence[Sequence[object]], *, hot: bool
) -> Timed:
    """`function` on operands[i mod count] at call i; hot keeps to the first."""
    if hot:
        first = operands[0]
        return Timed(lambda _: function(*first), warm=True)
    count = len(operands)
    return Timed(lambda i: function(*operands[i % count]), cold=True)


def baseline_cycle(
    function: Callable[..., object], operands: Sequence[Sequence[object]], *, hot: bool
) -> Timed:
    """As `cycle`, half the memory away from the kernel, whose operands it may share."""
    half = len(operands) // 2
    return cycle(function, [*operands[half:], *operands[:half]], hot=hot)


@contextlib.contextmanager
def scalar_on_one_thread() -> Iterator[None]:
    """The plain C++ kernels on one thread, for the time of a check."""
    isa, threads = _runtime.isa(), torch.get_num_threads()
    _runtime.force_isa("scalar")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _runtime.force_isa(isa)


def equal_to_scalar(function: Callable[[], Tensor | Sequence[Tensor]]) -> bool:
    """Whether the ISA and threads in force give the bits that plain C++ gives on one thread."""
    got = function()
    with scalar_on_one_thread():
        expected = function()
    pair = [[r] if isinstance(r, Tensor) else r for r in (got, expected)]
    return all(torch.equal(g, e) for g, e in zip(*pair, strict=True))


# --- ternary products ----------------------------------------------------------------------------


def some_tokens(m: int) -> Tensor:
    """The tokens of a batch of m whose results are checked: all, or those at either end."""
    tokens = torch.arange(m)
    return torch.cat([tokens[:_CHECK_TOKENS], tokens[_CHECK_TOKENS:][-_CHECK_TOKENS:]])


def _product_case(
    ws: Workspace,
    name: str,
    n: int,
    k: int,
    x: Tensor,
    op: Callable[[Tensor, Tensor, tuple[int, int]], Tensor],
    *,
    hot: bool,
    weight_format: str,
) -> Case:
    """A case of `op(weight, x, (n, k))` on a ternary matrix."""
    m = x.shape[0]
    smallest = 32, 128
    small = pack_ternary(torch.zeros(smallest, dtype=torch.int8)).repack(weight_format).weight
    small_x = x[:, : smallest[1]].contiguous()
    matrices, size = ws.matrices(n, k, weight_format, hot=hot)
    dense, _ = ws.dense.tensors([(n, k)], torch.bfloat16)
    floating = x if x.is_floating_point() else torch.randn(x.shape, generator=ws.generator)
    x_bf16 = floating.bfloat16()

    @functools.cache
    def reference() -> tuple[Tensor, Tensor]:
        codes = torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=ws.generator)
        packed = pack_ternary(codes)
        with scalar_on_one_thread():
            expected = op(packed.weight, x[some_tokens(m)], (n, k))
        return packed.repack(weight_format).weight, expected

    def check() -> bool:
        weight, expected = reference()
        return torch.equal(op(weight, x, (n, k))[some_tokens(m)], expected)

    baseline = baseline_cycle(lambda weight: F.linear(x_bf16, weight), dense, hot=hot)
    return Case(
        name=name,
        shape={"M": m, "N": n, "K": k},
        dtype=str(x.dtype).removeprefix("torch."),
        bytes=size,
        macs=m * n * k,
        integer=True,
        run=cycle(lambda weight: op(weight, x, (n, k)), matrices, hot=hot),
        read=read_limit(ws.ternary, size, hot=hot),
        check=check,
        baselines={"torch_bf16": baseline} if len(dense) > 1 and m <= _BASELINE_TOKENS else {},
        format=weight_format,
        call=lambda: op(small, small_x, smallest),
    )


def matmul_case(ws: Workspace, n: int, k: int, m: int, *, hot: bool, weight_format: str) -> Case:
    """gemv (M = 1) or gemm with both scales, int8 in, float32 out."""
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=ws.generator)
    x_scale, scale = torch.full((m,), 0.01), torch.tensor([0.5])

    def gemv(weight: Tensor, x: Tensor, size: tuple[int, int]) -> Tensor:
        return ops.gemv(weight, x[0], x_scale, scale, size)[None]

    def gemm(weight: Tensor, x: Tensor, size: tuple[int, int]) -> Tensor:
        return ops.gemm(weight, x, x_scale[: len(x)], scale, size)

    name, op = ("gemv", gemv) if m == 1 else ("gemm", gemm)
    return _product_case(ws, name, n, k, x, op, hot=hot, weight_format=weight_format)


def linear_case(ws: Workspace, n: int, k: int, m: int, *, hot: bool, weight_format: str) -> Case:
    """linear: quantisation, product and scales in one call, bfloat16 in and out."""
    x, scale = torch.randn(m, k, generator=ws.generator).bfloat16(), torch.tensor([k**-0.5])

    def op(weight: Tensor, x: Tensor, size: tuple[int, int]) -> Tensor:
        return ops.linear(x, weight, scale, None, size)

    return _product_case(ws, "linear", n, k, x, op, hot=hot, weight_format=weight_format)


# --- rows, head, attention -----------------------------------------------------------------------


def _eager_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float()
    scale = 127.0 / values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return (values * scale).round().clamp(-128, 127).to(torch.int8), 1.0 / scale


def row_cases(ws: Workspace, model: ModelShape, m: int) -> list[Case]:
    """quantize_activations and rms_norm at the model's width: activations are hot in a model."""
    hidden = model.hidden_size
    x = torch.randn(m, hidden, generator=ws.generator).bfloat16()
    norm = torch.ones(hidden, dtype=torch.bfloat16)

    def case(name: str, moved: int, op: Callable[[], Any], torch_op: Callable[[], Any]) -> Case:
        return Case(
            name=name,
            shape={"M": m, "K": hidden},
            bytes=moved,
            run=cycle(op, [()], hot=True),
            read=read_limit(ws.ternary, moved, hot=True),
            check=lambda: equal_to_scalar(op),
            baselines={"torch_bf16": cycle(torch_op, [()], hot=True)},
        )

    return [
        case(
            "quantize_activations",
            3 * m * hidden + 4 * m,
            lambda: ops.quantize_activations(x),
            lambda: _eager_quantize(x),
        ),
        case(
            "rms_norm",
            4 * m * hidden + 2 * hidden,
            lambda: ops.rms_norm(x, norm, EPS),
            lambda: F.rms_norm(x, (hidden,), norm, EPS),
        ),
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
    return [[weight, scale] for (weight,) in found], size + (0 if scale is None else scale.nbytes)


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
    """Attention of one new token over a pool of blocks as the engine has it, cold."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    block = DEFAULT_BLOCK_SIZE
    layout, blocks = best_layout(KV_DTYPES[kv_dtype], block, dim), -(-context // block)
    found, size = _caches(ws, (blocks, kv_heads, block, dim), kv_dtype)
    pools = [[t.transpose(1, 2) for t in tensors] for tensors in found]
    plain, _ = _caches(ws, (1, kv_heads, context, dim), "bfloat16")
    query = torch.randn(1, heads, dim, generator=ws.generator).bfloat16()
    where = torch.tensor([0, 1]), torch.tensor([context]), torch.arange(blocks)[None]

    def decode(keys: Tensor, values: Tensor, *scales: Tensor) -> Tensor:
        key_scale, value_scale = scales or (None, None)
        return ops.paged_attention(
            query, keys, values, *where, dim**-0.5, key_scale, value_scale, layout
        )

    def torch_op(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

    return Case(
        name="attention",
        shape={"M": 1, "context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
        bytes=size,
        macs=2 * heads * context * dim,
        run=cycle(decode, pools, hot=False),
        read=read_limit(ws.ternary, min(size, _WINDOW_BYTES), hot=False),
        check=lambda: equal_to_scalar(lambda: decode(*pools[0])),
        baselines={"torch_bf16": baseline_cycle(torch_op, plain, hot=False)},
        format="-" if kv_dtype == "bfloat16" else kv_dtype,
    )
