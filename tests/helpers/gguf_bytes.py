"""An independent writer of GGUF files for tests: bytes by struct, types by number, nothing checked.

Written from the GGUF specification; must not import bitnet_ops, since it also makes the damaged
files, and files of types that our writer and the official package do not write.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

NUMBERS = {"u8": 0, "i8": 1, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "u64": 10}
LETTERS = {"u8": "B", "i8": "b", "u32": "I", "i32": "i", "f32": "f", "bool": "?", "u64": "Q"}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: str, content: Any) -> bytes:
    return string(content) if kind == "str" else struct.pack("<" + LETTERS[kind], content)


def key(name: str | bytes, kind: str, content: Any) -> bytes:
    if kind.startswith("["):
        inner = kind[1:-1]
        head = struct.pack("<IIQ", 9, NUMBERS[inner], len(content))
        return string(name) + head + b"".join(value(inner, item) for item in content)
    return string(name) + struct.pack("<I", NUMBERS[kind]) + value(kind, content)


def record(name: str, shape: tuple[int, ...], number: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dims + struct.pack("<IQ", number, offset)


def pad(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)


def gguf(
    keys: list[bytes],
    tensors: list[tuple[str, tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    key_count: int | None = None,
    magic: bytes = b"GGUF",
    pad_last: bool = True,
) -> bytes:
    """A file; `tensors` are (name, shape row-major, type number, bytes)."""
    records, data = b"", b""
    for name, shape, number, content in tensors:
        records += record(name, shape, number, len(data))
        data += pad(content, alignment) if pad_last or name != tensors[-1][0] else content
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + records
    return pad(head, alignment) + data


def i2s(codes: np.ndarray, scale: float, layout: str = "a", rubbish: bytes = b"\0" * 28) -> bytes:
    """int8 codes [N, K] as I2_S: for every element the byte and the bits where it goes."""
    n, k = codes.shape
    i = np.arange(n * k)
    if layout == "c":
        row, column = i // k, i % k
        byte, lane = row // 4 * k + column, row % 4
    else:
        block = {"a": 128, "b": 64}[layout]
        quarter = block // 4
        byte, lane = i // block * quarter + i % block % quarter, i % block // quarter
    out = np.zeros(n * k // 4, dtype=np.uint8)
    np.add.at(
        out, byte, (codes.reshape(-1) + 1).astype(np.uint8) << (6 - 2 * lane).astype(np.uint8)
    )
    return out.tobytes() + struct.pack("<f", scale) + rubbish


def ptq1_0(codes: np.ndarray, scales: np.ndarray) -> bytes:
    """int8 codes [N, K] and float scales [N, K / 128] as Prism's PTQ1_0, block by block.

    Five weights a byte, the first the most significant digit of a fraction of 243; which five, says
    `_PTQ1_RUNS`. The last two bytes hold four, one place higher. The scale comes last.
    """
    digits = codes.reshape(*scales.shape, 128).astype(np.int64) + 1
    body = []
    for first, stride, count in _PTQ1_RUNS:
        number = np.zeros(scales.shape, dtype=np.int64)
        for n in range(count):
            number = 3 * number + digits[:, :, first + n * stride]
        number *= 3 ** (5 - count)
        body.append(-(-number * 256 // 243))
    return _blocks(np.stack(body, axis=2), _halves(scales))


# of every byte: its first weight, how far the next one is, how many there are
_PTQ1_RUNS = [
    *((first, 16, 5) for first in range(16)),
    *((80 + first, 8, 5) for first in range(8)),
    *((120 + first, 2, 4) for first in range(2)),
]


def q2_0(codes: np.ndarray, scales: np.ndarray, block: int = 64) -> bytes:
    """int8 codes [N, K] and float scales [N, K / block] as Q2_0, block by block."""
    scales = np.asarray(scales)
    quads = (codes.reshape(*scales.shape, block // 4, 4) + 1).astype(np.uint8)
    return _blocks(_halves(scales), (quads << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(axis=3))


def _halves(scales: np.ndarray) -> np.ndarray:
    """uint8 [N, blocks, 2]: every scale as float16."""
    return np.asarray(scales).astype("<f2")[:, :, None].view(np.uint8)


def _blocks(*parts: np.ndarray) -> bytes:
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=2).tobytes()
