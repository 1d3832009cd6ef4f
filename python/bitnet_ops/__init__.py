"""bitnet_ops: ternary (BitNet b1.58) LLM inference on CPUs as PyTorch operators.

Importing this package loads the op library, so that `torch.ops.bitnet.*` exists, and binds the
typed wrappers in `bitnet_ops.ops`. Everything else (models, engine, converter) is imported at first
use: `import bitnet_ops` costs a few milliseconds on top of `import torch`. In the process of the
command `bitnet-ops` alone, torch and the op library wait until a command needs them, so that --help
and wrong arguments are answered at once.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet_ops import ops as ops
    from bitnet_ops.errors import BitNetError as BitNetError
    from bitnet_ops.generate.engine import Engine as Engine
    from bitnet_ops.generate.engine import Failed as Failed
    from bitnet_ops.generate.engine import Finished as Finished
    from bitnet_ops.generate.engine import Limits as Limits
    from bitnet_ops.generate.engine import NewToken as NewToken
    from bitnet_ops.generate.engine import SamplingParams as SamplingParams
    from bitnet_ops.generate.engine import SchedulerOptions as SchedulerOptions
    from bitnet_ops.generate.engine_thread import EngineThread as EngineThread
    from bitnet_ops.generate.prompt import PromptRows as PromptRows
    from bitnet_ops.integrations import BitNetLinearMethod as BitNetLinearMethod
    from bitnet_ops.integrations.transformers import BitnetOpsConfig as BitnetOpsConfig
    from bitnet_ops.integrations.transformers import accelerate as accelerate
    from bitnet_ops.language_model import LanguageModel as LanguageModel
    from bitnet_ops.language_model import load as load
    from bitnet_ops.nn.kv_cache import KVCache as KVCache
    from bitnet_ops.nn.kv_config import KVCacheConfig as KVCacheConfig
    from bitnet_ops.nn.kv_config import KVCacheDtype as KVCacheDtype
    from bitnet_ops.nn.linear import BitLinear as BitLinear
    from bitnet_ops.nn.packing import PackedWeight as PackedWeight

# Public name -> module that defines it; resolved by __getattr__ at first use.
_LAZY = {
    "BitLinear": "bitnet_ops.nn.linear",
    "BitNetError": "bitnet_ops.errors",
    "BitNetLinearMethod": "bitnet_ops.integrations",
    "BitnetOpsConfig": "bitnet_ops.integrations.transformers",
    "Engine": "bitnet_ops.generate.engine",
    "EngineThread": "bitnet_ops.generate.engine_thread",
    "Failed": "bitnet_ops.generate.engine",
    "Finished": "bitnet_ops.generate.engine",
    "KVCache": "bitnet_ops.nn.kv_cache",
    "KVCacheConfig": "bitnet_ops.nn.kv_config",
    "KVCacheDtype": "bitnet_ops.nn.kv_config",
    "LanguageModel": "bitnet_ops.language_model",
    "Limits": "bitnet_ops.generate.engine",
    "NewToken": "bitnet_ops.generate.engine",
    "PackedWeight": "bitnet_ops.nn.packing",
    "PromptRows": "bitnet_ops.generate.prompt",
    "SamplingParams": "bitnet_ops.generate.engine",
    "SchedulerOptions": "bitnet_ops.generate.engine",
    "accelerate": "bitnet_ops.integrations.transformers",
    "load": "bitnet_ops.language_model",
}

# Packages that need no import of their own: `bitnet_ops.convert.convert(...)`.
_PACKAGES = {"convert", "dummy", "formats", "integrations", "models", "nn", "ops", "training"}

__all__ = [*_LAZY, "__version__", "ops"]


def _is_the_command() -> bool:
    """Whether this process runs `bitnet-ops`, or `python -m bitnet_ops`, and torch is not there.

    While Python looks for the module of -m, argv[0] is "-m"; its name stands in orig_argv.
    """
    if "torch" in sys.modules:
        return False
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started == "-m":
        return any(a in ("bitnet_ops", "-mbitnet_ops") for a in sys.orig_argv[1:])
    return os.path.basename(started) == "bitnet-ops"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("bitnet-ops")
    if name in _PACKAGES:
        return importlib.import_module(f"bitnet_ops.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'bitnet_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


def _check_this_python() -> None:
    """Raise ImportError where no `_runtime` was compiled for this Python: a wheel has several."""
    if importlib.util.find_spec("bitnet_ops._runtime") is not None:
        return
    files = os.listdir(os.path.dirname(__file__))
    found = sorted(name for name in files if name.startswith("_runtime.") and name.endswith(".so"))
    raise ImportError(
        f"bitnet_ops: expected its module _runtime for Python {sys.version.split()[0]} "
        f"({sys.implementation.cache_tag}), found {', '.join(found) or 'none'}; use a Python that "
        "it was built for, or build it for this one: run `pip install .` in the project"
    )


def read_affinity() -> None:
    """Read the CPUs that this process may use, before torch pins the thread that imports it."""
    machine = importlib.import_module("bitnet_ops.machine")
    if machine.binding():
        with contextlib.suppress(ImportError):  # said where the op library is loaded
            importlib.import_module("bitnet_ops._runtime")  # whose threads read them too


_check_this_python()
if _is_the_command():
    from bitnet_ops import _interrupt

    _interrupt.quiet()  # Ctrl-C from here on, before there is a command to clean up after
else:
    read_affinity()
    from bitnet_ops import ops  # loads torch and the op library
