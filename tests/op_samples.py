"""Inputs of every op of torch.ops.bitnet: dtypes, shapes, strides, empty batches, leading dims.

One builder per op, in the order of the catalogue. A sample is made afresh on every call (some ops
mutate their arguments) and is the same every time. Must not know what the ops answer: expected
values and tolerances live in the tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (torch.float32, torch.bfloat16)

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Sample:
    op: str
    name: str
    build: Callable[[torch.Generator], Arguments]

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def args(self) -> Arguments:
        return self.build(torch.Generator().manual_seed(zlib.crc32(self.id.encode())))


def random_codes(rng: torch.Generator, n: int, k: int) -> Tensor:
    return torch.randint(-1, 2, (n, k), generator=rng, dtype=torch.int8)


def pack_codes(codes: Tensor) -> Tensor:
    """The canonical layout, written bit by bit: shares no code with the package."""
    n, k = codes.shape
    blocks = -(-k // 128)
    packed = torch.full((n, blocks * 32), 0x55, dtype=torch.int32)
    for column in range(k):
        block, index = divmod(column, 128)
        field, byte = divmod(index, 32)
        shift = 6 - 2 * field
        # The byte starts with code 1 in every field; w moves its own field by w.
        packed[:, block * 32 + byte] += codes[:, column].to(torch.int32) << shift
    return packed.to(torch.uint8)


def random_packed(rng: torch.Generator, n: int, k: int) -> Tensor:
    return pack_codes(random_codes(rng, n, k))


def private(weight: Tensor, k: int, format: str) -> Tensor:
    """A canonical weight in a private layout of the ISA in force when the sample is made."""
    return reference.prepack(weight, k, format)


FORMATS = ("2bit", "1.6bit")


def activations(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values with a mean that is not zero: a forgotten or doubled correction shows."""
    return (torch.randn(shape, generator=rng) * 1.5 + 0.75).to(dtype)


def int8_values(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=rng, dtype=torch.int8)


def positive(rng: torch.Generator, *shape: int) -> Tensor:
    """Scales that are not 1: an omitted or repeated one shows."""
    return torch.rand(shape, generator=rng) * 1.5 + 0.25


