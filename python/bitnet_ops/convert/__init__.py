"""Checkpoint conversion: a Hugging Face folder or a GGUF file -> SGLBITNT model.bin.

`convert` is the entry for folders, with a proof of the result, `convert_gguf` that for GGUF files;
`export_gguf` goes back. `ConvertError` is the one exception. The command line is command.py.
"""

from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.convert.gguf_import import convert_gguf
from bitnet_ops.convert.hf import convert
from bitnet_ops.convert.report import ConvertReport

__all__ = ["ConvertError", "ConvertReport", "convert", "convert_gguf", "export_gguf"]
