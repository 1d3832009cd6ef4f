"""The ternary layouts of GGUF <-> canonical rows: I2_S in three forms, TQ, Q2_0 and Prism's types.

Canonical rows are those of FORMAT.md, uint8 [N, 32 * ceil(K / 128)]; codes 0, 1, 2 stand for -1, 0,
+1. Sources of the layouts: ggml `ggml-quants.c`, Microsoft `ggml-bitnet-mad.cpp`.
docs/guide/gguf.md has them in words. numpy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitnet_ops.errors import BitNetError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

I2S_LAYOUTS = ("a", "b", "c")
I2S_BLOCKS = {"a": 128, "b": 64, "c": 1}  # weights whose codes share bytes
# name -> weights and bytes of a block, and whether its scale (float16) comes before the codes
_BLOCKS = {
    "TQ1_0": (256, 54, False),
    "TQ2_0": (256, 66, False),
    "Q2_0": (64, 18, True),
    "Q2_0_128": (128, 34, True),
    "PQ2_0": (128, 34, True),
    "PTQ1_0": (128, 28, False),
}
TERNARY_TYPES = ("I2_S", *_BLOCKS)
_ZEROS = 0x55  # four codes 1
_CHUNK = 1 << 22  # weights decoded at a time, which bounds the temporaries
_POWERS = np.array([81, 27, 9, 3, 1], dtype=np.uint16)


class LayoutError(BitNetError, ValueError):
    """Bytes that are no ternary matrix of the layout, or a shape that the layout cannot hold.

    `code` is "row_length", "code_3" or "scale".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Decoded:
    """A matrix: canonical `rows`, and `scales` float32 [N, blocks], one for `block` weights of K.

    With one scale for the whole matrix `scales` is [1, 1] and `block` is 0. Scales multiply; the
    scale of a block without weights other than 0 means nothing.
    """

    rows: Bytes
    scales: Floats
    block: int = 0

    def one_scale(self) -> float | None:
        """The one scale that all blocks with a non-zero scale share, or None."""
        found = np.unique(self.scales[self.scales != 0])
        return float(found[0]) if len(found) == 1 else None


def check_shape(type_name: str, n: int, k: int, layout: str = "a") -> None:
    """Raise LayoutError unless an N x K matrix can be stored as `type_name`."""
    multiple = I2S_BLOCKS[layout] if type_name == "I2_S" else _BLOCKS[type_name][0]
    name = f"I2_S layout {layout}" if type_name == "I2_S" else type_name
    if k % multiple:
        raise LayoutError("row_length", f"expected K a multiple of {multiple} for {name}, got {k}")
    if type_name == "I2_S" and layout == "c" and n % 4:
        raise LayoutError("row_length", f"expected N a multiple of 4 for {name}, got {n}")


