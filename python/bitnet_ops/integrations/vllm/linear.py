"""`BitNetLinearMethod` with vLLM's base class, and the product of a layer split over its inputs.

Loaded by `register()` only, since it imports vllm. `_core` loads, `method` computes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase

from bitnet_ops import ops
from bitnet_ops.integrations import method
from bitnet_ops.integrations._core import layer_state


class BitNetLinearMethod(method.BitNetLinearMethod, LinearMethodBase):
    """vLLM's linear method for ternary weights; see `bitnet_ops.integrations.method`."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]  # the engine has no plain call
        """y = BitLinear(x); of a layer split over its inputs this rank's summand of it.

        All ranks of such a layer round their columns with the absmax of the whole token, so that
        their sum is what one rank computes.
        """
        if layer_state(layer).columns.parts == 1:
            return self.apply_layer(layer, x, bias)
        return self._apply_columns(layer, x, bias)

    def _apply_columns(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        state = layer_state(layer)
        if x.shape[-1] != state.in_features:
            return self.apply_layer(layer, x, bias)  # it says so
        rows = x.reshape(-1, state.in_features)
        absmax = max_over_ranks(rows.abs().amax(-1, keepdim=True))
        # The largest value of all ranks joins each row, so that the op rounds with it.
        q, scale = ops.quantize_activations(torch.cat([rows, absmax], -1))
        shape = state.out_features, state.in_features
        q = q[:, :-1].contiguous()
        weight, weight_scale = cast(Tensor, layer.weight), cast(Tensor, layer.weight_scale)
        y = ops.gemm(weight, q, scale, weight_scale, *shape)
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], state.out_features)

    def weights_may_be_absent(self) -> bool:
        """True under `--load-format dummy`, where no tensor arrives before the post-load hook."""
        try:
            from vllm.config import get_current_vllm_config

            load_format = get_current_vllm_config().load_config.load_format
        except (ImportError, AttributeError, AssertionError):  # not inside an engine
            return False
        return str(getattr(load_format, "value", load_format)) == "dummy"


def max_over_ranks(x: Tensor) -> Tensor:
    """The largest x of the tensor-parallel ranks, on each of them; x is overwritten."""
    from vllm.distributed import get_tp_group

    torch.distributed.all_reduce(
        x, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group
    )
    return x
