"""Kernels of recurrent layers that SGLang imports on its way to any hybrid; none is called.

Two of them it looks up among torch's operators, where they stand as plain functions that raise.
"""

import torch

import sgl_kernel

for _name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, getattr(sgl_kernel, _name))


def __getattr__(name):
    return getattr(sgl_kernel, name)
