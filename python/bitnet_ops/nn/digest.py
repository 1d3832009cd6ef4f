"""Digests of tensors: what makes two sets of weights the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from bitnet_ops import _runtime


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """SHA-256 of names, dtypes, shapes, and XXH64 of the numbers as they lie in memory."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        form = name, str(tensor.dtype), tuple(tensor.shape), _runtime.xxh64(numbers)
        digest.update(repr(form).encode())
    return digest.digest()
