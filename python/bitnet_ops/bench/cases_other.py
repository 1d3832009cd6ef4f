"""Cases of everything that is no ternary product: quantisation, norm, activation, head, attention.

It must not know how anything is timed. Results are checked bit for bit against plain C++ on one
thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench.cases import Case, cycle, equal_to_scalar, require_slots, rival_cycle
from bitnet_ops.bench.limits import read_limit
from bitnet_ops.bench.names import CACHES as CACHES
from bitnet_ops.bench.names import HEAD_FORMATS as HEAD_FORMATS
from bitnet_ops.bench.shapes import ModelShape
from bitnet_ops.bench.workspace import Workspace

EPS = 1e-5
_HEAD_CHECK_ROWS = 2048
_WINDOW_BYTES = 1 << 24  # of the read pass beside operands that are larger than this


def _rows_case(
    ws: Workspace,
    name: str,
    m: int,
    k: int,
    moved: int,
    op: Callable[..., Tensor | tuple[Tensor, ...]],
    rival: Callable[..., object],
    *operands: Tensor,
) -> Case:
    """An op on rows of activations, which are hot in a model: `moved` bytes in and out."""
    return Case(
        name=name,
        shape={"M": m, "K": k},
        dtype="bfloat16",
        memory="hot",
        bytes=moved,
        macs=0,
        integer=False,
        run=cycle(op, [operands], hot=True),
        read=read_limit(ws.ternary, moved, hot=True),
        check=lambda: equal_to_scalar(lambda: op(*operands)),
        rivals={"torch_bf16": cycle(rival, [operands], hot=True)},
    )


def _eager_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float()
    scale = 127.0 / values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return (values * scale).round().clamp(-128, 127).to(torch.int8), 1.0 / scale


def row_cases(ws: Workspace, model: ModelShape, m: int) -> list[Case]:
    """quantize_activations, rms_norm and the activation at the model's widths."""
    hidden, inner = model.hidden_size, model.intermediate_size
    x, gate, up = (
        torch.randn(m, k, generator=ws.generator).bfloat16() for k in (hidden, inner, inner)
    )
    gain = torch.ones(hidden, dtype=torch.bfloat16)
    return [
        _rows_case(
            ws,
            "quantize_activations",
            m,
            hidden,
            3 * m * hidden + 4 * m,
            ops.quantize_activations,
            _eager_quantize,
            x,
        ),
        _rows_case(
            ws,
            "rms_norm",
            m,
            hidden,
            4 * m * hidden + 2 * hidden,
            lambda a, w: ops.rms_norm(a, w, EPS),
            lambda a, w: F.rms_norm(a, (hidden,), w, EPS),
            x,
            gain,
        ),
        _rows_case(
            ws,
            "relu2_mul",
            m,
            inner,
            6 * m * inner,
            ops.relu2_mul,
            lambda g, u: F.relu(g).square() * u,
            gate,
            up,
        ),
    ]


_GROUP, _TILE_ROWS = 128, 16  # of an int4 head: features of a scale, rows of a tile


