"""Checkpoint conversion: a Hugging Face folder, a GGUF or an older .bin file -> SGLBITNT model.bin.

`convert` takes all three, `export_gguf` goes back. `ConvertError` is the one exception.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet_ops.convert.errors import ConvertError as ConvertError
    from bitnet_ops.convert.gguf_export import export_gguf as export_gguf
    from bitnet_ops.convert.report import ConvertReport as ConvertReport
    from bitnet_ops.convert.write import convert as convert

# Public name -> module that defines it, at first use: the command line reads arguments without it.
_LAZY = {
    "ConvertError": "bitnet_ops.convert.errors",
    "ConvertReport": "bitnet_ops.convert.report",
    "convert": "bitnet_ops.convert.write",
    "export_gguf": "bitnet_ops.convert.gguf_export",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'bitnet_ops.convert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
