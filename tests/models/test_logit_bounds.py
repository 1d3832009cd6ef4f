"""Bounds of an int8 head's logits by the high bytes of several tokens: every greedy step, and every
draw without filters, takes the tokens that the whole head gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.head import HeadWeight
from isa_control import ISAS, every_configuration

STEPS = 10_000


class Head:
    """A program of a head behind attention that adds zeros."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        rows, k = weight.shape
        self.rows = rows
        tensors = {
            "final.weight": torch.ones(k),
            "embed.weight": weight,
            "embed.scale": scale,
        }
        tensors["rope.inv_freq"] = torch.ones(8)
        for name, n, width in (("q", 16, k), ("k", 16, k), ("v", 16, k), ("o", k, 16)):
            tensors[f"{name}.weight"] = ops.pack(torch.zeros(n, width, dtype=torch.int8))
            tensors[f"{name}.weight_scale"] = torch.zeros(1)
        text = (
            f"model hidden={k} dtype=float32 eps=1e-05\n"
            "rope name=all dim=16 inv_freq=rope.inv_freq\n"
            "attention norm=final q=q k=k v=v o=o heads=1 kv_heads=1 head_dim=16 rope=all scale=1\n"
            f"head norm=final weight=embed vocab={rows}\n"
        )
        self.handle = ops.bind_program(text, "\n".join(tensors), list(tensors.values()))
        self.tensors = tensors

    def step(self, x: Tensor, largest: int = 1, draws: Tensor | None = None) -> Tensor:
        """Logits [M, V] of x [M, k], each a sequence of its own."""
        tokens = torch.arange(len(x))
        pools = [torch.zeros(1, len(x), 4, 1, 16) for _ in range(2)]
        starts, zeros = torch.arange(len(x) + 1), torch.zeros_like(tokens)
        return ops.model_step(
            x, self.handle, pools, zeros, 4 * tokens, starts, zeros + 1, tokens[:, None], tokens,
            self.rows, largest=largest, draws=draws,
        )  # fmt: skip


def tokens_of(logits: Tensor, draws: Tensor | None = None) -> list[int]:
    """The engine's choices without filters; -1 for a row without a distribution."""
    zeros = torch.zeros(len(logits), dtype=torch.float64)
    none, one = torch.zeros(len(logits), dtype=torch.int64), torch.ones_like(zeros)
    temperatures, uniforms = (zeros, zeros) if draws is None else draws.unbind(1)
    return ops.sample_tokens(logits, temperatures, none, one, zeros, uniforms).tolist()


def draws_of(g: torch.Generator, count: int) -> Tensor:
    """Temperature and uniform of each row; every seventh is greedy."""
    chosen = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.5, 1e-30, 0.7])
    temperatures = chosen[torch.arange(count) % len(chosen)].double()
    return torch.stack([temperatures, torch.rand(count, dtype=torch.float64, generator=g)], 1)


