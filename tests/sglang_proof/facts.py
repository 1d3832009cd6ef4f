"""Versions and the state of torch in the proof's environment, as JSON on standard output.

Run by that environment's python, without the import stubs.
"""

import importlib.metadata as metadata
import json
import platform

import torch

import bitnet_ops
from bitnet_ops import _runtime

names = {dist.metadata["Name"].lower() for dist in metadata.distributions()}
print(
    json.dumps(
        {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "nvidia_packages": sorted(name for name in names if name.startswith("nvidia")),
            "torch_distributions": sorted(name for name in names if name.startswith("torch")),
            "sglang": metadata.version("sglang"),
            "transformers": metadata.version("transformers"),
            "bitnet_ops": bitnet_ops.__version__,
            "installed_in_environment": "site-packages" in bitnet_ops.__file__,
            "isa": _runtime.isa(),
        }
    )
)
