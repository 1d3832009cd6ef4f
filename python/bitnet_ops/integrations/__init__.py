"""Serving engines and transformers: what they share, and one sub-package for each.

`checkpoint` (settings and tensors), `linear_method` (`BitNetLinearMethod`) and `plugin` know no
engine; `sglang/` and `vllm/` import theirs inside functions or in modules that only their
`register()` loads. Importing this package, or bitnet_ops, never imports an engine.
"""

from bitnet_ops.integrations.checkpoint import CheckpointError, ScaleRule, scale_rule
from bitnet_ops.integrations.linear_method import BitNetLinearMethod

__all__ = ["BitNetLinearMethod", "CheckpointError", "ScaleRule", "scale_rule"]
