"""The fused ops composed of the ops they fuse: what fused results must equal, bit for bit.

`o` is whose ops those are: bitnet_ops.ops, or the reference, whose fused ops these are too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_schema import bound


def composed(o: Any, op: str, *args: Any, **kwargs: Any) -> Any:
    """The fused op `op` of these arguments."""
    return {"qkv_forward": _qkv, "mlp_forward": _mlp, "decode_step": _step}[op](
        o, bound(op, args, kwargs)
    )


def _check(x: Tensor, in_features: int | None) -> None:
    if in_features not in (None, x.shape[-1]):
        raise ValueError(f"expected x [..., {in_features}], got {list(x.shape)}")


def _qkv(o: Any, a: Any) -> tuple[Tensor, ...]:
    _check(a.x, a.in_features)
    hidden, rows = o.rms_norm(a.x, a.norm_weight, a.eps), a.out_features or (None, None, None)
    shards = (a.q_weight, a.q_scale), (a.k_weight, a.k_scale), (a.v_weight, a.v_scale)
    return tuple(o.linear(hidden, *s, None, n) for s, n in zip(shards, rows, strict=True))


def _mlp(o: Any, a: Any) -> Tensor:
    (first, second), (inner, outer) = a.in_features or (None, None), a.out_features or (None, None)
    _check(a.x, first)
    hidden = o.rms_norm(a.x, a.norm_weight, a.eps)
    if a.x.dtype == torch.float16:
        hidden = hidden.float()  # squared ReLU overflows float16: the op keeps float32 from here
    gate = o.linear(hidden, a.gate_weight, a.gate_scale, None, inner)
    up = o.linear(hidden, a.up_weight, a.up_scale, None, inner)
    if a.activation == "relu2":
        product = o.relu2_mul(gate, up)
    else:
        product = o.silu_and_mul(torch.cat([gate, up], dim=-1))
    if a.sub_norm_weight is not None:
        product = o.rms_norm(product, a.sub_norm_weight, a.eps)
    y: Tensor = o.linear(product, a.down_weight, a.down_scale, None, outer, second)
    return y.to(a.x.dtype)


def _step(o: Any, a: Any) -> Tensor:
    x, tokens, hidden = a.x, a.x.shape[1], a.x.shape[2]
    kv_heads, dim = a.key_cache.shape[2], a.key_cache.shape[4]
    query_rows, kv_rows = a.heads * dim, kv_heads * dim
    sizes = [hidden, query_rows, hidden, a.inner] if a.sub_norms else [hidden, hidden]
    *norms, last = a.gains.split([*sizes * len(a.scales), hidden])
    cos_sin = o.rope_table(a.start_positions[:, None] + torch.arange(tokens), dim, a.rope_theta)
    for layer, scales in enumerate(a.scales):
        q, k, v, out, gate, up, down = zip(
            a.weights[7 * layer : 7 * layer + 7], scales.split(1), strict=True
        )
        own = norms[len(sizes) * layer : len(sizes) * (layer + 1)]
        before, sub, after, inner_norm = own if a.sub_norms else (own[0], None, own[1], None)
        rows = [query_rows, kv_rows, kv_rows]
        qkv = o.qkv_forward(x.to(a.dtype), before, *q, *k, *v, a.eps, rows)
        query, key, value = (t.unflatten(-1, (t.shape[-1] // dim, dim)) for t in qkv)
        caches = a.key_cache[layer], a.value_cache[layer]
        scales_of_caches = [t if t is None else t[layer] for t in (a.key_scale, a.value_scale)]
        positions = a.start_positions
        o.kv_cache_update(*caches, o.rope(key, cos_sin), value, positions, *scales_of_caches)
        query = o.rope(query, cos_sin)
        mixed = o.attention(query, *caches, positions, a.scale, *scales_of_caches).flatten(2)
        mixed = mixed if sub is None else o.rms_norm(mixed, sub, a.eps)
        x = x + o.linear(mixed, *out, None, hidden)
        mlp = *gate, *up, inner_norm, *down, a.eps, a.activation, [a.inner, hidden]
        x = x + o.mlp_forward(x.to(a.dtype), after, *mlp)
    kept = x[:, -a.logits_to_keep :]  # 0 keeps everything
    y: Tensor = o.lm_head(o.rms_norm(kept, last, a.eps), a.head_weight, a.head_scale, a.vocab)
    return y
