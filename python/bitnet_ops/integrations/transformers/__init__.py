"""transformers: its own models with the ternary linears, norms, MLPs and head of this package.

`accelerate(model)` swaps the modules of a loaded model in place. `BitnetOpsConfig`, given to
from_pretrained as quantization_config, loads packed weights without a floating copy of them.
Importing this package makes transformers know the latter; importing bitnet_ops never imports it.
"""

import importlib.metadata

TESTED_VERSIONS = ("5.12.1", "5.19.0")

try:
    from bitnet_ops.integrations.transformers.quantizer import BitnetOpsConfig, accelerate
except ImportError as error:
    try:
        _found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        _found = "none"
    raise ImportError(
        f"bitnet_ops.accelerate: expected a transformers with BitNet's linear classes, got "
        f"{_found} ({error}); tested with {' and '.join(TESTED_VERSIONS)}: pip install "
        f"transformers=={TESTED_VERSIONS[0]}"
    ) from error

__all__ = ["TESTED_VERSIONS", "BitnetOpsConfig", "accelerate"]
