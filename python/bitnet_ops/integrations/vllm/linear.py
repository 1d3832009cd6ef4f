"""`BitNetLinearMethod` with vLLM's base class: nothing more than what vLLM alone knows.

Loaded by `register()` only, since it imports vllm. `_core` loads, `method` computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearMethodBase

from bitnet_ops.integrations import method


class BitNetLinearMethod(method.BitNetLinearMethod, LinearMethodBase):
    """vLLM's linear method for ternary weights; see `bitnet_ops.integrations.method`."""

    # The engine has no plain call, so the step that tells the two apart is left out.
    apply = method.BitNetLinearMethod.apply_layer  # type: ignore[assignment]

    def max_over_ranks(self, x: Tensor) -> Tensor:
        """The largest x of the tensor-parallel ranks, on each of them; x is overwritten."""
        from vllm.distributed import get_tp_group

        group = get_tp_group().device_group
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX, group=group)
        return x

    def weights_may_be_absent(self) -> bool:
        """True under `--load-format dummy`, where no tensor arrives before the post-load hook."""
        try:
            from vllm.config import get_current_vllm_config

            load_format = get_current_vllm_config().load_config.load_format
        except (ImportError, AttributeError, AssertionError):  # not inside an engine
            return False
        return str(getattr(load_format, "value", load_format)) == "dummy"
