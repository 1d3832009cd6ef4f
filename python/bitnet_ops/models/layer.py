"""One decoder layer of any supported family: attention and MLP over ternary projections.

Where a layer is the plain one (no norm inside a projection, no bias) the fused ops qkv_forward and
mlp_forward run it; everything else is composed of the same ops, part by part. It must not know
caches' owners, embeddings or heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.config import PROJECTIONS, ModelConfig
from bitnet_ops.models.adapters import Side
from bitnet_ops.models.tensors import layer_tensors
from bitnet_ops.nn.casting import Cast, dtype_after, same_dtype
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.lora import add_side_path
from bitnet_ops.nn.packing import PackedWeight

Tensors = Mapping[str, Tensor | PackedWeight | HeadWeight]
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)  # relu2 overflows float16
_ADDED = PROJECTIONS[3], PROJECTIONS[6]  # what they give is added to the residual stream
_QKV, _OUT, _MLP = PROJECTIONS[:3], PROJECTIONS[3], PROJECTIONS[4:]


class Weight(nn.Module):
    """A module that is nothing but one dense tensor, so that names are those of Hugging Face."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def _apply(self, fn: Cast, recurse: bool = True) -> Weight:
        # The ops read norm weights as float32 whatever the activations are.
        weight = self.weight
        super()._apply(fn, recurse)
        self.weight = same_dtype(weight, self.weight)
        return self

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, dtype={self.weight.dtype}"


def norm_weight(tensor: Tensor | PackedWeight | HeadWeight) -> Weight:
    """A norm's weight as a module; float32, in which every stored dtype is exact."""
    return Weight(_dense(tensor))


def _dense(tensor: Tensor | PackedWeight | HeadWeight) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"model: expected a dense tensor, got a {type(tensor).__name__}")
    return tensor.float()


def is_plain(projection: nn.Module) -> TypeGuard[BitLinear]:
    """Whether a projection is a ternary product and nothing else, as the fused ops take it."""
    if type(projection) is not BitLinear or projection.group_size:
        return False
    return projection.bias is None and not projection._modules


