"""SGLBITNT version 1 by `struct` alone: an independent writer and an independent strict reader.

Written from FORMAT.md; shares no code with the package. Every argument of the writer can be made to
lie, which is how the malformed files of sglbitnt_malformed.py come about.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

ITEM_BYTES = {0: 1, 1: 4, 2: 2, 3: 2}


def u32(value: int) -> bytes:
    return struct.pack("<I", value & 0xFFFFFFFF)


def tensor(
    name: bytes = b"w",
    dtype: int = 0,
    dims: tuple[int, ...] = (1, 32),
    data: bytes | None = None,
    *,
    has_scale: int | None = None,
    scale: bytes | float = 0.5,
    name_length: int | None = None,
    ndim: int | None = None,
    nbytes: int | None = None,
) -> bytes:
    """One tensor record; what is not given is what a correct file would have."""
    if data is None:
        data = (b"\x55" if dtype == 0 else b"\x00") * (math.prod(dims) * ITEM_BYTES.get(dtype, 1))
    has_scale = int(dtype == 0) if has_scale is None else has_scale
    scale_field = scale if isinstance(scale, bytes) else struct.pack("<f", scale)
    return b"".join(
        [
            u32(len(name) if name_length is None else name_length) + name,
            u32(dtype),
            u32(len(dims) if ndim is None else ndim),
            *map(u32, dims),
            u32(has_scale) + (scale_field if has_scale else b""),
            struct.pack("<Q", len(data) if nbytes is None else nbytes) + data,
        ]
    )


def file(
    *tensors: bytes,
    config: bytes | dict[str, Any] = b"{}",
    magic: bytes = b"SGLBITNT",
    version: int = 1,
    config_length: int | None = None,
    count: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """A whole file around the given records."""
    if isinstance(config, dict):
        config = json.dumps(config, ensure_ascii=False, separators=(",", ":")).encode()
    length = len(config) if config_length is None else config_length
    number = len(tensors) if count is None else count
    return b"".join([magic, u32(version), u32(length), config, u32(number), *tensors, tail])


def pack_row(weights: list[int]) -> bytes:
    """One row of weights in {-1, 0, 1} by the text of FORMAT.md, padded with weight 0."""
    padded = weights + [0] * (-len(weights) % 128)
    row = bytearray(len(padded) // 4)
    for i, w in enumerate(padded):
        block, inside = divmod(i, 128)
        row[32 * block + inside % 32] |= (w + 1) << (6 - 2 * (inside // 32))
    return bytes(row)


class Rejected(Exception):
    """This reader's only verdict on a bad file."""


def read(data: bytes) -> dict[str, Any]:
    """{"config": str, "tensors": [(name, dtype, dims, scale bits, data)]}; raises Rejected."""
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise Rejected(f"{size} bytes at {at}")
        at += size
        return data[at - size : at]

    def number() -> int:
        return struct.unpack("<I", take(4))[0]

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise Rejected(f"{what} before {at}")

    def text(limit: int) -> str:
        size = number()
        require(1 <= size <= limit, "length")
        try:
            return take(size).decode()
        except UnicodeDecodeError:
            raise Rejected("UTF-8") from None

    def one() -> tuple[str, int, tuple[int, ...], bytes, bytes]:
        name = text(1024)
        require(not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name), "control character")
        dtype, ndim = number(), number()
        require(dtype in ITEM_BYTES, "dtype")
        require(ndim == 2 if dtype == 0 else 1 <= ndim <= 8, "ndim")
        dims = tuple(number() for _ in range(ndim))
        require(all(1 <= dim < 2**31 for dim in dims), "dims")
        require(dtype != 0 or dims[1] % 32 == 0, "row bytes")
        require(number() == int(dtype == 0), "has_scale")
        scale = take(4) if dtype == 0 else b""
        if dtype == 0:
            require(2.0**-126 <= struct.unpack("<f", scale)[0] < math.inf, "scale")
        size = struct.unpack("<Q", take(8))[0]
        require(size == math.prod(dims) * ITEM_BYTES[dtype], "size")
        body = take(size)
        _check_data(dtype, body)
        return name, dtype, dims, scale, body

    require(take(8) == b"SGLBITNT" and number() == 1, "magic and version")
    config = text(1 << 20)
    require(isinstance(_json(config), dict), "object")
    count = number()
    require(count <= 65536, "count")
    tensors = [one() for _ in range(min(count, len(data)))]
    require(at == len(data), "end")
    require(len({t[0] for t in tensors}) == count, "unique names")
    return {"config": config, "tensors": tensors}


def _check_data(dtype: int, body: bytes) -> None:
    if dtype == 0:
        bad = any((byte >> shift) & 3 == 3 for byte in body for shift in (0, 2, 4, 6))
    elif dtype == 3:
        words = struct.unpack(f"<{len(body) // 2}H", body)
        bad = any((word >> 7) & 0xFF == 0xFF for word in words)
    else:
        kind, size = ("f", 4) if dtype == 1 else ("e", 2)
        bad = not all(map(math.isfinite, struct.unpack(f"<{len(body) // size}{kind}", body)))
    if bad:
        raise Rejected("data")


def _json(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise ValueError("key twice")
        return dict(items)

    def constant(_: str) -> None:
        raise ValueError("constant")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise Rejected("JSON") from None
    block = value.get("bitnet_ops") if isinstance(value, dict) else None
    if isinstance(value, dict) and "bitnet_ops" in value:
        version = block.get("format_version") if isinstance(block, dict) else None
        if version != 1 or type(version) is not int:
            raise Rejected("private block")
    return value