def heads(g: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    random, scale = ops.quantize_head(torch.randn(1500, 200, generator=g), "int8")
    tied = random.clone()
    tied[700:1400] = tied[:700]  # equal rows with equal scales
    equal = scale.clone()
    equal[700:1400] = equal[:700]
    saturated = torch.where(torch.rand(1500, 300, generator=g) < 0.5, 127, -128).to(torch.int8)
    odd = scale.clone()
    odd[3::7] *= -1
    odd[5::11] = 0
    broken = scale.clone()
    broken[77], broken[78] = float("nan"), float("inf")
    demo = bitnet_ops.load().model.head
    assert demo.scale is not None
    return {
        "random": (random, scale),
        "tied": (tied, equal),
        "saturated": (saturated, torch.full([1500], 0.01)),
        "odd scales": (random, odd),
        "broken": (random, broken),
        "trained": (demo.weight, demo.scale),
    }


def states(g: torch.Generator, weight: Tensor, count: int) -> Tensor:
    """Noise, heavy tails, rows of the head itself, few large features, and zeros."""
    k = weight.shape[1]
    x = torch.randn(count, k, generator=g)
    x[1::4] = x[1::4] ** 3
    rows = torch.randint(len(weight), (len(x[2::4]),), generator=g)
    x[2::4] = weight[rows].float() + 30 * x[2::4]
    x[3::8, 5:] *= 1e-3
    x[7::100] = 0
    x[50::400, 0] = float("nan")
    x[51::400, 1] = float("inf")
    return x


BATCHES = (5, 8, 17, 64, 6, 16, 33, 65)  # tokens; the last has too many for bounds


def test_ten_thousand_tokens_of_batches_are_the_whole_heads() -> None:
    g = torch.Generator().manual_seed(2)
    cases = heads(g)
    for name, (weight, scale) in cases.items():
        inputs = states(g, weight, STEPS // len(cases) + 1)
        sizes = itertools.cycle(BATCHES)
        while len(inputs) > 0:
            size = next(sizes)
            x, inputs = inputs[:size], inputs[size:]
            head = Head(weight, scale)  # new, so that no step before says what to read
            whole, found = head.step(x, 0), head.step(x)
            assert tokens_of(found) == tokens_of(whole), (name, len(x))
            left = found != -torch.inf
            assert torch.equal(found[left].nan_to_num(), whole[left].nan_to_num()), name


def test_batches_are_the_whole_heads_on_every_isa_and_thread_count() -> None:
    g = torch.Generator().manual_seed(3)
    weight, scale = ops.quantize_head(torch.randn(24_000, 200, generator=g), "int8")
    weight[20_001], scale[20_001] = weight[17], scale[17]  # in parts of different threads
    x = torch.randn(16, 200, generator=g)
    x[3] = weight[17].float()  # meets the tie
    x[5, 7] = float("nan")
    whole = Head(weight, scale).step(x, 0)
    best = tokens_of(whole)
    assert best[3] == 17 and best[5] == -1
    bounded = False
    for label in every_configuration():
        found = Head(weight, scale).step(x)
        assert tokens_of(found) == best, label
        if torch.equal(found.nan_to_num(), whole.nan_to_num()):
            continue  # an ISA that does not gain by bounds
        bounded = True
        for row, token in enumerate(best):
            if token < 0:
                assert found[row].isnan().all(), label
                continue
            # nothing but the best: the same on every thread count
            assert found[row, token] == whole[row, token], label
            assert (found[row] > -torch.inf).sum() == 1, label
    assert bounded or not {"avx512_vnni", "avx_vnni", "neon_dotprod"} & set(ISAS)


def test_logits_that_are_wanted_are_all_there() -> None:
    g = torch.Generator().manual_seed(4)
    weight, scale = ops.quantize_head(torch.randn(3000, 64, generator=g), "int8")
    head = Head(weight, scale)
    x = torch.randn(16, 64, generator=g)
    assert torch.isfinite(head.step(x, 0)).all()
    assert torch.isfinite(head.step(x, 65)).all()  # more than bounds are made for


@pytest.mark.parametrize("k", [2, 20, 64])
def test_draws_of_the_largest_are_those_of_the_whole_head(k: int) -> None:
    g = torch.Generator().manual_seed(k)
    for name, (weight, scale) in heads(g).items():
        for size in (5, 17, 64):
            x = states(g, weight, size)
            head = Head(weight, scale)
            whole, found = head.step(x, 0), head.step(x, k)
            options = (
                torch.linspace(0.3, 1.5, size, dtype=torch.float64),
                torch.randint(2, k + 1, (size,), generator=g),
                torch.linspace(0.5, 1, size, dtype=torch.float64),
                torch.linspace(0, 0.2, size, dtype=torch.float64),
                torch.rand(size, dtype=torch.float64, generator=g),
            )
            drawn = ops.sample_tokens(found, *options)
            assert torch.equal(drawn, ops.sample_tokens(whole, *options)), (name, size)
            for row, logits in zip(found, whole, strict=True):
                if not logits.isnan().any():
                    minimum = logits.topk(k).values[-1]
                    assert torch.equal(row[logits >= minimum], logits[logits >= minimum]), name


def test_draws_of_the_largest_on_every_isa_and_thread_count() -> None:
    g = torch.Generator().manual_seed(5)
    weight, scale = ops.quantize_head(torch.randn(24_000, 200, generator=g), "int8")
    weight[12_000:12_040], scale[12_000:12_040] = weight[17], scale[17]  # more equals than wanted
    x = torch.randn(16, 200, generator=g)
    x[3] = weight[17].float()
    whole = Head(weight, scale).step(x, 0).topk(20)
    for label in every_configuration():
        found = Head(weight, scale).step(x, 20).topk(20)
        assert torch.equal(found.values, whole.values), label


def test_draws_without_filters_of_batches_are_the_whole_heads() -> None:
    g = torch.Generator().manual_seed(7)
    for name, (weight, scale) in heads(g).items():
        inputs, sizes = states(g, weight, 600), itertools.cycle((5, 8, 16))
        while len(inputs) > 0:
            size = next(sizes)
            x, inputs = inputs[:size], inputs[size:]
            draws = draws_of(g, len(x))
            head = Head(weight, scale)
            whole, found = head.step(x, 0), head.step(x, 1, draws)
            assert tokens_of(found, draws) == tokens_of(whole, draws), (name, size)
            left = found != -torch.inf
            assert torch.equal(found[left].nan_to_num(), whole[left].nan_to_num()), name


def test_draws_without_filters_on_every_isa_and_thread_count() -> None:
    g = torch.Generator().manual_seed(8)
    weight, scale = ops.quantize_head(torch.randn(24_000, 200, generator=g), "int8")
    weight[20_001], scale[20_001] = weight[17], scale[17]
    x = torch.randn(16, 200, generator=g)
    x[3], x[5, 7] = weight[17].float(), torch.nan
    draws = draws_of(g, 16)
    whole = Head(weight, scale).step(x, 0)
    best = tokens_of(whole, draws)
    for label in every_configuration():
        found = Head(weight, scale).step(x, 1, draws)
        assert tokens_of(found, draws) == best, label
        if not torch.equal(found.nan_to_num(), whole.nan_to_num()):  # an ISA that gains by bounds
            for row, token in enumerate(best):
                assert token >= 0 or found[row].isnan().all(), label
                # nothing but the token that is drawn: the same on every thread count
                assert token < 0 or (found[row] > -torch.inf).nonzero().flatten().tolist() == [
                    token
                ]


def test_draws_with_and_without_top_k_share_a_step() -> None:
    g = torch.Generator().manual_seed(9)
    for name, (weight, scale) in heads(g).items():
        x, draws = states(g, weight, 16), draws_of(g, 16)
        draws[::2, 0] = 0  # these want their 20 largest logits
        whole, found = (Head(weight, scale).step(x, k, draws) for k in (0, 20))
        assert tokens_of(found, draws) == tokens_of(whole, draws), name
        for row in range(0, 16, 2):
            if not whole[row].isnan().any():
                minimum = whole[row].topk(20).values[-1]
                assert torch.equal(
                    found[row, whole[row] >= minimum], whole[row, whole[row] >= minimum]
                )


def test_filters_and_logprobs_want_every_logit() -> None:
    lm = bitnet_ops.load()
    seen: list[StepBatch] = []
    step = lm.model.step

    def watched(batch: StepBatch, pool: object) -> Tensor:
        seen.append(batch)
        return step(batch, pool)  # type: ignore[arg-type]

    lm.model.step = watched  # type: ignore[method-assign]
    left_to_filters = {"temperature": 0.5, "top_p": 0.9}
    for options in ({"logprobs": 1}, left_to_filters, {"repetition_penalty": 1.5}):
        run = lm.engine.start([[5, 6, 7]], bitnet_ops.SamplingParams(**options))  # type: ignore[arg-type]
        for _ in zip(run, range(4), strict=False):
            pass
        run.close()
        assert seen and not any(batch.largest for batch in seen), options
        seen.clear()
    lm.generate("In the beginning", max_new_tokens=8)
    assert all(batch.largest == 1 and batch.draws is None for batch in seen)
    seen.clear()
    lm.generate("In the beginning", max_new_tokens=8, temperature=0.5, seed=1)
    assert all(batch.draws is not None for batch in seen)


def test_head_formats_have_their_names_and_one_has_an_old_one() -> None:
    old, new = (bitnet_ops.load(head_format=name) for name in ("int8_screened", "int8"))
    assert old.model.head.head_format == new.model.head.head_format == "int8"
    assert torch.equal(old.model.head.weight, new.model.head.weight)
    made = HeadWeight.from_dense(torch.randn(20, 70), "int8_screened")
    assert made.head_format == "int8"
    with pytest.raises(ValueError, match="head_format: expected one of int8, int4, .* got 'int6'"):
        bitnet_ops.load(head_format="int6")


def test_a_program_of_a_head_alone_runs() -> None:
    rows, k = 40, 64
    weight, scale = ops.quantize_head(torch.randn(rows, k), "int8")
    tensors = {"final.weight": torch.ones(k), "embed.weight": weight, "embed.scale": scale}
    text = f"model hidden={k} dtype=float32 eps=1e-05\nhead norm=final weight=embed vocab={rows}\n"
    handle = ops.bind_program(text, "\n".join(tensors), list(tensors.values()))
    x, zero = torch.randn(1, k), torch.zeros(1, dtype=torch.int64)
    one, table = torch.ones(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    pools = [torch.zeros(0, 1, 4, 1, 16) for _ in range(2)]
    got = ops.model_step(x, handle, pools, zero, zero, torch.tensor([0, 1]), one, table, zero, rows)
    want = ops.lm_head(ops.rms_norm(x, torch.ones(k), 1e-5), weight, scale, (rows, k))
    assert torch.equal(got, want)
