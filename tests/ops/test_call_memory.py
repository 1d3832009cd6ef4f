"""What a call of an op leaves on the heap: nothing. And tensors of very many dimensions."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch

from bitnet_ops import ops
from isa_control import torch_threads
from op_catalogue import CALLS

ROUNDS = 600


class _HeapInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def heap_bytes() -> int:
    """Bytes in use, in small blocks and in mapped ones."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _HeapInfo
    info = ask()
    return int(info.uordblks) + int(info.hblkhd)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("key", CALLS)
@pytest.mark.sampled(15)
def test_a_call_leaves_nothing_on_the_heap(key: str) -> None:
    """A block that is lost takes at least 32 bytes. A program is released, as its contract says."""
    arguments, op = CALLS[key].arguments(), getattr(ops, key.split()[0])

    def function(**arguments: Any) -> None:
        result = op(**arguments)
        if key == "bind_program":
            ops.release_program(result)

    rounds = 20 if "probe" in key else ROUNDS
    with torch_threads(1), torch.inference_mode():
        for _ in range(20):
            function(**arguments)
        gc.collect()
        before = heap_bytes()
        for _ in range(rounds):
            function(**arguments)
        grown = heap_bytes() - before
    assert grown < 16 * rounds, f"{key}: {grown} bytes after {rounds} calls"


def test_many_dimensions() -> None:
    """torch's own operators take 64."""
    weight = torch.ones(4)
    x = torch.arange(8.0).reshape(*[1] * 62, 2, 4)
    few = ops.rms_norm(x.reshape(2, 4), weight, 1e-5)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), few.reshape(x.shape))
    with pytest.raises(RuntimeError, match="expected a tensor of at most 64 dimensions"):
        ops.rms_norm(torch.empty(*[1] * 64, 4), weight, 1e-5)
