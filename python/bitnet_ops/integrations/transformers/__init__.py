"""transformers: its own models with the ternary linears, norms, MLPs and head of this package.

`accelerate(model)` swaps the modules of a loaded model in place. `BitnetOpsConfig`, given to
from_pretrained as quantization_config, loads packed weights without a floating copy of them.
Importing this package makes transformers know the latter; importing bitnet_ops never imports it.
"""

from bitnet_ops.integrations.transformers.quantizer import BitnetOpsConfig, accelerate

__all__ = ["BitnetOpsConfig", "accelerate"]
