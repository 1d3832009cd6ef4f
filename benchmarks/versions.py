"""The bench model of whichever version of this package runs: a measurement of before and after has
one process of each, and the older one may be from before its modules had their present names.
"""

from __future__ import annotations

import importlib
from typing import Any

# module and class, newest first
_MODELS = (
    ("bitnet_ops.bench.model", "BenchModel"),
    ("bitnet_ops.bench.subject", "Subject"),
)
_CONFIGS = ("bitnet_ops.dummy.configs", "bitnet_ops.dummy")
CUT = "2b-4t-cut"


def _first(modules: tuple[str, ...]) -> Any:
    for name in modules[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    return importlib.import_module(modules[-1])


def bench_model(dummy: str, weight_format: str = "auto", head_format: str = "int8") -> Any:
    """A synthetic model with `decode_run`, `prefill_run`, `cache`; its `kv_dtype` may be set."""
    module = _first(tuple(name for name, _ in _MODELS))
    return getattr(module, dict(_MODELS)[module.__name__])(dummy, weight_format, head_format)


def cut_model(layers: int, vocab_size: int) -> str:
    """The name of a dummy of 2B-4T's sizes with fewer layers and a smaller head."""
    configs = _first(_CONFIGS).CONFIGS
    cut = {"num_hidden_layers": layers, "vocab_size": vocab_size}
    configs[CUT] = {**configs["2b-4t"], **cut, "bos_token_id": 0, "eos_token_id": 1}
    return CUT