def _heads(
    ws: Workspace, model: ModelShape, head_format: str
) -> tuple[list[tuple[Tensor, Tensor | None]], int]:
    """Heads (weight, scale) in cold memory, and the bytes of a weight; any byte is a valid one."""
    vocab, hidden = model.vocab_size, model.hidden_size
    tiles, groups = -(-vocab // _TILE_ROWS), -(-hidden // _GROUP)
    shape: tuple[int, ...]
    if head_format == "bf16":
        dtype, shape, size = torch.bfloat16, (vocab, hidden), 2 * vocab * hidden
        scale = None
    elif head_format == "int8":
        dtype, shape, size = torch.int8, (vocab, hidden), vocab * hidden
        scale = torch.full((vocab,), 0.01)
    else:
        layout = (tiles, groups * _GROUP // 8, 64)
        dtype, shape, size = torch.uint8, layout, tiles * groups * _GROUP * 8
        scale = torch.full((tiles, groups, _TILE_ROWS), 0.01, dtype=torch.bfloat16)
    found = [(slot.view(dtype).view(shape), scale) for slot in ws.dense.slots(size)]
    return found, size + (scale.nbytes if scale is not None else 0)


def head_case(ws: Workspace, model: ModelShape, head_format: str = "bf16") -> Case:
    """lm_head for one token, cold."""
    vocab, hidden = model.vocab_size, model.hidden_size
    heads, size = _heads(ws, model, head_format)
    dense = _heads(ws, model, "bf16")[0]
    x = torch.randn(1, hidden, generator=ws.generator).bfloat16()
    rows = None if head_format == "bf16" else vocab

    def check() -> bool:
        weight, scale = heads[0]
        few = _HEAD_CHECK_ROWS // (_TILE_ROWS if head_format == "int4" else 1)
        part = (weight[:few], None if scale is None else scale[:few])
        some = ops.lm_head(x, *part)
        whole = ops.lm_head(x, weight, scale, rows)[:, : some.shape[-1]]
        return torch.equal(whole, some[:, : whole.shape[-1]]) and equal_to_scalar(
            lambda: ops.lm_head(x, *part)
        )

    return Case(
        name="lm_head",
        shape={"M": 1, "N": vocab, "K": hidden},
        dtype="bfloat16",
        memory="cold",
        bytes=size,
        macs=vocab * hidden,
        integer=False,
        run=cycle(lambda w, s: ops.lm_head(x, w, s, rows), heads, hot=False),
        read=read_limit(ws.ternary, min(size, _WINDOW_BYTES), hot=False),
        check=check,
        rivals={"torch_bf16": rival_cycle(lambda w, _: F.linear(x, w), dense, hot=False)},
        format=head_format,
    )


def _caches(
    ws: Workspace, shape: tuple[int, int, int, int], cache: str
) -> tuple[list[tuple[Tensor, ...]], int]:
    """Keys, values and the scales of int8, [B, KV, L, D], cold; and the bytes of one set."""
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8}[cache]
    size = math.prod(shape) * dtype.itemsize
    slots = ws.dense.slots(2 * size)
    require_slots(slots, f"a cache of {shape[2]} tokens", hot=False)
    found = [tuple(p.view(dtype).view(shape) for p in slot.split(size)) for slot in slots]
    if cache == "bfloat16":
        return found, 2 * size
    # any byte is a valid code; scales in memory of their own, as a cache has them
    scales = [tuple(torch.full(shape[:-1], 0.01) for _ in "kv") for _ in found]
    return [a + b for a, b in zip(found, scales, strict=True)], 2 * size + 8 * math.prod(shape[:-1])


def attention_case(ws: Workspace, model: ModelShape, context: int, cache: str = "bfloat16") -> Case:
    """attention of one new token over a cache of `context` tokens, cold."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    shape = (1, kv_heads, context, dim)
    caches, size = _caches(ws, shape, cache)
    plain = caches if cache == "bfloat16" else _caches(ws, shape, "bfloat16")[0]
    query = torch.randn(1, 1, heads, dim, generator=ws.generator).bfloat16()
    start, scale = torch.tensor([context - 1]), dim**-0.5
    query_bhtd = query.transpose(1, 2)

    def decode(keys: Tensor, values: Tensor, *scales: Tensor) -> Tensor:
        return ops.attention(query, keys, values, start, scale, *scales)

    def rival(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query_bhtd, keys, values, enable_gqa=True)

    return Case(
        name="attention",
        shape={"M": 1, "context": context, "heads": heads, "kv_heads": kv_heads, "head_dim": dim},
        dtype="bfloat16",
        memory="cold",
        bytes=size,
        macs=2 * heads * context * dim,
        integer=False,
        run=cycle(decode, caches, hot=False),
        read=read_limit(ws.ternary, min(size, _WINDOW_BYTES), hot=False),
        check=lambda: equal_to_scalar(lambda: decode(*caches[0])),
        rivals={"torch_bf16": rival_cycle(rival, plain, hot=False)},
        format={"bfloat16": "-"}.get(cache, cache),
    )
