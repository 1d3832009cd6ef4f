"""`BitNetLinearMethod`: the linear method of serving engines, over torch.ops.bitnet.linear.

The contract that SGLang and vLLM share (create_weights, process_weights_after_loading, apply) and
the plain call that users of earlier BitNet kernels had. State belongs to the layer, never to the
method. It must not import an engine: `sglang/linear.py` adds the engine's base class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitnet_ops import packing
from bitnet_ops.integrations._core import (
    CheckpointError,
    ScaleRule,
    ShardId,
    Split,
    check_activation_dtype,
    check_complete,
    layer_state,
    load_bias,
    make_params,
    split_axis,
)

_LINEAR = torch.ops.bitnet.linear.default


def apply_packed(
    packed_weight: Tensor,
    scale: Tensor | float,
    x: Tensor,
    out_features: int,
    in_features: int,
    bias: Tensor | None = None,
) -> Tensor:
    """y = BitLinear(x) from an already packed weight: the call that earlier kernels offered.

    Args:
        packed_weight: uint8 [out_features, 32 * ceil(in_features / 128)] in the CANONICAL layout,
            which `bitnet_ops.ops.pack(codes)` makes. A Hugging Face tensor (uint8
            [out_features / 4, in_features]) goes through `bitnet_ops.packing.unpack_hf` first.
        scale: multiplies the codes -1, 0, 1; a number, or float32 [1] or [out_features].
        x: float32, bfloat16 or float16 [..., in_features].
        bias: float [out_features] or None.
    Returns:
        x.dtype [..., out_features].
    Raises:
        ValueError: packed_weight or x of another shape; RuntimeError from the op for the rest.
    """
    expected = (out_features, packing.packed_row_bytes(in_features))
    if packed_weight.dtype != torch.uint8 or tuple(packed_weight.shape) != expected:
        hint = ""
        if tuple(packed_weight.shape) == (-(-out_features // 4), in_features):
            hint = "; this is Hugging Face packing: ops.pack(packing.unpack_hf(w, out_features))"
        raise ValueError(
            f"apply: expected packed_weight uint8 {list(expected)}, got {packed_weight.dtype} "
            f"{list(packed_weight.shape)}{hint}"
        )
    _check_columns(x, in_features)
    weight_scale = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
    return cast(Tensor, _LINEAR(x, packed_weight, weight_scale, bias))


def _check_columns(x: Tensor, in_features: int) -> None:
    """The op sees only the padded K of the packed rows, so the true K is checked here."""
    if x.shape[-1] != in_features:
        raise ValueError(
            f"apply: expected x [..., {in_features}], got {list(x.shape)}; a layer split over its "
            "inputs takes its rank's columns only"
        )


class BitNetLinearMethod:
    """Creates, completes and applies the weights of one engine linear.

    Args:
        rule: how the checkpoint stores weights and scales (`scale_rule(quantization_config)`).
        name: the layer's name in the model, for error messages.
        compute_dtype: for the plain call only: x is converted to it first. None: x as it is.
    """

    def __init__(
        self,
        rule: ScaleRule = ScaleRule.MULTIPLY,
        name: str = "",
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.rule = rule
        self.name = name
        self.compute_dtype = compute_dtype

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

        A layer split over its inputs (row-parallel) quantises each rank's columns with their own
        absmax, so its reduced result is close, not equal, to that of one rank.
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
        if getattr(layer, "with_bias", False) and self.rule is ScaleRule.MULTIPLY:
            raise CheckpointError(
                f"bitnet: expected no bias (linear class {self.rule.value}), got one{of}; "
                "transformers multiplies such a bias by the weight scale, no checkpoint is known "
                "to have one: not supported"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse a layer of which a tensor never arrived. Derives nothing, so it may run again."""
        check_complete(layer, allow_unloaded=self.weights_may_be_absent())

    def weights_may_be_absent(self) -> bool:
        """Whether the engine runs on dummy weights; an engine's sub-class knows."""
        return False

    def apply(self, layer: nn.Module | Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Either apply(layer, x, bias=None), the engines' form, or the plain call `apply_packed`.

        The first argument decides: a module with our parameters, or the packed weight itself. x has
        any number of leading dimensions; the result has x's dtype. In the engines' form x is
        bfloat16 or float32.
        """
        if isinstance(layer, Tensor):
            return self._apply_plain(layer, *args, **kwargs)
        return self._apply_layer(layer, *args, **kwargs)

    def _apply_layer(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        check_activation_dtype(x.dtype, self.name)
        _check_columns(x, layer_state(layer).in_features)
        return cast(Tensor, _LINEAR(x, layer.weight, layer.weight_scale, bias))

    def _apply_plain(
        self,
        packed_weight: Tensor,
        scale: Tensor | float,
        x: Tensor,
        out_features: int,
        in_features: int,
        bias: Tensor | None = None,
    ) -> Tensor:
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        return apply_packed(packed_weight, scale, x, out_features, in_features, bias)


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
