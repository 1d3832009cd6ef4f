"""Checkpoint conversion: a Hugging Face folder, a GGUF or an older .bin file -> SGLBITNT model.bin.

`convert` is the entry for folders, with a proof of the result, `convert_gguf` that for GGUF files,
`convert_bin` that for SGLBITNT files; `export_gguf` goes back. `ConvertError` is the one exception.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet_ops.convert.errors import ConvertError as ConvertError
    from bitnet_ops.convert.gguf.export import export_gguf as export_gguf
    from bitnet_ops.convert.pipeline import convert as convert
    from bitnet_ops.convert.pipeline import convert_bin as convert_bin
    from bitnet_ops.convert.pipeline import convert_gguf as convert_gguf
    from bitnet_ops.convert.report import ConvertReport as ConvertReport

# Public name -> module that defines it, at first use: the command line reads arguments without it.
_LAZY = {
    "ConvertError": "bitnet_ops.convert.errors",
    "ConvertReport": "bitnet_ops.convert.report",
    "convert": "bitnet_ops.convert.pipeline",
    "convert_bin": "bitnet_ops.convert.pipeline",
    "convert_gguf": "bitnet_ops.convert.pipeline",
    "export_gguf": "bitnet_ops.convert.gguf.export",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'bitnet_ops.convert' has no attribute {name!r}")
