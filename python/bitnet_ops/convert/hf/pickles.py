"""Weights pickled by torch.save, read as tensors alone: `convert --allow-pickle`.

torch.load(weights_only=True) builds tensors and plain containers and refuses everything that could
run code. The file is mapped where its format allows it, so that memory stays bounded by the largest
tensor. It must not know what a tensor means, nor safetensors beyond the interface of its files.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from bitnet_ops.convert.errors import listed, refuse

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


class PickleFile:
    """One opened file, with the methods that source.py uses of a safetensors handle."""

    def __init__(self, path: Path) -> None:
        self._tensors = _load(path)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> _Header:
        return _Header(self._tensors[name])


class _Header:
    """dtype and shape of one tensor, spelt as in a safetensors header."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_dtype(self) -> str:
        return _NAMES.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


def _load(path: Path) -> dict[str, torch.Tensor]:
    mapped = zipfile.is_zipfile(path)  # the older format cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the protocol; what matters is refused
            value: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        refuse(
            "pickle-unsafe",
            f"tensors alone in {path.name}",
            _reason(error),
            "nothing else is ever unpickled; save the model as safetensors",
        )
    if isinstance(value, dict) and set(value) == {"state_dict"}:
        value = value["state_dict"]
    if not isinstance(value, dict) or not value:
        refuse("pickle-content", f"a dict of tensors in {path.name}", type(value).__name__)
    other = [str(k) for k, v in value.items() if not (isinstance(v, torch.Tensor) and _is_plain(v))]
    if other:
        refuse("pickle-content", f"dense tensors alone in {path.name}", listed(other))
    return {str(name): tensor.detach() for name, tensor in value.items()}


def _reason(error: Exception) -> str:
    """What is wrong, without torch's advice to switch the check off."""
    text = str(error)
    at = text.find("WeightsUnpickler error:")
    lines = text[max(at, 0) :].strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized
