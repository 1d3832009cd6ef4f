"""Versions and the state of torch in an engine's environment, as JSON on standard output.

Run by that environment's python, without import stubs. Usage: facts.py DISTRIBUTION...
"""

import importlib.metadata as metadata
import json
import platform
import sys

import torch

import bitnet_ops
from bitnet_ops import _runtime

names = sorted(dist.metadata["Name"].lower() for dist in metadata.distributions())
print(
    json.dumps(
        {
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                **{name: metadata.version(name) for name in sys.argv[1:]},
                "bitnet-ops": bitnet_ops.__version__,
            },
            "isa": _runtime.isa(),
            "cuda": torch.version.cuda or [name for name in names if name.startswith("nvidia")],
            "torch_installed": "torch" in names,
            "installed_in_environment": "site-packages" in bitnet_ops.__file__,
        }
    )
)
