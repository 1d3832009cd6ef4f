"""The documented order of float sums, emulated in numpy: 16 lanes, fused multiply-add, a tree.

An FMA is a product and a sum rounded once. A product of two float32 has 48 bits, so in numpy's
80-bit long double (64 bits of significand) the product is exact and the sum all but exact; the
final rounding to float32 is then the FMA's own except in about one case of 2^40.
Shares no code with the kernels; needs a long double wider than float64 (x86).
"""

from __future__ import annotations

import numpy as np

HAS_WIDE_FLOAT = np.finfo(np.longdouble).nmant >= 63


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return wide.astype(np.float32)


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 [..., K] times float32 [..., K] -> float32 [...], in the documented order."""
    a, b = np.broadcast_arrays(a, b)
    padding = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 16)]
    a, b = np.pad(a, padding), np.pad(b, padding)
    lanes = np.zeros((*a.shape[:-1], 16), dtype=np.float32)
    for start in range(0, a.shape[-1], 16):
        lanes = fma(a[..., start : start + 16], b[..., start : start + 16], lanes)
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """float32 [..., K]: every step rounded to float32."""
    mean = dot(x, x)[..., None] / np.float32(x.shape[-1])
    inv_rms = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return (x * inv_rms) * weight
