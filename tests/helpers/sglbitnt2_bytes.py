"""SGLBITNT version 2 by `struct` alone: an independent writer and an independent strict reader.

Written from FORMAT.md; shares no code with the package, XXH64 included. Every argument of the
writer can be made to lie, which is how the malformed files of sglbitnt2_malformed.py come about.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from sglbitnt_bytes import ITEM_BYTES, Rejected, _check_data, _json, u32

MASK = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _rotl(x: int, n: int) -> int:
    return (x << n | x >> 64 - n) & MASK


def _round(acc: int, lane: int) -> int:
    return _rotl((acc + lane * P2) & MASK, 31) * P1 & MASK


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, by the text of doc/xxhash_spec.md."""
    at = 0
    if len(data) >= 32:
        acc = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while len(data) - at >= 32:
            lanes = struct.unpack_from("<4Q", data, at)
            acc = [_round(a, lane) for a, lane in zip(acc, lanes, strict=True)]
            at += 32
        h = sum(_rotl(a, n) for a, n in zip(acc, (1, 7, 12, 18), strict=True)) & MASK
        for a in acc:
            h = ((h ^ _round(0, a)) * P1 + P4) & MASK
    else:
        h = P5
    h = (h + len(data)) & MASK
    while len(data) - at >= 8:
        h = (_rotl(h ^ _round(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        h = (_rotl(h ^ struct.unpack_from("<I", data, at)[0] * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        h = _rotl(h ^ byte * P5 & MASK, 11) * P1 & MASK
    h = (h ^ h >> 33) * P2 & MASK
    h = (h ^ h >> 29) * P3 & MASK
    return h ^ h >> 32


@dataclass(frozen=True)
class Tensor:
    """What goes into one record; None is what a correct file would have.

    `dims` of a packed tensor are (N, K). `kind`: 0 none, 1 one scale (`scale`), 2 a row, 3 a group;
    `scales` are the bytes of kinds 2 and 3.
    """

    name: bytes = b"w"
    dtype: int = 0
    dims: tuple[int, ...] = (1, 128)
    data: bytes | None = None
    kind: int | None = None
    scale: float | bytes = 0.5
    scale_dtype: int = 1
    scales: bytes | None = None
    group_size: int = 128
    name_length: int | None = None
    ndim: int | None = None
    offset: int | None = None
    nbytes: int | None = None
    checksum: int | None = None
    scales_offset: int | None = None
    scales_nbytes: int | None = None
    scales_checksum: int | None = None

    @property
    def scale_kind(self) -> int:
        return int(self.dtype == 0) if self.kind is None else self.kind

    def body(self) -> bytes:
        if self.data is not None:
            return self.data
        if self.dtype == 0:
            return b"\x55" * (self.dims[0] * 32 * -(-self.dims[1] // 128))
        return bytes(math.prod(self.dims) * ITEM_BYTES.get(self.dtype, 1))

    def scale_body(self) -> bytes:
        if self.scales is not None or self.scale_kind not in (2, 3):
            return self.scales or b""
        count = self.dims[0] * (-(-self.dims[1] // 128) if self.scale_kind == 3 else 1)
        return struct.pack("<e", 0.5) * count if self.scale_dtype == 2 else b"\0\0\0\x3f" * count


def _given(value: int | None, right: int) -> int:
    return right if value is None else value


def file(
    *tensors: Tensor,
    config: bytes | dict[str, Any] = b"{}",
    version: int = 2,
    count: int | None = None,
    length: int | None = None,
    config_offset: int | None = None,
    config_length: int | None = None,
    reserved: int = 0,
    config_sum: int | None = None,
    index_sum: int | None = None,
    header_sum: int | None = None,
    gap: bytes = b"\0",
    index_tail: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """A whole file. `gap`: what fills up to multiples of 64; `tail` follows the counted length."""
    if isinstance(config, dict):
        config = json.dumps(config, ensure_ascii=False, separators=(",", ":")).encode()
    out, index = bytearray(64), bytearray()

    def place(data: bytes, offset: int | None, nbytes: int | None, checksum: int | None) -> bytes:
        at = len(out)
        out.extend(data + gap * (-len(data) % 64))
        sums = _given(checksum, xxh64(data))
        return struct.pack("<QQQ", _given(offset, at), _given(nbytes, len(data)), sums)

    for t in tensors:
        index += u32(_given(t.name_length, len(t.name))) + t.name + u32(t.dtype)
        index += u32(_given(t.ndim, len(t.dims))) + b"".join(map(u32, t.dims)) + u32(t.scale_kind)
        if t.scale_kind == 1:
            index += t.scale if isinstance(t.scale, bytes) else struct.pack("<f", t.scale)
        if t.scale_kind in (2, 3):
            index += u32(t.scale_dtype)
        if t.scale_kind == 3:
            index += u32(t.group_size)
        index += place(t.body(), t.offset, t.nbytes, t.checksum)
        if t.scale_kind in (2, 3):
            index += place(t.scale_body(), t.scales_offset, t.scales_nbytes, t.scales_checksum)
    index += index_tail
    config_at = len(out)
    place(config, None, None, 0)
    out += index
    head = b"SGLBITNT" + u32(version) + u32(_given(count, len(tensors)))
    head += struct.pack("<QQ", _given(length, len(out)), _given(config_offset, config_at))
    head += u32(_given(config_length, len(config))) + u32(reserved)
    head += struct.pack("<Q", _given(config_sum, xxh64(config)))
    head += struct.pack("<Q", _given(index_sum, xxh64(bytes(index))))
    out[:64] = head + struct.pack("<Q", _given(header_sum, xxh64(head)))
    return bytes(out) + tail


class _Taker:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise Rejected(f"{size} bytes at {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Rejected(what)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Rejected("UTF-8") from None


def read(data: bytes) -> dict[str, Any]:
    """{"config": str, "tensors": [dict]}; raises Rejected."""
    require(len(data) >= 64 and data[:8] == b"SGLBITNT", "magic")
    version, count, length, config_at, config_size, reserved = struct.unpack_from(
        "<IIQQII", data, 8
    )
    config_sum, index_sum, header_sum = struct.unpack_from("<QQQ", data, 40)
    require(version == 2 and xxh64(data[:56]) == header_sum, "header")
    require(length == len(data) and reserved == 0 and 1 <= config_size <= 1 << 20, "header fields")
    config_end = config_at + config_size
    index_at = config_end + -config_end % 64
    require(config_at >= 64 and index_at <= len(data), "places")
    require(xxh64(data[config_at:config_end]) == config_sum, "config checksum")
    require(not any(data[config_end:index_at]), "gap")
    require(xxh64(data[index_at:]) == index_sum, "index checksum")
    config = _text(data[config_at:config_end])
    require(isinstance(_json(config), dict), "object")
    require(count <= 65536, "count")
    taker, end, tensors = _Taker(data, index_at), 64, []
    for _ in range(min(count, len(data))):
        tensor, end = _record(taker, end, config_at)
        tensors.append(tensor)
    require(taker.at == len(data) and end == config_at, "the end")
    require(len({t["name"] for t in tensors}) == count, "unique names")
    return {"config": config, "tensors": tensors}


def _record(taker: _Taker, end: int, limit: int) -> tuple[dict[str, Any], int]:
    size = taker.u32()
    require(1 <= size <= 1024, "name length")
    name = _text(taker.take(size))
    require(not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name), "control character")
    dtype, ndim = taker.u32(), taker.u32()
    require(dtype in ITEM_BYTES and (ndim == 2 if dtype == 0 else 1 <= ndim <= 8), "dtype, ndim")
    dims = tuple(taker.u32() for _ in range(ndim))
    require(all(1 <= dim < 2**31 for dim in dims), "dims")
    kind = taker.u32()
    require(kind in (1, 2, 3) if dtype == 0 else kind == 0, "scale kind")
    scale = taker.take(4) if kind == 1 else b""
    require(kind != 1 or 2.0**-126 <= struct.unpack("<f", scale)[0] < math.inf, "scale")
    scale_dtype = taker.u32() if kind >= 2 else 1
    require(scale_dtype in (1, 2) and (kind != 3 or taker.u32() == 128), "scale dtype, group size")
    blocks = -(-dims[-1] // 128)
    expected = dims[0] * 32 * blocks if dtype == 0 else math.prod(dims) * ITEM_BYTES[dtype]
    body, end = _place(taker, expected, end, limit)
    _check_data(dtype, body)
    if dtype == 0 and dims[1] % 128:
        _check_padding(body, dims[1])
    scales = b""
    if kind >= 2:
        count = dims[0] * (blocks if kind == 3 else 1)
        scales, end = _place(taker, count * (6 - 2 * scale_dtype), end, limit)
        _check_scales(scales, scale_dtype)
    record = {"name": name, "dtype": dtype, "dims": dims, "kind": kind, "scale": scale,
              "scale_dtype": scale_dtype, "data": body, "scales": scales}  # fmt: skip
    return record, end


def _place(taker: _Taker, expected: int, end: int, limit: int) -> tuple[bytes, int]:
    offset, size, checksum = taker.u64(), taker.u64(), taker.u64()
    require(offset == end and size == expected and offset + size <= limit, "place")
    data = taker.data[offset : offset + size]
    end = offset + size + -size % 64
    require(xxh64(data) == checksum, "checksum")
    require(not any(taker.data[offset + size : end]), "gap")
    return data, end


def _check_padding(body: bytes, k: int) -> None:
    row = 32 * -(-k // 128)
    for at in range(0, len(body), row):
        last = body[at + row - 32 : at + row]
        for i in range(k % 128, 128):
            require(last[i % 32] >> (6 - 2 * (i // 32)) & 3 == 1, "padding code")


def _check_scales(scales: bytes, dtype: int) -> None:
    for value in struct.unpack(f"<{len(scales) // (6 - 2 * dtype)}{'_fe'[dtype]}", scales):
        small = 2.0**-126 if dtype == 1 else 0.0
        require(
            math.copysign(1, value) == 1 and (value == 0 or small <= value < math.inf), "scales"
        )
