"""Attention over long contexts: a plain float64 softmax as the oracle, and the same bits however
the work is split: into chunks of positions, blocks of tokens, calls, threads, ISAs, batches. In a
sliding window nothing of what lies before it takes part, whatever it holds.

Small shapes and dtypes are test_op_oracles.py's matter, rejections test_op_errors.py's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitnet_ops.nn.kv_config import KV_DTYPES
from bitnet_ops.nn.kv_pool import attend_rectangular as attend
from bounds import EXP_ERROR, U, assert_equal, storing_error, sum_error
from isa_control import every_configuration, forced_isa, torch_threads
from op_values import SCALED_KV_DTYPES, Arguments
from ops_attention import (
    BF16_MIN,
    attention_arguments,
    bfloat16_error,
    int8_attention_bound,
    with_window,
)

CHUNK = 64  # positions, as kernel_table.h defines the arithmetic
# Around 16 lanes, around one, two and four chunks, and far beyond.
CONTEXTS = (1, 15, 16, 17, 63, 64, 65, 127, 129, 255, 256, 257, 1000, 8192)
HEAD_DIMS = (64, 80, 96, 100, 128, 256)
CACHES = tuple(KV_DTYPES.values())
LENGTH = 420
WINDOWS = (7, 64, 100)  # less than a chunk of 64 positions, one, and more


def exact(args: Arguments) -> tuple[Tensor, Tensor]:
    """float64 softmax(scale * q k^T) v, and how far float32 arithmetic may lie from it."""
    query, keys, values, starts, scale, *factors = args
    if factors:  # int8: the same for the numbers that the codes stand for, and what 16 bits lose
        keys, values = (c.double() * f[..., None] for c, f in zip(args[1:3], factors, strict=True))
        result, _ = exact((query, keys, values, starts, scale))
        return result, int8_attention_bound(args, result.to(query.dtype))
    batch, tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    result = torch.empty(query.shape, dtype=torch.float64)
    bound = torch.empty(query.shape, dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            length = int(starts[b]) + t + 1
            k = keys[b, :, :length].double().repeat_interleave(group, dim=0)
            v = values[b, :, :length].double().repeat_interleave(group, dim=0)
            q = query[b, t].double()
            scores = torch.einsum("hd,hld->hl", q, k) * scale
            weights = torch.softmax(scores, dim=-1)
            result[b, t] = torch.einsum("hl,hld->hd", weights, v)
            # Relative error of a weight: its score, the difference to the maximum, exp; then a
            # merge for each further chunk, an exp of a difference of maxima and two roundings.
            magnitude = torch.einsum("hd,hld->hl", q.abs(), k.abs()).amax(-1) * abs(scale)
            spread = scores.amax(-1) - scores.amin(-1)
            merges = -(-length // CHUNK) - 1
            weight = 2 * magnitude * (sum_error(dim) + U) + 2 * U * spread
            weight = weight + (1 + merges) * (EXP_ERROR + 2 * U)
            # Numerator: `length` roundings in one lane; denominator: a sum in lanes; the quotient.
            relative = 2 * weight + length * U + sum_error(length) + 2 * U
            heavy = torch.einsum("hl,hld->hd", weights, v.abs())
            # Weights below e^-87 are e^-87.
            floor = length * 2.0**-125 * v.abs().amax(1)
            if keys.dtype == torch.bfloat16:
                relative = relative + bfloat16_error(magnitude)
                floor = floor + length * BF16_MIN * v.abs().amax(1)
            bound[b, t] = 1.01 * relative[:, None] * heavy + floor
    return result, bound + storing_error(query.dtype) * result.abs()


def check(args: Arguments, message: str = "") -> None:
    want, bound = exact(args)
    error = (attend(*args).double() - want).abs()
    assert bool((error <= bound).all()), (
        f"{message}: {float((error / bound).max()):.2f} of the bound"
    )


def at_position(args: Arguments, start: int) -> Arguments:
    return (*args[:3], torch.full_like(args[3], start), *args[4:])


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
def test_decode_at_every_context(
    context: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    args = attention_arguments(
        rng, batch=1, tokens=1, heads=4, kv_heads=1, length=context, head_dim=128, cache_dtype=cache
    )
    check(at_position(args, context - 1))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_every_group_and_head_dim(
    group: int, head_dim: int, isa: str, rng: torch.Generator
) -> None:
    for cache in CACHES:
        for tokens, start in ((1, 99), (20, 51)):
            args = attention_arguments(
                rng, batch=1, tokens=tokens, heads=2 * group, kv_heads=2, length=100,
                head_dim=head_dim, cache_dtype=cache,
            )  # fmt: skip
            check(at_position(args, start), f"{cache} {tokens} tokens")


@pytest.mark.parametrize("cache", CACHES[1:], ids=str)
@pytest.mark.parametrize("start", [0, 50, 64])
@pytest.mark.parametrize("tokens", [2, 17, 64, 65, 130, 300])
def test_prefill(
    tokens: int, start: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    args = attention_arguments(
        rng, batch=1, tokens=tokens, heads=4, kv_heads=1, length=364, head_dim=64,
        cache_dtype=cache,
    )  # fmt: skip
    check(at_position(args, start))


def test_scores_far_apart(isa: str, rng: torch.Generator) -> None:
    query, *rest = attention_arguments(rng, batch=1, tokens=3, length=300, head_dim=32)
    check(at_position((query * 60, *rest), 290))


def long_arguments(rng: torch.Generator, tokens: int, **changes: object) -> Arguments:
    shape = {"batch": 2, "heads": 10, "kv_heads": 2, "length": LENGTH, "head_dim": 40, **changes}
    shape.setdefault("cache_dtype", torch.bfloat16)
    args = attention_arguments(rng, tokens=tokens, **shape)
    starts = torch.tensor([LENGTH - tokens, 150 - tokens // 2][: args[0].shape[0]])
    return (*args[:3], starts, *args[4:])


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "window"),
    [(1, 0), (3, 0), (40, 0), (120, 0), (1, 10), (40, 10), (1, 130), (40, 130)],
)
def test_every_isa_and_thread_count_gives_the_same_bits(
    tokens: int, window: int, cache: torch.dtype, rng: torch.Generator
) -> None:
    args = with_window(long_arguments(rng, tokens, cache_dtype=cache), window)
    with forced_isa("scalar"), torch_threads(1):
        expected = attend(*args)
    for configuration in every_configuration():
        assert_equal(attend(*args), expected, configuration)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("window", [0, *WINDOWS])
def test_neither_calls_nor_batches_matter(
    window: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    """Prefill at once, in uneven chunks, token by token, and each sequence alone."""
    args = with_window(long_arguments(rng, 120, cache_dtype=cache), window)
    query, keys, values, starts, scale, *factors, _ = args
    whole = attend(*args)
    for sizes in ((1,) * 120, (7, 64, 1, 48), (119, 1)):
        parts, first = [], 0
        for size in sizes:
            piece = query[:, first : first + size]
            parts.append(attend(piece, keys, values, starts + first, scale, *factors, window))
            first += size
        assert_equal(torch.cat(parts, dim=1), whole, str(sizes[:3]))
    for b in range(2):
        scales = [None if factor is None else factor[b : b + 1] for factor in factors]
        alone = attend(*(arg[b : b + 1] for arg in args[:4]), scale, *scales, window)
        assert_equal(alone[0], whole[b], f"sequence {b}")


def test_room_in_the_cache_does_not_matter(isa: str, rng: torch.Generator) -> None:
    query, keys, values, starts, scale = long_arguments(rng, 3)
    padding = torch.full((2, 2, 77, 40), torch.nan, dtype=torch.bfloat16)
    expected = attend(query, keys, values, starts, scale)
    roomy = (torch.cat([cache, padding], dim=2) for cache in (keys, values))
    assert_equal(attend(query, *roomy, starts, scale), expected)


@pytest.mark.parametrize("tokens", [1, 30])
def test_positions_that_score_minus_infinity_weigh_nothing(
    tokens: int, isa: str, rng: torch.Generator
) -> None:
    """Whole chunks of them too, the first or in the middle; all of them: NaN, as 0 / 0."""
    query, keys, values, starts, scale = at_position(
        attention_arguments(rng, batch=1, tokens=tokens, length=300, head_dim=32), 260
    )
    query = query.abs() + 0.1
    for hidden in (slice(0, 64), slice(64, 200), slice(10, 20)):
        dark = keys.clone()
        dark[:, :, hidden] = -torch.inf
        out = attend(query, dark, values, starts, scale)
        want = torch.nn.functional.scaled_dot_product_attention(
            query.double().transpose(1, 2),
            dark.double()[:, :, : 260 + tokens].repeat_interleave(2, dim=1),
            values.double()[:, :, : 260 + tokens].repeat_interleave(2, dim=1),
            attn_mask=torch.ones(tokens, 260 + tokens, dtype=torch.bool).tril(260),
            scale=scale,
        ).transpose(1, 2)
        assert bool(out.isfinite().all())
        assert float((out - want).abs().max()) < 1e-4
    all_dark = torch.full_like(keys, -torch.inf)
    assert bool(attend(query, all_dark, values, starts, scale).isnan().all())


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_head_that_scores_minus_infinity_leaves_its_neighbours_alone(
    tokens: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    """Heads of a group have their softmax taken side by side; to one of them, by overflow, a whole
    chunk weighs nothing, and what is left it weighs equally."""
    args = attention_arguments(
        rng, batch=1, tokens=tokens, heads=4, kv_heads=1, length=2 * CHUNK, head_dim=32,
        cache_dtype=cache,
    )  # fmt: skip
    query, keys, values, starts, scale, *factors = at_position(args, 2 * CHUNK - tokens)
    query[:, :, 2] = 1e38
    keys[:, :, :CHUNK] = -100 if cache == torch.int8 else -1
    keys[:, :, CHUNK:] = 0
    out = attend(query, keys, values, starts, scale, *factors)
    for head in range(4):
        alone = attend(query[:, :, head : head + 1], keys, values, starts, scale, *factors)
        assert_equal(out[:, :, head : head + 1], alone, f"head {head}")
    seen = values.double() * factors[1][..., None] if factors else values.double()
    for t in range(tokens):
        left = seen[0, 0, CHUNK : 2 * CHUNK - tokens + t + 1]
        error = float((out[0, t, 2].double() - left.mean(0)).abs().max())
        assert error <= 2.0**-12 * float(left.abs().max())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_position_reaches_the_tokens_that_see_it(
    poison: float, isa: str, rng: torch.Generator
) -> None:
    query, keys, values, starts, scale = at_position(
        attention_arguments(rng, batch=1, tokens=40, length=200, head_dim=32), 100
    )
    clean = attend(query, keys, values, starts, scale)
    keys[:, :, 129] = poison  # token 29; inf meets both signs of a query, so it is NaN as well
    dirty = attend(query, keys, values, starts, scale)
    assert_equal(dirty[:, :29], clean[:, :29])
    assert bool(dirty[:, 29:].isnan().all())


# Sliding windows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_window_that_reaches_back_to_the_first_position_changes_nothing(
    cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    args = with_window(long_arguments(rng, 120, cache_dtype=cache), 0)
    expected = attend(*args)
    for window in (LENGTH, LENGTH + 1, 2**63 - 1):
        assert_equal(attend(*args[:-1], window), expected, str(window))


def spoilt(cache: Tensor, scale: Tensor | None, at: slice) -> tuple[Tensor, Tensor | None]:
    """Copies that hold no numbers at positions `at` of the first sequence."""
    cache = cache.clone()
    if cache.dtype in SCALED_KV_DTYPES:
        assert scale is not None
        scale = scale.clone()
        cache[0, :, at], scale[0, :, at] = 77, torch.inf
    else:
        cache[0, :, at] = torch.nan
    return cache, scale


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_what_lies_before_the_window_takes_no_part(
    tokens: int, window: int, cache: torch.dtype, isa: str, rng: torch.Generator
) -> None:
    args = with_window(long_arguments(rng, tokens, cache_dtype=cache), window)
    query, keys, values, starts, scale, key_scale, value_scale, _ = args
    clean = attend(*args)
    first = LENGTH - tokens  # of the first sequence's tokens
    for token in {0, tokens // 2, tokens - 1}:
        seen = first + token + 1 - window  # the first position that this token sees
        keys_too, key_scales = spoilt(keys, key_scale, slice(0, seen))
        values_too, value_scales = spoilt(values, value_scale, slice(0, seen))
        dirty = attend(query, keys_too, values_too, starts, scale, key_scales, value_scales, window)
        assert_equal(dirty[0, token:], clean[0, token:], f"token {token}")
        assert_equal(dirty[1], clean[1])
        assert bool(dirty[0, :token].isnan().all()), "they see a position without a number"