def decode(type_name: str, data: Bytes, n: int, k: int, layout: str = "a") -> Decoded:
    """The N x K matrix stored as `data`; `layout` is that of I2_S, ignored for other types.

    Raises LayoutError for a code 3, a scale that is not finite and positive (0 for a block of
    zeros), or a shape that the type cannot hold.
    """
    if type_name == "I2_S":
        return _decode_i2s(data, n, k, layout)
    check_shape(type_name, n, k)
    size, nbytes, first = _BLOCKS[type_name]
    stored = data.reshape(n, k // size, nbytes)
    scales = (stored[..., :2] if first else stored[..., -2:]).copy().view(np.float16)[..., 0]
    scales = scales.astype(np.float32)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        bad = scales[~(np.isfinite(scales) & (scales >= 0))][0]
        raise LayoutError("scale", f"expected finite scales of 0 and above, got {bad}")
    body = {"TQ1_0": _tq1_rows, "TQ2_0": _tq2_rows, "PTQ1_0": _ptq1_rows}.get(type_name, _q2_rows)
    rows = np.empty((n, packed_bytes(k)), dtype=np.uint8)
    for part in _parts(n, k):
        rows[part] = body(stored[part], k)
        empty = np.repeat(scales[part] == 0, size // 4, axis=1) if size >= 128 else None
        if empty is None:  # two blocks of 64 share the bytes of a canonical block
            codes = unpack_rows(rows[part], k)
            codes[np.repeat(scales[part] == 0, size, axis=1)] = 1
            rows[part] = pack_rows(codes)
        elif empty.any():
            rows[part][empty] = _ZEROS
    _check_codes(rows)
    return Decoded(rows, scales, size)


def values(type_name: str, data: Bytes, n: int, k: int) -> NDArray[np.float16]:
    """The N x K matrix stored as `data`, its values exact: codes times scales of float16."""
    out = np.empty((n, k), dtype=np.float16)
    for part in _parts(n, k):
        rows = data.reshape(n, -1)[part]
        found = decode(type_name, rows, len(rows), k)
        codes = unpack_rows(found.rows, k).astype(np.float32) - 1
        out[part] = codes * np.repeat(found.scales, found.block, axis=1)
    return out


def encode(type_name: str, rows: Bytes, k: int, scale: float) -> Bytes:
    """Canonical rows with one scale as the bytes of "I2_S" (layout a), "TQ1_0" or "TQ2_0".

    The latter two store the scale as float16 and 0 for a block of zeros, as ggml's quantiser does.
    Raises LayoutError for a K that the type cannot hold, and a scale that float16 cannot.
    """
    n = rows.shape[0]
    check_shape(type_name, n, k)
    if type_name == "I2_S":
        tail = np.zeros(8, dtype="<f4")
        tail[0] = scale
        return np.concatenate([rows.reshape(-1), tail.view(np.uint8)])
    half = half_scale(scale)
    block = 54 if type_name == "TQ1_0" else 66
    out = np.empty((n, k // 256, block), dtype=np.uint8)
    for part in _parts(n, k):
        piece = rows[part].reshape(-1, k // 256, 64)
        d = np.where((piece != _ZEROS).any(-1), half, np.float16(0)).astype("<f2")
        out[part, :, -2:] = d[..., None].view(np.uint8)
        body = _reverse_fields(piece) if type_name == "TQ2_0" else _tq1_bytes(piece)
        out[part, :, :-2] = body
    return out.reshape(-1)


def encode_groups(rows: Bytes, k: int, scales: Floats) -> Bytes:
    """Canonical rows with scales [N, K / 128] as the bytes of "PQ2_0".

    Scales go to float16; that of a block of zeros becomes 0. Raises LayoutError for a K that the
    type cannot hold, and a scale that float16 cannot.
    """
    n = rows.shape[0]
    check_shape("PQ2_0", n, k)
    out = np.empty((n, k // 128, 34), dtype=np.uint8)
    for part in _parts(n, k):
        codes = unpack_rows(rows[part], k).reshape(-1, k // 128, 32, 4)
        used = (codes != 1).any(axis=(2, 3))
        halves = half_scales(np.where(used, scales[part], 0))
        if (lost := used & (halves == 0)).any():
            got = scales[part][lost][0]
            raise LayoutError("scale", f"expected scales that float16 holds, got {got:g}")
        out[part, :, :2] = halves[..., None].view(np.uint8)
        fields = codes << np.array([0, 2, 4, 6], dtype=np.uint8)
        out[part, :, 2:] = np.bitwise_or.reduce(fields, axis=3)
    return out.reshape(-1)


def half_scales(scales: Floats) -> NDArray[np.float16]:
    """`scales` as float16, subnormal ones too; LayoutError for one that is too large."""
    with np.errstate(over="ignore"):
        halves = scales.astype("<f2")
    if not np.isfinite(halves).all():
        got = scales.max()
        raise LayoutError("scale", f"expected scales that float16 holds, got {got:g}")
    return halves


def half_scale(scale: float) -> np.float16:
    """`scale` as TQ1_0 and TQ2_0 hold it; LayoutError where float16 has no normal number for it."""
    with np.errstate(over="ignore"):
        half = np.float16(np.float32(scale))
    if not np.isfinite(half) or half < np.finfo(np.float16).tiny:
        raise LayoutError("scale", f"expected a scale that float16 holds, got {scale:g}")
    return half


# Canonical rows <-> codes 0, 1, 2 ---------------------------------------------------------------


def packed_bytes(k: int) -> int:
    """Bytes of a canonical row of K weights."""
    return 32 * -(-k // 128)


def pack_rows(codes: Bytes) -> Bytes:
    """Codes 0, 1, 2 uint8 [N, K] -> canonical rows; padding is code 1."""
    n, k = codes.shape
    if k % 128:
        codes = np.pad(codes, ((0, 0), (0, -k % 128)), constant_values=1)
    fields = codes.reshape(n, -1, 4, 32)
    rows = fields[:, :, 0] << 6 | fields[:, :, 1] << 4 | fields[:, :, 2] << 2 | fields[:, :, 3]
    packed: Bytes = rows.reshape(n, -1).astype(np.uint8, copy=False)
    return packed


def unpack_rows(rows: Bytes, k: int) -> Bytes:
    """Canonical rows -> codes uint8 [N, K]."""
    blocks = rows.reshape(rows.shape[0], -1, 1, 32)
    shifts = np.array([6, 4, 2, 0], dtype=np.uint8).reshape(4, 1)
    codes = (blocks >> shifts) & np.uint8(3)
    return codes.reshape(rows.shape[0], -1)[:, :k]


def _parts(n: int, k: int) -> list[slice]:
    step = max(1, _CHUNK // k)
    return [slice(begin, min(begin + step, n)) for begin in range(0, n, step)]


def _check_codes(rows: Bytes) -> None:
    for part in _parts(len(rows), 4 * rows.shape[1]):
        piece = rows[part]
        if (piece & (piece >> 1) & 0x55).any():
            raise LayoutError("code_3", "expected codes 0, 1 and 2, got code 3")


# The layouts ------------------------------------------------------------------------------------


def _decode_i2s(data: Bytes, n: int, k: int, layout: str) -> Decoded:
    block = I2S_BLOCKS[layout]
    if layout == "c":
        check_shape("I2_S", n, k, layout)
    elif n * k % block:  # rows may begin inside a block, as 1bitLLM's 8640 columns do
        raise LayoutError("row_length", f"expected N * K a multiple of {block}, got {n} * {k}")
    count = n * k // 4
    scale = data[count : count + 4].copy().view("<f4").astype(np.float32).reshape(1, 1)
    if not (np.isfinite(scale[0, 0]) and scale[0, 0] > 0):
        got = scale[0, 0]
        raise LayoutError("scale", f"expected a finite scale above 0 behind the codes, got {got}")
    stored = data[:count]
    if layout == "a" and k % block == 0:
        rows = stored.reshape(n, k // 4)
    else:
        rows = np.empty((n, packed_bytes(k)), dtype=np.uint8)
        step = 4 if layout == "c" else block // math.gcd(k, block)  # rows in whole bytes
        for part in _parts(-(-n // step), k * step):
            begin, end = part.start * step, min(part.stop * step, n)
            rows[begin:end] = _i2s_part(stored[begin * k // 4 : end * k // 4], k, layout)
    _check_codes(rows)
    return Decoded(rows, scale)


def _i2s_part(stored: Bytes, k: int, layout: str) -> Bytes:
    """Canonical rows of some rows of K weights."""
    quarter = k if layout == "c" else I2S_BLOCKS[layout] // 4
    shifts = np.array([6, 4, 2, 0], dtype=np.uint8).reshape(4, 1)
    codes = (stored.reshape(-1, 1, quarter) >> shifts) & np.uint8(3)
    return pack_rows(codes.reshape(-1, k))


def _reverse_fields(packed: Bytes) -> Bytes:
    """Bytes with their four fields in the opposite order: TQ2_0 is that of canonical blocks."""
    return _REVERSED[packed]


_ALL = np.arange(256, dtype=np.uint16)
_REVERSED = (
    (_ALL & 3) << 6 | (_ALL >> 2 & 3) << 4 | (_ALL >> 4 & 3) << 2 | _ALL >> 6
).astype(np.uint8)  # fmt: skip
# trit n of a TQ1_0 byte, most significant first: ((byte * 3^n mod 256) * 3) >> 8
_TRITS = (((_ALL[:, None] * 3 ** np.arange(5, dtype=np.uint16)) & 255) * 3 >> 8).astype(np.uint8)


def _tq2_rows(stored: Bytes, k: int) -> Bytes:
    return _reverse_fields(stored[..., :64]).reshape(-1, k // 4)


def _tq1_rows(stored: Bytes, k: int) -> Bytes:
    return _digit_rows(stored, k, ((32, 5), (16, 5), (4, 4)))


def _ptq1_rows(stored: Bytes, k: int) -> Bytes:
    """As TQ1_0, with half as many bytes in each run."""
    return _digit_rows(stored, k, ((16, 5), (8, 5), (2, 4)))


def _digit_rows(stored: Bytes, k: int, runs: tuple[tuple[int, int], ...]) -> Bytes:
    """Runs of bytes of so many ternary digits: the first of all bytes, the second of all, ..."""
    parts, at = [], 0
    for count, places in runs:
        digits = _TRITS[stored[..., at : at + count]][..., :places]
        parts.append(digits.swapaxes(-1, -2).reshape(*stored.shape[:2], count * places))
        at += count
    return pack_rows(np.concatenate(parts, axis=-1).reshape(-1, k))


def _tq1_bytes(rows: Bytes) -> Bytes:
    """Canonical rows [n, blocks, 64] -> the 52 bytes of trits of every block."""
    n, blocks, _ = rows.shape
    codes = unpack_rows(rows.reshape(n, -1), 256 * blocks).reshape(n, blocks, 256).astype(np.uint16)
    sums = [
        (codes[..., :160].reshape(n, blocks, 5, 32) * _POWERS[:, None]).sum(2, dtype=np.uint16),
        (codes[..., 160:240].reshape(n, blocks, 5, 16) * _POWERS[:, None]).sum(2, dtype=np.uint16),
        (codes[..., 240:].reshape(n, blocks, 4, 4) * _POWERS[:4, None]).sum(2, dtype=np.uint16),
    ]
    value = np.concatenate(sums, axis=-1).astype(np.uint32)
    return ((value * 256 + 242) // 243).astype(np.uint8)


def _q2_rows(stored: Bytes, k: int) -> Bytes:
    fields = stored[..., 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)
    return pack_rows((fields & np.uint8(3)).reshape(-1, k))