def gain(rng: torch.Generator, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(k, generator=rng) + 0.5).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values, last dimension with stride 2."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def transposed(x: Tensor) -> Tensor:
    """The same values, stored with the first and last dimension exchanged."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Built = Iterator[tuple[str, Callable[[torch.Generator], Arguments]]]


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
        yield _name(dtype), lambda g, d=dtype: (torch.randn(7, 37, generator=g).to(d),)
    yield "zeros", lambda g: (torch.zeros(2, 5),)
    yield "small", lambda g: (torch.randn(3, 9, generator=g) * 1e-7,)
    yield "transposed", lambda g: (transposed(torch.randn(6, 130, generator=g)),)


def _quantize_activations() -> Built:
    for dtype in FLOATS:
        yield _name(dtype), lambda g, d=dtype: (activations(g, 3, 70, dtype=d),)
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
        yield _name(dtype), lambda g, d=dtype: (
            activations(g, 3, 300, dtype=d), random_packed(g, 17, 300), positive(g, 1),
        )  # fmt: skip
        yield f"{_name(dtype)}_bias", lambda g, d=dtype: (
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
        yield _name(dtype), lambda g, d=dtype: (
            activations(g, 3, 300, dtype=d), random_packed(g, 17, 300), positive(g, 17, 3),
        )  # fmt: skip
        yield f"{_name(dtype)}_bias", lambda g, d=dtype: (
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


def _rms_norm() -> Built:
    for dtype in FLOATS:
        yield _name(dtype), lambda g, d=dtype: (
            activations(g, 3, 70, dtype=d), gain(g, 70, d), 1e-5,
        )  # fmt: skip
    yield "bfloat16_float32_gain", lambda g: (
        activations(g, 3, 70, dtype=torch.bfloat16), gain(g, 70), 1e-5,
    )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), gain(g, 5), 1e-6)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 64), gain(g, 64), 1e-5)
    yield "no_tokens", lambda g: (activations(g, 0, 64), gain(g, 64), 1e-5)
    yield "strided", lambda g: (strided(activations(g, 3, 64)), strided(gain(g, 64)), 1e-5)
    yield "zeros", lambda g: (torch.zeros(2, 20), gain(g, 20), 1e-5)


def _add_rms_norm() -> Built:
    for name, norm_arguments in _rms_norm():

        def arguments(
            g: torch.Generator, build: Callable[[torch.Generator], Arguments] = norm_arguments
        ) -> Arguments:
            x, weight, eps = build(g)
            return x, activations(g, *x.shape, dtype=x.dtype), weight, eps

        yield name, arguments


def _relu2_mul() -> Built:
    for dtype in CACHE_DTYPES:
        yield _name(dtype), lambda g, d=dtype: (
            activations(g, 3, 37, dtype=d) * 20, activations(g, 3, 37, dtype=d) * 30,
        )  # fmt: skip
    yield "vector", lambda g: (activations(g, 5), activations(g, 5))
    yield "leading_dims", lambda g: (activations(g, 2, 2, 9), activations(g, 2, 2, 9))
    yield "no_tokens", lambda g: (activations(g, 0, 8), activations(g, 0, 8))
    yield "strided", lambda g: (strided(activations(g, 3, 16)), transposed(activations(g, 3, 16)))


def _silu_and_mul() -> Built:
    for dtype in FLOATS:
        yield _name(dtype), lambda g, d=dtype: (activations(g, 3, 74, dtype=d),)
    yield "vector", lambda g: (activations(g, 2),)
    yield "leading_dims", lambda g: (activations(g, 2, 3, 34),)
    yield "no_tokens", lambda g: (activations(g, 0, 8),)
    yield "strided", lambda g: (strided(activations(g, 3, 16)),)
    yield "wide_range", lambda g: (torch.randn(4, 66, generator=g) * 40,)


def _rope_table() -> Built:
    yield "vector", lambda g: (torch.arange(7), 16, 10000.0)
    yield "batch", lambda g: (torch.randint(0, 4096, (2, 5), generator=g), 128, 500000.0)
    yield "scalar", lambda g: (torch.tensor(100), 6, 10000.0)
    yield "none", lambda g: (torch.zeros(0, dtype=torch.int64), 8, 10000.0)
    yield "strided", lambda g: (torch.arange(20)[::3], 2, 1000042.0)


def _unit_table(g: torch.Generator, *shape: int) -> Tensor:
    angle = torch.rand(*shape[:-1], shape[-1] // 2, generator=g) * 6.28
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _rope() -> Built:
    for dtype in FLOATS:
        yield _name(dtype), lambda g, d=dtype: (
            activations(g, 3, 4, 32, dtype=d), _unit_table(g, 3, 32),
        )  # fmt: skip
    yield "batch", lambda g: (activations(g, 2, 3, 4, 6), _unit_table(g, 2, 3, 6))
    yield "one_token", lambda g: (activations(g, 5, 64), _unit_table(g, 64))
    yield "no_tokens", lambda g: (activations(g, 0, 4, 8), _unit_table(g, 0, 8))
    yield "view_of_qkv", lambda g: (
        activations(g, 3, 6 * 16)[:, 16:80].reshape(3, 4, 16), strided(_unit_table(g, 3, 16)),
    )  # fmt: skip


def _qkv(g: torch.Generator, x: Tensor, k: int, gain_dtype: torch.dtype) -> Arguments:
    shards = [part for n in (12, 4, 6) for part in (random_packed(g, n, k), positive(g, 1))]
    return (x, gain(g, k, gain_dtype), *shards, 1e-5)


def _private_qkv(g: torch.Generator, k: int, fmt: str) -> Arguments:
    args = list(_qkv(g, activations(g, 3, k), k, torch.float32))
    rows = [args[index].shape[0] for index in (2, 4, 6)]
    for index in (2, 4, 6):
        args[index] = private(args[index], k, fmt)
    return (*args, rows)


def _qkv_forward() -> Built:
    for dtype in FLOATS:
        yield _name(dtype), lambda g, d=dtype: _qkv(g, activations(g, 3, 140, dtype=d), 140, d)
    yield "vector", lambda g: _qkv(g, activations(g, 64), 64, torch.float32)
    yield (
        "leading_dims",
        lambda g: _qkv(g, activations(g, 2, 2, 64, dtype=torch.bfloat16), 64, torch.float32),
    )
    yield "no_tokens", lambda g: _qkv(g, activations(g, 0, 64), 64, torch.float32)
    yield "strided", lambda g: _qkv(g, strided(activations(g, 2, 64)), 64, torch.float32)
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: _private_qkv(g, 140, f)


def mlp_arguments(
    g: torch.Generator, x: Tensor, activation: str, sub_norm: bool = True, intermediate: int = 150
) -> Arguments:
    k, dtype = x.shape[-1], x.dtype
    return (
        x, gain(g, k, dtype),
        random_packed(g, intermediate, k), positive(g, 1),
        random_packed(g, intermediate, k), positive(g, 1),
        gain(g, intermediate, dtype) if sub_norm else None,
        random_packed(g, k, intermediate), positive(g, 1),
        1e-5, activation,
    )  # fmt: skip


def private_mlp_arguments(g: torch.Generator, k: int, inner: int, fmt: str) -> Arguments:
    args = list(mlp_arguments(g, activations(g, 3, k), "relu2", intermediate=inner))
    for index, width in ((2, k), (4, k), (7, inner)):
        args[index] = private(args[index], width, fmt)
    return (*args, [inner, k])


def _mlp_forward() -> Built:
    for dtype in FLOATS:
        for activation in ("relu2", "silu"):
            yield (
                f"{_name(dtype)}_{activation}",
                lambda g, d=dtype, a=activation: mlp_arguments(
                    g, activations(g, 3, 140, dtype=d), a
                ),
            )
    yield "no_sub_norm", lambda g: mlp_arguments(g, activations(g, 2, 64), "silu", False)
    yield "vector", lambda g: mlp_arguments(g, activations(g, 64), "relu2")
    yield "leading_dims", lambda g: mlp_arguments(g, activations(g, 2, 2, 64), "relu2", False)
    yield "no_tokens", lambda g: mlp_arguments(g, activations(g, 0, 64), "relu2")
    yield "strided", lambda g: mlp_arguments(g, strided(activations(g, 2, 64)), "relu2")
    for fmt in FORMATS:
        yield f"private_{fmt}", lambda g, f=fmt: private_mlp_arguments(g, 140, 150, f)


def attention_arguments(
    g: torch.Generator,
    *,
    batch: int = 2,
    tokens: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 12,
    head_dim: int = 16,
    query_dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Arguments:
    cache = (batch, kv_heads, length, head_dim)
    return (
        torch.randn(batch, tokens, heads, head_dim, generator=g).to(query_dtype),
        torch.randn(*cache, generator=g).to(cache_dtype),
        (torch.randn(*cache, generator=g) + 0.5).to(cache_dtype),
        torch.randint(0, length - tokens + 1, (batch,), generator=g),
        head_dim**-0.5,
    )


def _attention() -> Built:
    for query in FLOATS:
        for cache in CACHE_DTYPES:
            yield (
                f"{_name(query)}_over_{_name(cache)}",
                lambda g, q=query, c=cache: attention_arguments(g, query_dtype=q, cache_dtype=c),
            )
    yield "decode", lambda g: attention_arguments(g, tokens=1)
    yield "one_head", lambda g: attention_arguments(g, heads=1, kv_heads=1, head_dim=5)
    yield "group_of_four", lambda g: attention_arguments(g, heads=8, kv_heads=2, batch=1)
    yield "long", lambda g: attention_arguments(g, length=70, tokens=2, batch=1)
    yield "no_tokens", lambda g: attention_arguments(g, tokens=0)
    yield "no_batch", lambda g: attention_arguments(g, batch=0)
    yield "strided_query", lambda g: (
        lambda q, *rest: (strided(q), *rest)
    )(*attention_arguments(g))  # fmt: skip


def cache_arguments(
    g: torch.Generator,
    *,
    batch: int = 2,
    tokens: int = 3,
    kv_heads: int = 2,
    length: int = 9,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
) -> Arguments:
    caches = [
        torch.randn(batch, kv_heads, length, head_dim, generator=g).to(cache_dtype) for _ in "kv"
    ]
    new = [torch.randn(batch, tokens, kv_heads, head_dim, generator=g).to(dtype) for _ in "kv"]
    return (*caches, *new, torch.randint(0, length - tokens + 1, (batch,), generator=g))


def _kv_cache_update() -> Built:
    for dtype in FLOATS:
        for cache in CACHE_DTYPES:
            yield (
                f"{_name(dtype)}_into_{_name(cache)}",
                lambda g, d=dtype, c=cache: cache_arguments(g, dtype=d, cache_dtype=c),
            )
    yield "decode", lambda g: cache_arguments(g, tokens=1)
    yield "whole_cache", lambda g: cache_arguments(g, tokens=9)
    yield "no_tokens", lambda g: cache_arguments(g, tokens=0)
    yield "strided", lambda g: (
        lambda kc, vc, k, v, s: (kc, vc, strided(k), transposed(v), s)
    )(*cache_arguments(g))  # fmt: skip


HEAD_FORMATS = (("int8", 128), ("int4", 64), ("int4", 128))


def quantized_head(
    rng: torch.Generator, v: int, k: int, form: str, group: int
) -> tuple[Tensor, Tensor]:
    """Random codes and scales in the layout of FORMAT.md; padding holds code 0 (8 in storage)."""
    if form == "int8":
        return int8_values(rng, v, k), positive(rng, v) * 0.01
    tiles, groups = -(-v // 16), -(-k // group)
    codes = torch.full((tiles * 16, groups * group), 8, dtype=torch.int32)
    codes[:v, :k] = torch.randint(0, 16, (v, k), generator=rng, dtype=torch.int32)
    packed = torch.zeros(tiles, groups * group // 8, 64, dtype=torch.int32)
    for row in range(tiles * 16):
        for j in range(4):
            byte = codes[row, j::8] + 16 * codes[row, 4 + j :: 8]
            packed[row // 16, :, 4 * (row % 16) + j] = byte
    scale = (positive(rng, tiles, groups, 16) * 0.01).to(torch.bfloat16)
    return packed.to(torch.uint8), scale


def head_arguments(g: torch.Generator, x: Tensor, v: int, form: str, group: int) -> Arguments:
    return (x, *quantized_head(g, v, x.shape[-1], form, group), v)


def _lm_head() -> Built:
    for x in FLOATS:
        for weight in FLOATS:
            yield f"{_name(x)}_{_name(weight)}", lambda g, x=x, w=weight: (
                activations(g, 2, 70, dtype=x), torch.randn(19, 70, generator=g).to(w),
            )  # fmt: skip
    yield "vector", lambda g: (activations(g, 33), torch.randn(5, 33, generator=g))
    yield "leading_dims", lambda g: (activations(g, 2, 3, 16), torch.randn(5, 16, generator=g))
    yield "no_tokens", lambda g: (activations(g, 0, 16), torch.randn(5, 16, generator=g))
    yield "strided", lambda g: (strided(activations(g, 2, 16)), torch.randn(5, 16, generator=g))

    for x in FLOATS:
        for form, group in HEAD_FORMATS:
            yield (
                f"{_name(x)}_{form}_{group}",
                lambda g, x=x, f=form, n=group: head_arguments(
                    g, activations(g, 3, 300, dtype=x), 37, f, n
                ),
            )
    for form, group in HEAD_FORMATS:
        yield (
            f"no_tokens_{form}_{group}",
            lambda g, f=form, n=group: head_arguments(g, activations(g, 0, 16), 16, f, n),
        )
        yield (
            f"leading_dims_{form}_{group}",
            lambda g, f=form, n=group: head_arguments(
                g, strided(activations(g, 2, 3, 33)), 5, f, n
            ),
        )
    yield "no_out_features", lambda g: (
        activations(g, 2, 64), *quantized_head(g, 32, 64, "int4", 64),
    )  # fmt: skip


def _embedding() -> Built:
    for weight in FLOATS:
        yield _name(weight), lambda g, w=weight: (
            torch.tensor([[3, 0], [18, 3]]), torch.randn(19, 70, generator=g).to(w),
        )  # fmt: skip
    for form, group in HEAD_FORMATS:
        yield f"{form}_{group}", lambda g, f=form, n=group: (
            torch.tensor([36, 0, 17, 36]), *quantized_head(g, 37, 300, f, n), 37, 300,
        )  # fmt: skip
    yield "scalar", lambda g: (torch.tensor(2), torch.randn(5, 7, generator=g))
    yield "no_ids", lambda g: (
        torch.zeros(2, 0, dtype=torch.int64), *quantized_head(g, 16, 64, "int4", 64),
    )  # fmt: skip
    yield "strided", lambda g: (torch.arange(6)[::2], *quantized_head(g, 7, 9, "int8", 128))


def _quantize_head() -> Built:
    for dtype in FLOATS:
        for form, group in HEAD_FORMATS:
            yield f"{_name(dtype)}_{form}_{group}", lambda g, d=dtype, f=form, n=group: (
                (torch.randn(37, 300, generator=g) * 0.1).to(d), f, n,
            )  # fmt: skip
    yield "default_group", lambda g: (torch.randn(3, 1, generator=g), "int4")
    yield "no_rows", lambda g: (torch.zeros(0, 9), "int8")
    yield "zeros", lambda g: (torch.zeros(2, 130), "int4", 64)
    yield "transposed", lambda g: (transposed(torch.randn(6, 130, generator=g)), "int8")


def decode_step_arguments(
    g: torch.Generator,
    *,
    layers: int = 1,
    batch: int = 2,
    tokens: int = 1,
    hidden: int = 70,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 150,
    vocab: int = 37,
    length: int = 12,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    head: tuple[str, int] | torch.dtype = torch.float32,
    weight_format: str = "canonical",
    sub_norms: bool = True,
    activation: str = "relu2",
) -> Arguments:
    query, kv = heads * head_dim, kv_heads * head_dim
    shapes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    gains = layers * (2 * hidden + (query + inner if sub_norms else 0)) + hidden
    cache = (layers, batch, kv_heads, length, head_dim)
    weights = [(random_packed(g, n, k), k) for _ in range(layers) for n, k in shapes]
    if weight_format != "canonical":
        weights = [(private(w, k, weight_format), k) for w, k in weights]
    if isinstance(head, tuple):
        head_parts: Arguments = quantized_head(g, vocab, hidden, *head)
    else:
        head_parts = (torch.randn(vocab, hidden, generator=g).to(head), None)
    return (
        activations(g, batch, tokens, hidden),
        [weight for weight, _ in weights],
        positive(g, layers, 7) / 8, gain(g, gains),
        *head_parts,
        torch.randn(*cache, generator=g).to(cache_dtype),
        (torch.randn(*cache, generator=g) + 0.5).to(cache_dtype),
        torch.randint(0, length - tokens + 1, (batch,), generator=g),
        dtype, heads, inner, vocab, sub_norms, activation, 1e-5, 10000.0, head_dim**-0.5,
    )  # fmt: skip


def _with_gaps(arguments: Arguments) -> Arguments:
    """Caches that are the first sequences of a longer batch, as KVCache.keep leaves them."""
    caches = []
    for cache in arguments[6:8]:
        wide = torch.zeros(cache.shape[0], cache.shape[1] + 2, *cache.shape[2:], dtype=cache.dtype)
        wide[:, : cache.shape[1]] = cache
        caches.append(wide[:, : cache.shape[1]])
    return (*arguments[:6], *caches, *arguments[8:])


def _decode_step() -> Built:
    for dtype in CACHE_DTYPES:
        for cache in CACHE_DTYPES:
            yield (
                f"{_name(dtype)}_over_{_name(cache)}",
                lambda g, d=dtype, c=cache: decode_step_arguments(g, dtype=d, cache_dtype=c),
            )
    yield "layers", lambda g: decode_step_arguments(g, layers=2, head=torch.bfloat16)
    for form, group in HEAD_FORMATS:
        yield (
            f"head_{form}_{group}",
            lambda g, f=form, n=group: decode_step_arguments(g, head=(f, n), tokens=2),
        )
    for form in FORMATS:
        yield form, lambda g, f=form: decode_step_arguments(g, weight_format=f)
    yield "silu", lambda g: decode_step_arguments(g, sub_norms=False, activation="silu")
    yield "several_tokens", lambda g: decode_step_arguments(g, tokens=3, batch=1)
    yield "many_sequences", lambda g: decode_step_arguments(g, batch=5, heads=3, kv_heads=3)
    yield "no_layers", lambda g: decode_step_arguments(g, layers=0)
    yield "no_batch", lambda g: decode_step_arguments(g, batch=0)
    yield "gaps", lambda g: _with_gaps(decode_step_arguments(g, layers=2))
    yield "strided", lambda g: (
        lambda x, *rest: (strided(x), *rest)
    )(*decode_step_arguments(g))  # fmt: skip


def _probe_read() -> Built:
    for n in (1, 4096, 10000):
        yield str(n), lambda g, n=n: (
            torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8),
        )  # fmt: skip


def _probe_int8_peak() -> Built:
    yield "short", lambda g: (torch.ones(1, dtype=torch.uint8), 10)


_BUILDERS: dict[str, Callable[[], Built]] = {
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
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "relu2_mul": _relu2_mul,
    "silu_and_mul": _silu_and_mul,
    "rope_table": _rope_table,
    "rope": _rope,
    "qkv_forward": _qkv_forward,
    "mlp_forward": _mlp_forward,
    "attention": _attention,
    "kv_cache_update": _kv_cache_update,
    "quantize_head": _quantize_head,
    "lm_head": _lm_head,
    "embedding": _embedding,
    "decode_step": _decode_step,
    "_probe_read": _probe_read,
    "_probe_int8_peak": _probe_int8_peak,
}

SAMPLES: dict[str, list[Sample]] = {
    op: [Sample(op, name, build) for name, build in builder()] for op, builder in _BUILDERS.items()
}
# What an op mutates, by argument index; every other op leaves its arguments alone.
MUTATED = {"kv_cache_update": (0, 1), "decode_step": (6, 7)}
ALL_SAMPLES = [sample for samples in SAMPLES.values() for sample in samples]
# Results of the probes depend on the machine by purpose; what is compared leaves them out.
# A private layout depends on the ISA by purpose; unprepack shows that it holds the same weights.
COMPARABLE_SAMPLES = [
    sample
    for sample in ALL_SAMPLES
    if not sample.op.startswith("_probe") and sample.op != "prepack"
]


def results(returned: Any, args: Arguments, op: str) -> list[Tensor]:
    """Everything an op call has produced: its returned tensors and the tensors it mutated."""
    if returned is None:
        produced: list[Tensor] = []
    elif isinstance(returned, Tensor):
        produced = [returned]
    else:
        produced = list(returned)
    return produced + [args[index] for index in MUTATED.get(op, ())]
