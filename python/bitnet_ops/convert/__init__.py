"""Checkpoint conversion: a Hugging Face folder, a GGUF or an older .bin file -> SGLBITNT model.bin.

`convert` is the entry for folders, with a proof of the result, `convert_gguf` that for GGUF files,
`convert_bin` that for SGLBITNT files; `export_gguf` goes back. `ConvertError` is the one exception.
The command line is command.py.
"""

from bitnet_ops.convert.bin_import import convert_bin
from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.convert.gguf_import import convert_gguf
from bitnet_ops.convert.hf import convert
from bitnet_ops.convert.report import ConvertReport

__all__ = [
    "ConvertError",
    "ConvertReport",
    "convert",
    "convert_bin",
    "convert_gguf",
    "export_gguf",
]
