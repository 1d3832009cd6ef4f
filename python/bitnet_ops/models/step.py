"""A decoder's weights as the arguments of `ops.model_step`, one call a step.

Scales, biases and norm weights are gathered into one tensor each, in whose memory the modules' own
buffers lie: there is one copy of every number, and a buffer changed in place changes what the step
reads. It must not know ids, caches' owners or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.config import PROJECTIONS, ModelConfig
from bitnet_ops.memory.arena import stretch
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import blocked_scales
from bitnet_ops.nn.rotary import Rotary, local_rotary

if TYPE_CHECKING:
    from bitnet_ops.models.step_batch import StepBatch
    from bitnet_ops.nn.head import HeadWeight
    from bitnet_ops.nn.kv_pool import PagedPool

_NO_ADAPTERS: Mapping[str, Any] = MappingProxyType({})


class Step:
    """What `ops.model_step` needs of one model, gathered once.

    Args:
        config: the architecture.
        layers: the decoder's layers, with the submodules of a Hugging Face checkpoint.
        norm: the last norm; `weight` f32 [hidden].
        rope: the table of the rotary embedding.
        dtype: of the activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        rope: Rotary,
        dtype: torch.dtype,
    ) -> None:
        c = config
        norms = [layer.get_submodule(name) for layer in layers for name in _norm_names(c)]
        projections = [layer.get_submodule(name) for layer in layers for name in PROJECTIONS]
        self.norm_weights = _gather([*norms, norm], "weight")
        self.weights = [projection.get_buffer("weight") for projection in projections]
        first = projections[: len(PROJECTIONS)]
        grouped = [i for i, projection in enumerate(first) if _group_size(projection)]
        if grouped:
            flat, sizes = _blocked(projections)
        else:
            flat = _gather(projections, "weight_scale")
            sizes = [projection.get_buffer("weight_scale").numel() for projection in first]
        self.scales = flat.view(len(layers), -1)
        biased = [i for i, projection in enumerate(first) if _has_bias(projection)]
        with_bias = [projection for projection in projections if _has_bias(projection)]
        self.biases = _gather(with_bias, "bias").view(len(layers), -1) if with_bias else None
        self._model: dict[str, Any] = {
            "dtype": dtype,
            "num_heads": c.num_attention_heads,
            "intermediate_size": c.intermediate_size,
            "vocab_size": c.vocab_size,
            "sub_norms": c.sub_norms,
            "activation": c.hidden_act,
            "eps": c.rms_norm_eps,
            "inv_freq": rope.inv_freq,
            "attention_factor": rope.attention_factor,
            "scale": c.attention_scale,
            "biased": biased,
            "scale_sizes": [] if set(sizes) == {1} else sizes,
            "qk_norms": c.qk_norm,
            "sub_norm_eps": c.sub_norm_eps,
            "linear_norm_eps": c.linear_norm_eps if c.linear_norms else None,
            "grouped": grouped,
            "activation_format": first[grouped[0]].activation_format if grouped else "int8",
            "post_norms": c.post_norms,
            "windows": list(c.windows),
        }
        if (local := local_rotary(c)) is not None:
            self._model |= {"local_inv_freq": local, "local_layers": list(c.scalings.local)}

    @staticmethod
    def expresses(config: ModelConfig, layers: Sequence[nn.Module]) -> bool:
        """Whether the whole-model ops can run these layers; composed ops can run all of them.

        They know ternary products with one scale, one a row or one a group, with biases, and with
        norms inside, the same in every layer; not another class of layer, or biases of another
        dtype.
        """
        if not layers:
            return False
        inside = {"rms_norm"} if config.linear_norms else set()
        forms = [[_form(layer.get_submodule(p), inside) for p in PROJECTIONS] for layer in layers]
        first = forms[0]
        if None in first or any(form != first for form in forms):
            return False
        grouped = [form is not None and form[0] for form in first]
        formats = {form[3] for form in first if form is not None and form[0]}
        return len(set(grouped[:3])) == 1 and grouped[4] == grouped[5] and len(formats) < 2

    def __call__(
        self,
        x: Tensor,
        batch: StepBatch,
        pool: PagedPool,
        head: HeadWeight,
        adapters: Mapping[str, Any] = _NO_ADAPTERS,
    ) -> Tensor:
        """Embedded tokens f32 [tokens, hidden] -> logits f32 [rows, V]; the pool is written.

        `adapters`: Adapters.step_arguments.
        """
        return ops.model_step(
            x=x,
            weights=self.weights,
            scales=self.scales,
            norm_weights=self.norm_weights,
            head_weight=head.weight,
            head_scale=head.scale,
            key_pool=pool.key_pool,
            value_pool=pool.value_pool,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            logit_rows=batch.logit_rows,
            key_scale=pool.key_scale,
            value_scale=pool.value_scale,
            biases=self.biases,
            layout=pool.layout,
            **self._model,
            **adapters,
        )


