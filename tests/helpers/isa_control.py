"""Forcing ISAs and thread counts in tests, and putting them back.

Knows only the torch-free `_runtime` and torch's thread count; no op, no sample.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from bitnet_ops import _runtime

ISAS: list[str] = _runtime.available_isas()
THREAD_COUNTS = (1, 2, 3, 4)


@contextlib.contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run the body on the kernels of ISA `name`."""
    before = _runtime.isa()
    _runtime.force_isa(name)
    try:
        assert _runtime.isa() == name
        yield
    finally:
        _runtime.force_isa(before)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the body with torch.set_num_threads(count)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def every_configuration() -> Iterator[str]:
    """Loop over every available ISA and every thread count, each in force for one iteration.

    Except at night each ISA has half of the thread counts, by turns. Yields a label for messages. A
    generator that is not exhausted still restores both.
    """
    night = os.environ.get("BITNET_CI_ALL") == "1"
    for index, isa in enumerate(ISAS):
        for threads in THREAD_COUNTS:
            if not night and (index + threads) % 2 and len(ISAS) > 1:
                continue
            with forced_isa(isa), torch_threads(threads):
                yield f"isa={isa} threads={threads}"
