"""Builders of samples for the ops on ternary weights; op_samples.py collects them.

One builder per op, in the order of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from op_values import (
    FLOATS,
    FORMATS,
    Built,
    activations,
    dtype_name,
    int8_values,
    positive,
    private,
    random_codes,
    random_packed,
    strided,
    transposed,
)


def _pack() -> Built:
    for n, k in ((1, 1), (5, 128), (3, 300), (2, 33)):
        yield f"{n}x{k}", lambda g, n=n, k=k: (random_codes(g, n, k),)
    yield "no_rows", lambda g: (random_codes(g, 0, 64),)
    yield "strided", lambda g: (strided(random_codes(g, 4, 130)),)
    yield "transposed", lambda g: (transposed(random_codes(g, 4, 130)),)


def _unpack() -> Built:
    for n, k in ((1, 1), (5, 128), (3, 300), (2, 33), (0, 64)):
        yield f"{n}x{k}", lambda g, n=n, k=k: (random_packed(g, n, k), k)


def _prepack() -> Built:
    for fmt in FORMATS:
        for n, k in ((1, 1), (5, 64), (33, 300), (81, 129)):
            yield f"{fmt}_{n}x{k}", lambda g, n=n, k=k, f=fmt: (random_packed(g, n, k), k, f)
    yield "no_rows", lambda g: (random_packed(g, 0, 64), 64, "2bit")


def _unprepack() -> Built:
    for fmt in FORMATS:
        for n, k in ((1, 1), (5, 64), (33, 300), (81, 129)):
            yield f"{fmt}_{n}x{k}", lambda g, n=n, k=k, f=fmt: (
                private(random_packed(g, n, k), k, f), n, k,
            )  # fmt: skip


def _quantize_weights() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (torch.randn(7, 37, generator=g).to(d),)
    yield "zeros", lambda g: (torch.zeros(2, 5),)
    yield "small", lambda g: (torch.randn(3, 9, generator=g) * 1e-7,)
    yield "transposed", lambda g: (transposed(torch.randn(6, 130, generator=g)),)


def _quantize_activations() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (activations(g, 3, 70, dtype=d),)
    yield "vector", lambda g: (activations(g, 33),)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 2, 17),)
    yield "no_tokens", lambda g: (activations(g, 0, 64),)
    yield "strided", lambda g: (strided(activations(g, 4, 65)),)
    yield "transposed", lambda g: (transposed(activations(g, 4, 65)),)
    yield "zeros", lambda g: (torch.zeros(2, 40),)
    yield "one_value", lambda g: (torch.tensor([[3.0]]),)
    yield "not_finite", lambda g: (
        activations(g, 3, 20).index_put_((torch.tensor([0, 2]), torch.tensor([3, 19])),
                                         torch.tensor([torch.nan, -torch.inf])),
    )  # fmt: skip


def _gemv() -> Built:
    for n, k in ((1, 1), (5, 128), (17, 300), (66, 257)):
        yield f"{n}x{k}", lambda g, n=n, k=k: (random_packed(g, n, k), int8_values(g, k))
    yield "scaled", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 200), positive(g, 1), positive(g, 1),
    )  # fmt: skip
    yield "scaled_per_row", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 200), positive(g), positive(g, 9),
    )  # fmt: skip
    yield "strided", lambda g: (random_packed(g, 9, 200), strided(int8_values(g, 200)))
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: (
            private(random_packed(g, 83, 200), 200, f), int8_values(g, 200), None, None, 83,
        )  # fmt: skip


def _gemm() -> Built:
    for m, n, k in ((0, 3, 64), (1, 5, 128), (4, 17, 300), (9, 1, 33)):
        yield f"{m}x{n}x{k}", lambda g, m=m, n=n, k=k: (
            random_packed(g, n, k), int8_values(g, m, k),
        )  # fmt: skip
    yield "scaled", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 5, 200), positive(g, 5), positive(g, 1),
    )  # fmt: skip
    yield "scaled_per_row", lambda g: (
        random_packed(g, 9, 200), int8_values(g, 5, 200), positive(g, 5), positive(g, 9),
    )  # fmt: skip
    yield "transposed", lambda g: (random_packed(g, 9, 200), transposed(int8_values(g, 5, 200)))
    for fmt in FORMATS:
        for m in (2, 3, 7, 70):
            yield f"private_{fmt}_{m}", lambda g, f=fmt, m=m: (
                private(random_packed(g, 83, 200), 200, f), int8_values(g, m, 200),
                positive(g, m), positive(g, 83), 83,
            )  # fmt: skip


def _linear() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 300, dtype=d), random_packed(g, 17, 300), positive(g, 1),
        )  # fmt: skip
        yield f"{dtype_name(dtype)}_bias", lambda g, d=dtype: (
            activations(g, 2, 33, dtype=d), random_packed(g, 5, 33), positive(g, 5),
            torch.randn(5, generator=g).to(d),
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 128), random_packed(g, 6, 128), positive(g, 1))
    yield "leading_dims", lambda g: (
        activations(g, 2, 1, 3, 64), random_packed(g, 6, 64), positive(g, 1),
    )  # fmt: skip
    yield "no_tokens", lambda g: (
        activations(g, 2, 0, 64), random_packed(g, 6, 64), positive(g, 1),
    )  # fmt: skip
    yield "transposed", lambda g: (
        transposed(activations(g, 4, 140)), random_packed(g, 6, 140), positive(g, 1),
    )  # fmt: skip
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: (
            activations(g, 3, 300), private(random_packed(g, 17, 300), 300, f), positive(g, 1),
            torch.randn(17, generator=g), 17,
        )  # fmt: skip


def _group_linear() -> Built:
    for dtype in FLOATS:
        yield dtype_name(dtype), lambda g, d=dtype: (
            activations(g, 3, 300, dtype=d), random_packed(g, 17, 300), positive(g, 17, 3),
        )  # fmt: skip
        yield f"{dtype_name(dtype)}_bias", lambda g, d=dtype: (
            activations(g, 2, 33, dtype=d), random_packed(g, 5, 33), positive(g, 5, 1),
            torch.randn(5, generator=g).to(d),
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 256), random_packed(g, 6, 256), positive(g, 6, 2))
    yield "leading_dims", lambda g: (
        activations(g, 2, 1, 3, 64), random_packed(g, 6, 64), positive(g, 6, 1),
    )  # fmt: skip
    yield "no_tokens", lambda g: (
        activations(g, 2, 0, 130), random_packed(g, 6, 130), positive(g, 6, 2),
    )  # fmt: skip
    yield "zero_groups", lambda g: (
        activations(g, 3, 300), random_packed(g, 17, 300), positive(g, 17, 3).round(),
    )  # fmt: skip
    for fmt in FORMATS:
        for k in (64, 129, 200, 300):  # a last group of one line's worth, of half, of all lines
            yield f"private_{fmt}_{k}", lambda g, f=fmt, k=k: (
                activations(g, 3, k), private(random_packed(g, 85, k), k, f),
                positive(g, 85, -(-k // 128)), torch.randn(85, generator=g), 85,
            )  # fmt: skip


BUILDERS: dict[str, Callable[[], Built]] = {
    "pack": _pack,
    "unpack": _unpack,
    "prepack": _prepack,
    "unprepack": _unprepack,
    "quantize_weights": _quantize_weights,
    "quantize_activations": _quantize_activations,
    "gemv": _gemv,
    "gemm": _gemm,
    "linear": _linear,
    "group_linear": _group_linear,
}