def _group_size(projection: nn.Module) -> int:
    return projection.group_size if isinstance(projection, BitLinear) else 0


def _blocked(projections: Sequence[nn.Module]) -> tuple[Tensor, list[int]]:
    """All scales one behind the other, those of groups as the kernels read them, and their sizes.

    A copy: the modules keep rows of scales, which files and state_dicts have.
    """
    parts = [
        blocked_scales(p.packed) if _group_size(p) else p.get_buffer("weight_scale")
        for p in projections
        if isinstance(p, BitLinear)
    ]
    half = all(part.dtype == torch.float16 for part in parts)
    dtype = torch.float16 if half else torch.float32
    sizes = [part.numel() for part in parts[: len(PROJECTIONS)]]
    return torch.cat([part.flatten().to(dtype) for part in parts]), sizes


def _has_bias(projection: nn.Module) -> bool:
    return isinstance(projection, BitLinear) and projection.bias is not None


def _form(projection: nn.Module, inside: set[str]) -> tuple[int, int, bool, str, bool] | None:
    """Size of groups, number of scales, bias or none and what x becomes; None for no plain product.

    inside: the names of modules that may lie in it.
    """
    if type(projection) is not BitLinear or projection._modules.keys() - inside:
        return None
    bias, scale = projection.bias, projection.weight_scale
    if scale.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        return None
    size, canonical = projection.group_size, projection.weight_format == "canonical"
    form = projection.activation_format if size else "int8"
    return size, scale.numel(), bias is not None, form, bool(size) and canonical


def _norm_names(c: ModelConfig) -> tuple[str, ...]:
    """The norms of a layer in the order in which the ops use them."""
    q, k, v, o, gate, up, down = PROJECTIONS

    def inside(*projections: str) -> tuple[str, ...]:
        return tuple(f"{name}.rms_norm" for name in projections if c.linear_norms)

    return (
        "input_layernorm",
        *inside(q, k, v),
        *(("self_attn.q_norm", "self_attn.k_norm") if c.qk_norm else ()),
        *(("self_attn.attn_sub_norm",) if c.sub_norms else ()),
        *inside(o),
        *(("post_attention_layernorm",) if c.post_norms else ()),
        c.mlp_norm,
        *inside(gate, up),
        *(("mlp.ffn_sub_norm",) if c.sub_norms else ()),
        *inside(down),
        *(("post_feedforward_layernorm",) if c.post_norms else ()),
    )


@torch.inference_mode(False)  # or the buffers could not be changed in place outside of it
def _gather(modules: Sequence[nn.Module], name: str) -> Tensor:
    """One tensor of the modules' buffers `name`, each of which comes to lie in its part."""
    flat = torch.cat([module.get_buffer(name).flatten() for module in modules])
    memory, at = flat.view(torch.uint8), 0
    for module in modules:
        old = module.get_buffer(name)
        part = stretch(memory, at, at + old.nbytes)  # a slice would be saved with all the others
        setattr(module, name, part.view(old.dtype).view_as(old))
        at += old.nbytes
    return flat
