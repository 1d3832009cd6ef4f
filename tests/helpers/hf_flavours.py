"""One random projection in each of transformers' three flavours, and transformers' module of it.

The oracle of the serving integrations' tests: codes, packing and outputs come from transformers. Of
bitnet_ops only the name of the flavour (ScaleRule) is used.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, WeightQuant, pack_weights

from bitnet_ops.integrations import ScaleRule


def random_codes(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8)


def hf_packed(codes):
    return pack_weights(codes.clone())  # transformers adds 1 to its argument in place


def checkpoint(rule, rows, columns, seed=0):
    """(weight tensor, weight_scale tensor or None, codes, multiplying scale) of one projection."""
    if rule is ScaleRule.ONLINE:
        masters = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
        scale = masters.abs().mean()
        return masters, None, (WeightQuant.apply(masters) / scale).round().to(torch.int8), scale
    codes = random_codes(rows, columns, seed)
    scale = torch.tensor([0.03 + 0.01 * seed])
    stored = 1 / scale if rule is ScaleRule.DIVIDE else scale
    return hf_packed(codes), stored, codes, scale


def hf_linear(rule, weight, stored_scale, rows, columns, bias=None):
    """transformers' module of the flavour, holding the checkpoint's tensors."""
    has_bias = bias is not None
    if rule is ScaleRule.DIVIDE:
        module = BitLinear(columns, rows, bias=has_bias, dtype=torch.float32)
        module.weight, module.weight_scale = weight, stored_scale
    else:
        online = rule is ScaleRule.ONLINE
        module = AutoBitLinear(columns, rows, bias=has_bias, online_quant=online)
        if not online:
            module.weight_scale = stored_scale
            module.load_state_dict({"weight": weight, "weight_scale": stored_scale}, strict=False)
        else:
            module.weight.data = weight
    if has_bias:
        module.bias = nn.Parameter(bias) if isinstance(module, nn.Linear) else bias
    return module.eval()


def hf_bound(x, scale):
    """What fp32 sums of K products in any order, plus the scaling, may be off: K * eps * sum|x|."""
    terms = x.abs().sum(dim=-1, keepdim=True) * float(torch.as_tensor(scale).max())
    return (x.shape[-1] + 8) * 2.0**-23 * terms + 1e-12
