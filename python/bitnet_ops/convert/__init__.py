"""Checkpoint conversion: a Hugging Face folder -> SGLBITNT model.bin, with a proof of the result.

`convert` is the one entry; `ConvertError` the one exception. The command line is command.py.
"""

from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.convert.hf import convert
from bitnet_ops.convert.report import ConvertReport

__all__ = ["ConvertError", "ConvertReport", "convert"]
