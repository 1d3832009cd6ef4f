"""`BitNetLinearMethod`: the linear method of serving engines, over torch.ops.bitnet.linear.

The contract that SGLang and vLLM share (create_weights, process_weights_after_loading, apply), and
the plain call that users of earlier BitNet kernels had (plain.py). State belongs to the layer,
never to the method. It must not import an engine: `sglang/linear.py` and `vllm/linear.py` add the
engine's base class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.integrations import plain
from bitnet_ops.integrations._core import (
    CheckpointError,
    LayerState,
    ScaleRule,
    ShardId,
    Split,
    check_activation_dtype,
    check_complete,
    load_bias,
    make_params,
    repack,
    split_axis,
)

_LINEAR = torch.ops.bitnet.linear.default
_BFLOAT16, _FLOAT32 = torch.bfloat16, torch.float32


class BitNetLinearMethod:
    """Creates, completes and applies the weights of one engine linear.

    Args:
        rule: how the checkpoint stores weights and scales (`scale_rule(quantization_config)`).
        name: the layer's name in the model, for error messages.
        compute_dtype: for the plain call only: x is converted to it first. None: x as it is.
        packing: for the plain call only: how its weights are packed, "interleaved" or
            "consecutive", where the call itself does not say.
    Raises ValueError for another packing.

    The plain call, with weights repacked once:

        method = BitNetLinearMethod(compute_dtype=torch.bfloat16, packing="consecutive")
        weight = method.repack(packed_weight, out_features, in_features)
        y = method.apply(weight, scale, x, out_features, in_features)
    """

    def __init__(
        self,
        rule: ScaleRule = ScaleRule.MULTIPLY,
        name: str = "",
        *,
        compute_dtype: torch.dtype | None = None,
        packing: str | None = None,
    ) -> None:
        if packing is not None and packing not in plain.PACKINGS:
            raise ValueError(
                "BitNetLinearMethod: expected packing 'interleaved', 'consecutive' or None, got "
                f"{packing!r}"
            )
        self.rule = rule
        self.name = name
        self.compute_dtype = compute_dtype
        self.packing = packing

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        skip_block_quant_check: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer its packed parameters; sizes and names are the engine's.

        The engine's own `weight_loader` (in extra_weight_attrs) is not used: on a CPU it clips a
        tensor that is too short and fills up with zeros, without an error.
        Raises CheckpointError for float16, uneven splits, pre-sharded checkpoints, and a bias
        where transformers would multiply it by the weight scale.

        All ranks of a layer split over its inputs (row-parallel) quantise their columns with the
        absmax of the whole token (`max_over_ranks`), so that their sum is what one rank computes,
        but for the rounding of that sum.
        """
        del skip_block_quant_check, extra_weight_attrs
        check_activation_dtype(params_dtype, self.name)
        self._check_layer(layer)
        rank, size = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
        local_rows = sum(output_partition_sizes)
        rows = split_axis(output_size, local_rows, rank, size, "output size")
        columns = split_axis(input_size, input_size_per_partition, rank, size, "input size")
        ids, row_splits = _shards(layer, len(output_partition_sizes), rows)
        make_params(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            rule=self.rule,
            ids=ids,
            row_splits=row_splits,
            column_split=columns,
            name=self.name,
        )
        # The engine attaches this loader to the bias that it makes after us; its own one clips.
        loader = functools.partial(load_bias, layer)
        layer.weight_loader = loader  # type: ignore[assignment]  # nn.Module's stub

    def _check_layer(self, layer: nn.Module) -> None:
        of = f" in {self.name}" if self.name else ""
        if getattr(layer, "use_presharded_weights", False):
            raise CheckpointError(
                f"bitnet: expected a whole checkpoint, got one already split by rank{of}: not "
                "supported"
            )
        # SGLang's name for it, then vLLM's
        with_bias = getattr(layer, "with_bias", False) or getattr(layer, "has_bias", False)
        if with_bias and self.rule is ScaleRule.MULTIPLY:
            raise CheckpointError(
                f"bitnet: expected no bias (linear class {self.rule.value}), got one{of}; "
                "transformers multiplies such a bias by the weight scale, no checkpoint is known "
                "to have one: not supported"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reject a layer of which a tensor never arrived, and repack the weight for this CPU.

        May run again: it then finds the weight repacked. Later weight updates go through the
        parameters' own weight_loader, which keeps the layout, whether this runs after them or not.
        """
        check_complete(layer, allow_unloaded=self.weights_may_be_absent())
        repack(layer)

    def weights_may_be_absent(self) -> bool:
        """Whether the engine runs on dummy weights; an engine's sub-class knows."""
        return False

    def max_over_ranks(self, x: Tensor) -> Tensor:
        """The largest x of all tensor-parallel ranks, on each of them; x may be overwritten.

        An engine's sub-class asks its group; here there is one rank.
        """
        return x

    def apply(self, layer: nn.Module | Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Either apply(layer, x, bias=None), the engines' form, or the plain call
        apply(packed_weight, scale, x, out_features, in_features, bias=None, packing=None).

        The first argument decides: a module with our parameters, or the packed weight itself, as
        `plain.apply_packed` has it. x has any number of leading dimensions; the result has x's
        dtype. In the engines' form x is bfloat16 or float32.
        """
        if isinstance(layer, Tensor):
            return self._apply_plain(layer, *args, **kwargs)
        return self.apply_layer(layer, *args, **kwargs)

    def apply_layer(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = BitLinear(x) + bias with the layer's parameters; see `apply`. Of a layer split over
        its inputs: this rank's summand. Raises CheckpointError for a dtype that is not served,
        RuntimeError for an x of another width.

        The product of one token takes 60 us and less, so this goes the short ways: attributes that
        nn.Module need not search for, and no Python call before something is wrong.
        """
        state: LayerState = layer.bitnet  # type: ignore[assignment]  # nn.Module's stub
        parameters: dict[str, Any] = layer._parameters
        dtype = x.dtype
        if dtype is not _BFLOAT16 and dtype is not _FLOAT32:
            check_activation_dtype(dtype, self.name)
        weight, scale = parameters["weight"], parameters["weight_scale"]
        if state.columns.parts != 1:
            return self._apply_columns(state, weight, scale, x, bias)
        try:
            y: Tensor = _LINEAR(x, weight, scale, bias, state.out_features, state.in_features)
        except RuntimeError:
            _check_columns(state, x)
            raise
        return y

    def _apply_columns(
        self, state: LayerState, weight: Tensor, scale: Tensor, x: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`apply_layer` of this rank's columns, rounded as those of the whole token."""
        _check_columns(state, x)
        rows = x.reshape(-1, state.in_features)
        absmax = self.max_over_ranks(rows.abs().amax(-1, keepdim=True))
        # The largest value of all ranks joins each row, so that the op rounds with it.
        q, x_scale = ops.quantize_activations(torch.cat([rows, absmax], -1))
        shape = state.out_features, state.in_features
        y = ops.gemm(weight, q[:, :-1].contiguous(), x_scale, scale, *shape)
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], state.out_features)

    def repack(
        self, packed_weight: Tensor, out_features: int, in_features: int, packing: str | None = None
    ) -> Tensor:
        """The weight of a plain call in the layout that this CPU reads fastest; see `plain.repack`.

        `packing`: as in the plain call; None: the method's.
        """
        return plain.repack(packed_weight, out_features, in_features, packing or self.packing)

    def _apply_plain(
        self,
        packed_weight: Tensor,
        scale: Tensor | float,
        x: Tensor,
        out_features: int,
        in_features: int,
        bias: Tensor | None = None,
        packing: str | None = None,
    ) -> Tensor:
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        packing = packing or self.packing
        return plain.apply_packed(
            packed_weight, scale, x, out_features, in_features, bias, packing=packing
        )


def _check_columns(state: LayerState, x: Tensor) -> None:
    """Reject an input of another width, in the words of a layer."""
    if x.shape[-1:] != (state.in_features,):
        raise ValueError(
            f"apply: expected x [..., {state.in_features}], got {list(x.shape)}; a layer split "
            "over its inputs takes its rank's columns only"
        ) from None


def _shards(
    layer: nn.Module, count: int, rows: Split
) -> tuple[Sequence[ShardId] | None, Sequence[Split]]:
    """Shard ids and row splits of a layer; k and v heads may be fewer than the ranks."""
    replicas = getattr(layer, "num_kv_head_replicas", None)
    if replicas is None:
        return None, [rows] * count
    kv_rank = getattr(layer, "kv_tp_rank", getattr(layer, "tp_rank", 0))
    kv_size = getattr(layer, "kv_tp_size", getattr(layer, "tp_size", 1))
    kv_split = Split(kv_size // replicas, kv_rank // replicas)
    return ("q", "k", "v"), [rows, kv_split, kv_split]
