"""Writing a safetensors file tensor by tensor: the header first, since every size is known.

safetensors' own writer wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from bitnet_ops.formats.atomic import atomic_file

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_safetensors(
    path: str | os.PathLike[str],
    forms: Forms,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    written_by: str,
) -> None:
    """Write `tensors` in the order of `forms`, which says dtype and shape of each.

    `written_by`: a mark for the header, by which an earlier result is known.

    The file appears whole or not at all. Raises ValueError where a tensor is not as announced,
    OSError as the file system does.
    """
    announced: Iterator[str] = iter(forms)
    with atomic_file(path) as out:
        out.write(_header(forms, written_by))
        for name, tensor in tensors:
            expected = next(announced, None)
            form = None if expected is None else forms[expected]
            if name != expected or (tensor.dtype, tuple(tensor.shape)) != form:
                raise ValueError(
                    f"safetensors: expected {expected} {form}, got {name} {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            out.write(data.numpy().data)
        left = next(announced, None)
        if left is not None:
            raise ValueError(f"safetensors: expected {left} too, got no more tensors")


def _header(forms: Forms, written_by: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "written_by": written_by}}
    at = 0
    for name, (dtype, shape) in forms.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data start aligned
    return struct.pack("<Q", len(text)) + text
