"""Output heads in int8 and int4: exact sums, errors within half a step, poison, storage, models.

Equality with the reference, over ISAs, threads and batches, is for the tests of the catalogue
(test_ops.py, test_bit_identity.py); here are extremes, plain float64 answers and HeadWeight.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.storage import HEAD_FORMATS
from bounds import U, assert_equal, assert_within
from hf_writer import make_network
from op_values import activations
from tiny_models import SMALL, random_ids, tensors_of, tiny_model

QUANTISED = [("int8", 128), ("int4", 64), ("int4", 128)]


def int4_weight(code: int, v: int, k: int) -> Tensor:
    """Every code the same, padding aside, which here there is none of."""
    return torch.full((v // 16, k // 8, 64), (code + 8) * 17, dtype=torch.uint8)


@pytest.mark.parametrize("tokens", [1, 4, 5])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("code", [127, -128])
def test_int8_sums_are_exact_at_the_extremes(code: int, sign: float, tokens: int, isa: str) -> None:
    for k in (4096, 32768, 65536):
        weight, scale = torch.full((3, k), code, dtype=torch.int8), torch.ones(3)
        x = torch.full((tokens, k), sign * 32512.0)  # a scale of exactly 1
        expected = torch.full((tokens, 3), float(code * int(sign) * 32512 * k), dtype=torch.float64)
        assert_equal(ops.lm_head(x, weight, scale), expected.float(), f"K={k}")


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("code", [7, -8])
def test_int4_sums_are_exact_at_the_extremes(code: int, group: int, isa: str) -> None:
    for k in (4096, 32768):
        scale = torch.ones(2, k // group, 16, dtype=torch.bfloat16)
        # a power of two as activation keeps every partial sum a float32 number
        x = torch.full((3, k), 16384.0)
        x[:, 0] = 32512.0
        expected = float(code * (16384 * (k - 1) + 32512))
        logits = ops.lm_head(x, int4_weight(code, 32, k), scale)
        assert_within(
            logits, torch.full((3, 32), expected), torch.full((3, 32), abs(expected) * k * U)
        )


@pytest.mark.parametrize(("form", "group"), QUANTISED)
@pytest.mark.parametrize(("v", "k"), [(1, 1), (17, 33), (40, 640), (5, 4097)])
def test_rows_are_within_half_a_step_and_logits_within_the_sum_of_them(
    form: str, group: int, v: int, k: int, rng: torch.Generator
) -> None:
    weight = torch.randn(v, k, generator=rng) * torch.logspace(-3, 3, v)[:, None]
    head = HeadWeight.from_dense(weight, form, group)
    rows = head.embed(torch.arange(v))
    assert head.scale is not None
    if form == "int8":
        step = head.scale[:, None].expand(v, k)
    else:
        by_row = head.scale.transpose(1, 2).reshape(-1, head.scale.shape[1]).float()
        step = by_row.repeat_interleave(group, dim=1)[:v, :k]
    # The bfloat16 scale may be half an ulp below absmax / 7, so that the last code is clipped.
    clipped = 7 * 2.0**-8 if form == "int4" else 0.0
    error = step.double() * (0.5 + clipped + 128 * 4 * U)
    assert_within(rows, weight, error)
    x = activations(rng, 3, k)
    half_step_of_x = x.double().abs().amax(-1, keepdim=True) / 32512 * 0.501
    bound = x.double().abs() @ error.T + half_step_of_x * (rows.double().abs().sum(-1)[None])
    exact = x.double() @ weight.double().T
    rounding = (x.double().abs() @ rows.double().abs().T) * (k // 64 + 8) * U
    assert_within(head(x), exact.float(), bound + rounding + exact.abs() * U)


@pytest.mark.parametrize(("form", "group"), QUANTISED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_poisoned_token_has_nan_for_every_logit_and_spares_the_others(
    form: str, group: int, poison: float, isa: str, rng: torch.Generator
) -> None:
    head = HeadWeight.from_dense(torch.randn(37, 100, generator=rng), form, group)
    clean = activations(rng, 5, 100)
    x = clean.clone()
    x[2, 99] = poison
    logits = head(x)
    assert bool(logits[2].isnan().all())
    others = [0, 1, 3, 4]
    assert_equal(logits[others], head(clean)[others])


@pytest.mark.parametrize(("form", "group"), QUANTISED)
def test_extreme_activations_neither_overflow_nor_vanish(form: str, group: int, isa: str) -> None:
    head = HeadWeight.from_dense(torch.ones(16, 64), form, group)
    for magnitude in (1e-38, 1e-30, 1e-20, 1.0, 1e30, 5e36):
        logits = head(torch.full((1, 64), magnitude))
        expected = 64.0 * magnitude
        # Below 1e-30 a token is counted in steps of 1e-30 / 32512.
        error = max(expected * 2e-2, 64 * 1e-30 / 32512)
        assert float((logits.double() - expected).abs().max()) <= error, magnitude
    assert_equal(head(torch.zeros(2, 64)), torch.zeros(2, 16))


@pytest.mark.parametrize("head_format", HEAD_FORMATS)
def test_a_head_and_its_embedding_are_one_storage(head_format: str, rng: torch.Generator) -> None:
    weight = torch.randn(35, 70, generator=rng).to(torch.bfloat16)
    head = HeadWeight.from_dense(weight, head_format)
    rows = head.embed(torch.arange(35))
    x = torch.eye(70)  # picks the columns; 1.0 becomes 32512 steps
    assert_within(head(x).T, rows, rows.double().abs() * 8 * U)
    assert head.head_format == ("bf16" if head_format == "stored" else head_format)
    shared = head.weight.data_ptr() == weight.data_ptr()
    assert shared == (head_format in ("stored", "bf16"))


@pytest.mark.parametrize("head_format", [h for h, row in HEAD_FORMATS.items() if row.quantized])
def test_casting_and_copying_a_model_leave_a_quantised_head_alone(
    head_format: str, rng: torch.Generator
) -> None:
    head = HeadWeight.from_dense(torch.randn(35, 70, generator=rng), head_format)
    x = activations(rng, 2, 70)
    expected = head(x)
    for other in (head.float(), head.bfloat16(), head.half(), copy.deepcopy(head)):
        assert_equal(other(x), expected)
    fresh = HeadWeight.from_dense(torch.zeros(35, 70), head_format)
    fresh.load_state_dict(head.state_dict())
    assert_equal(fresh(x), expected)


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("head_format", HEAD_FORMATS)
def test_a_model_with_any_head_decodes_as_it_prefills(name: str, head_format: str) -> None:
    family = SMALL[name]
    tensors = tensors_of(family, make_network(family))
    model = bitnet_ops.models.build(tiny_model(family).config, tensors, head_format=head_format)
    assert model.head.head_format in (head_format, "bf16", "float32", "float16")
    ids = random_ids(4, 2, 6)
    with torch.inference_mode():
        whole = model(ids, KVCache(model.config, 2, 6))
        cache = KVCache(model.config, 2, 6)
        steps = torch.cat([model(ids[:, t : t + 1], cache) for t in range(6)], dim=1)
    assert_equal(steps, whole)


def test_an_untied_embedding_stays_as_stored() -> None:
    name = next(n for n, f in SMALL.items() if not tiny_model(f).config.tie_word_embeddings)
    tensors = tensors_of(SMALL[name], make_network(SMALL[name]))
    model = bitnet_ops.models.build(tiny_model(SMALL[name]).config, tensors, head_format="int8")
    assert model.head.head_format == "int8"
    assert model.model.embed_tokens.weight is tensors["model.embed_tokens.weight"]


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"head_format: expected one of int8.*got 'fp8'"):
        HeadWeight.from_dense(torch.zeros(2, 2), "fp8")
