"""Serving engines: what they share, and one sub-package per engine.

`_core` (loading), `_settings` (quantization_config) and `method` (`BitNetLinearMethod`) know no
engine; `sglang/` and `vllm/` import theirs inside functions or in modules that only their
`register()` loads. Importing this package, or bitnet_ops, never imports an engine.
"""

from bitnet_ops.integrations._core import CheckpointError, ScaleRule, scale_rule
from bitnet_ops.integrations.method import BitNetLinearMethod

__all__ = ["BitNetLinearMethod", "CheckpointError", "ScaleRule", "scale_rule"]