class DecoderLayer(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); x float32 [..., hidden]."""

    def __init__(self, config: ModelConfig, tensors: Tensors, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in layer_tensors(config):
            module, _, kind = name.rpartition(".")
            if kind == "bias":
                continue  # it belongs to the projection of the same name
            parent, _, child = module.rpartition(".")
            scale = config.scalings.residual if module in _ADDED else 1.0
            self.get_submodule(parent).add_module(child, _leaf(tensors, module, scale))
        self.bound = 0
        self._bind()
        self.register_load_state_dict_post_hook(_rebind)

    def _bind(self) -> None:
        # Attribute look-up through nested modules costs 10 us a layer and token; once is enough.
        c = self.config

        def norm_of(name: str) -> Tensor:
            return self.get_buffer(f"{name}.weight")

        self._input_norm = norm_of("input_layernorm")
        heads = ("self_attn.q_norm", "self_attn.k_norm")
        self._head_norms = (norm_of(heads[0]), norm_of(heads[1])) if c.qk_norm else None
        self._sub_norm = norm_of("self_attn.attn_sub_norm") if c.sub_norms else None
        self._mlp_norm = norm_of(c.mlp_norm)
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        self._post_norms = (norm_of(names[0]), norm_of(names[1])) if c.post_norms else (None, None)
        self._ffn_norm = norm_of("mlp.ffn_sub_norm") if c.sub_norms else None
        inner = PROJECTIONS if c.linear_norms else ()
        self._inner_norms = {name: norm_of(f"{name}.rms_norm") for name in inner}
        self._projections = {name: self.get_submodule(name) for name in PROJECTIONS}
        self._packed = {n: m.packed for n, m in self._projections.items() if is_plain(m)}
        self._fused_qkv = self._packed.keys() >= {*_QKV}
        self._fused_mlp = self._packed.keys() >= {*_MLP} and self._sub_eps == c.rms_norm_eps
        self.bound += 1  # what others have gathered from the buffers is out of date

    @property
    def _sub_eps(self) -> float:
        c = self.config
        return c.rms_norm_eps if c.sub_norm_eps is None else c.sub_norm_eps

    def _apply(self, fn: Cast, recurse: bool = True) -> DecoderLayer:
        self.dtype = dtype_after(fn, self.dtype, ACTIVATION_DTYPES, type(self).__name__)
        super()._apply(fn, recurse)  # may replace the buffers
        self._bind()
        return self

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.dtype is torch.float32 else x.to(self.dtype)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor, float],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        sides: Sequence[Side] = (),
    ) -> Tensor:
        """x [..., hidden] behind the layer.

        rope: what `ops.rope` takes: the tokens' positions int64 [...], the inverse frequencies and
        the attention factor. attend: what puts keys and values
        F [..., KV, head_dim] into this layer's cache and returns the attention of the queries
        F [..., H, head_dim] over it, in their shape. sides: of adapters, those for some rows of an
        x [tokens, hidden] only or for all.
        """
        c = self.config
        lead = x.shape[:-1]
        q, k, v = self._qkv(self._rounded(x), sides)
        heads, d = c.num_key_value_heads, c.head_dim
        q, k = q.view(*lead, -1, d), k.view(*lead, heads, d)
        if self._head_norms is not None:
            q = ops.rms_norm(q, self._head_norms[0], c.rms_norm_eps)
            k = ops.rms_norm(k, self._head_norms[1], c.rms_norm_eps)
        v = v.view(*lead, heads, d)
        q, k = ops.rope(q, *rope), ops.rope(k, *rope)
        a = attend(q, k, v).view(*lead, -1)
        if self._sub_norm is not None:
            a = ops.rms_norm(a, self._sub_norm, self._sub_eps)
        x = x + self._post(self._out(a, sides), self._post_norms[0])
        return x + self._post(self._mlp(self._rounded(x), sides), self._post_norms[1])

    def _post(self, y: Tensor, weight: Tensor | None) -> Tensor:
        return y if weight is None else ops.rms_norm(y, weight, self.config.rms_norm_eps)

    def _qkv(self, x: Tensor, sides: Sequence[Side]) -> tuple[Tensor, Tensor, Tensor]:
        norm, eps = self._input_norm, self.config.rms_norm_eps
        if self._fused_qkv and not sides:
            q, k, v = (self._packed[name] for name in _QKV)
            return ops.qkv_forward(
                x,
                norm,
                q.weight,
                q.scale,
                k.weight,
                k.scale,
                v.weight,
                v.scale,
                eps,
                (*q.shape, *k.shape, *v.shape),
            )
        h = ops.rms_norm(x, norm, eps)
        query, key, value = (self._project(name, h, sides) for name in _QKV)
        return query, key, value

    def _out(self, a: Tensor, sides: Sequence[Side]) -> Tensor:
        plain = None if sides else self._packed.get(_OUT)
        return self._project(_OUT, a, sides) if plain is None else plain.linear(a)

    def _mlp(self, x: Tensor, sides: Sequence[Side]) -> Tensor:
        c = self.config
        if self._fused_mlp and not sides:
            gate, up, down = (self._packed[name] for name in _MLP)
            return ops.mlp_forward(
                x,
                self._mlp_norm,
                gate.weight,
                gate.scale,
                up.weight,
                up.scale,
                self._ffn_norm,
                down.weight,
                down.scale,
                c.rms_norm_eps,
                c.hidden_act,
                (*gate.shape, *up.shape, *down.shape),
            )
        h = ops.rms_norm(x, self._mlp_norm, c.rms_norm_eps)
        g, u = (self._project(name, h, sides) for name in _MLP[:2])
        if c.hidden_act == "relu2":
            z = ops.relu2_mul(g, u)
        else:
            gated = ops.silu_and_mul if c.hidden_act == "silu" else ops.gelu_tanh_and_mul
            z = gated(torch.cat([g, u], dim=-1))
        if self._ffn_norm is not None:
            z = ops.rms_norm(z, self._ffn_norm, self._sub_eps)
        return self._project(_MLP[2], z, sides)

    def _project(self, name: str, x: Tensor, sides: Sequence[Side]) -> Tensor:
        """A projection with what lies inside it, its norm first, its bias last, and beside it."""
        if self._inner_norms:
            x = ops.rms_norm(x, self._inner_norms[name], self.config.linear_norm_eps)
        y: Tensor = self._projections[name](x)
        for rows, paths in sides:
            if (lora := paths.get(name)) is None:
                continue
            if rows is None:
                y = add_side_path(y, x, lora)
            else:
                y = y.index_copy(0, rows, add_side_path(y[rows], x[rows], lora))
        return y


def _leaf(tensors: Tensors, module: str, scale: float) -> nn.Module:
    """The module over its tensors; what a projection gives is multiplied by `scale`."""
    tensor, bias = tensors[f"{module}.weight"], tensors.get(f"{module}.bias")
    if isinstance(tensor, PackedWeight):
        if scale != 1:
            tensor = replace(tensor, scale=tensor.scale * scale)
        return BitLinear.from_packed(tensor, None if bias is None else _dense(bias))
    return norm_weight(tensor)


def _rebind(layer: Any, _keys: Any) -> None:
    layer._bind()
