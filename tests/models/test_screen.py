"""Bounds of an int8 head's logits, by its screen or by upper bytes of several tokens: every greedy
step, and every draw without filters, takes the tokens that the whole head gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops import ops
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.screen import screen_of
from isa_control import ISAS, every_configuration

STEPS = 10_000


class Head:
    """A program of a head with a screen, behind attention that adds zeros."""

    def __init__(self, weight: Tensor, scale: Tensor, screen: Tensor | None) -> None:
        rows, k = weight.shape
        self.rows = rows
        tensors = {
            "final.weight": torch.ones(k),
            "embed.weight": weight,
            "embed.scale": scale,
            **({} if screen is None else {"embed.screen": screen}),
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


def test_ten_thousand_steps_take_the_whole_heads_token() -> None:
    g = torch.Generator().manual_seed(0)
    cases = heads(g)
    for name, (weight, scale) in cases.items():
        # two programs by turns: neither step knows how many rows remained before
        plain, screened, remaining = (
            Head(weight, scale, None),
            Head(weight, scale, screen_of(weight)),
            0,
        )
        for x in states(g, weight, STEPS // len(cases) + 1):
            whole, found = plain.step(x[None], 0), screened.step(x[None])
            assert tokens_of(found) == tokens_of(whole), name
            left = found != -torch.inf
            assert torch.equal(found[left].nan_to_num(), whole[left].nan_to_num()), name
            remaining += int(left.sum())
        assert remaining < 0.2 * (STEPS // len(cases)) * plain.rows, name


def test_tokens_are_the_whole_heads_on_every_isa_and_thread_count() -> None:
    g = torch.Generator().manual_seed(1)
    weight, scale = ops.quantize_head(torch.randn(24_000, 200, generator=g), "int8")
    weight[20_001] = weight[17]  # in parts of different threads
    scale[20_001] = scale[17]
    screen = screen_of(weight)
    inputs = [*torch.randn(6, 200, generator=g), weight[17].float()]  # the last meets the tie
    whole = [Head(weight, scale, None).step(x[None], 0) for x in inputs]
    for label in every_configuration():
        head = Head(weight, scale, screen)
        for x, logits in zip(inputs, whole, strict=True):
            found = head.step(x[None])
            left = found != -torch.inf
            assert tokens_of(found) == tokens_of(logits), label
            assert torch.equal(found[left], logits[left]), label
            assert not left.all(), label
    assert tokens_of(whole[-1]) == [17]


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
            head = Head(weight, scale, None)  # new, so that no step before says what to read
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
    whole = Head(weight, scale, None).step(x, 0)
    best = tokens_of(whole)
    assert best[3] == 17 and best[5] == -1
    bounded = False
    for label in every_configuration():
        found = Head(weight, scale, None).step(x)
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
    head = Head(weight, scale, None)
    x = torch.randn(16, 64, generator=g)
    assert torch.isfinite(head.step(x, 0)).all()
    assert torch.isfinite(head.step(x, 65)).all()  # more than bounds are made for


@pytest.mark.parametrize("k", [2, 20, 64])
def test_draws_of_the_largest_are_those_of_the_whole_head(k: int) -> None:
    g = torch.Generator().manual_seed(k)
    for name, (weight, scale) in heads(g).items():
        for size in (5, 17, 64):
            x = states(g, weight, size)
            head = Head(weight, scale, None)
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
                    least = logits.topk(k).values[-1]
                    assert torch.equal(row[logits >= least], logits[logits >= least]), name


def test_draws_of_the_largest_on_every_isa_and_thread_count() -> None:
    g = torch.Generator().manual_seed(5)
    weight, scale = ops.quantize_head(torch.randn(24_000, 200, generator=g), "int8")
    weight[12_000:12_040], scale[12_000:12_040] = weight[17], scale[17]  # more equals than wanted
    x = torch.randn(16, 200, generator=g)
    x[3] = weight[17].float()
    whole = Head(weight, scale, None).step(x, 0).topk(20)
    for label in every_configuration():
        found = Head(weight, scale, None).step(x, 20).topk(20)
        assert torch.equal(found.values, whole.values), label


def test_draws_without_filters_by_a_screen_are_the_whole_heads() -> None:
    g = torch.Generator().manual_seed(6)
    cases = heads(g)
    for name, (weight, scale) in cases.items():
        plain, screened = Head(weight, scale, None), Head(weight, scale, screen_of(weight))
        inputs = states(g, weight, 500)
        left_out = 0
        for x, draw in zip(inputs, draws_of(g, len(inputs)), strict=True):
            whole, found = plain.step(x[None], 0), screened.step(x[None], 1, draw[None])
            assert tokens_of(found, draw[None]) == tokens_of(whole, draw[None]), name
            left = found != -torch.inf
            assert torch.equal(found[left].nan_to_num(), whole[left].nan_to_num()), name
            left_out += int((~left).sum())
        assert left_out > 0.3 * len(inputs) * plain.rows, name


def test_draws_without_filters_of_batches_are_the_whole_heads() -> None:
    g = torch.Generator().manual_seed(7)
    for name, (weight, scale) in heads(g).items():
        inputs, sizes = states(g, weight, 600), itertools.cycle((5, 8, 16))
        while len(inputs) > 0:
            size = next(sizes)
            x, inputs = inputs[:size], inputs[size:]
            draws = draws_of(g, len(x))
            head = Head(weight, scale, None)
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
    whole = Head(weight, scale, None).step(x, 0)
    best = tokens_of(whole, draws)
    for label in every_configuration():
        found = Head(weight, scale, None).step(x, 1, draws)
        assert tokens_of(found, draws) == best, label
        if not torch.equal(found.nan_to_num(), whole.nan_to_num()):  # an ISA that gains by bounds
            for row, token in enumerate(best):
                assert token >= 0 or found[row].isnan().all(), label
                # nothing but the token that is drawn: the same on every thread count
                assert token < 0 or (found[row] > -torch.inf).nonzero().flatten().tolist() == [
                    token
                ]
        one = Head(weight, scale, screen_of(weight)).step(x[4:5], 1, draws[4:5])
        assert tokens_of(one, draws[4:5]) == best[4:5], label


def test_draws_with_and_without_top_k_share_a_step() -> None:
    g = torch.Generator().manual_seed(9)
    for name, (weight, scale) in heads(g).items():
        x, draws = states(g, weight, 16), draws_of(g, 16)
        draws[::2, 0] = 0  # these want their 20 largest logits
        whole, found = (Head(weight, scale, None).step(x, k, draws) for k in (0, 20))
        assert tokens_of(found, draws) == tokens_of(whole, draws), name
        for row in range(0, 16, 2):
            if not whole[row].isnan().any():
                least = whole[row].topk(20).values[-1]
                assert torch.equal(found[row, whole[row] >= least], whole[row, whole[row] >= least])


def test_a_screen_is_what_its_layout_says() -> None:
    g = torch.Generator().manual_seed(1)
    w = torch.randint(-128, 128, (5, 300), generator=g, dtype=torch.int8)
    screen = screen_of(w)
    assert screen_of(w) is screen
    lines = screen[: 5 * 96].view(torch.uint8).view(5, 2, 3, 64)
    last = sum((lines[:, :, j] >> 6) << 2 * j for j in range(3))
    codes = torch.cat([lines & 63, last[:, :, None]], dim=2).view(5, 512)
    assert torch.equal(codes[:, :300].to(torch.int16) - 32, w.to(torch.int16) >> 2)
    assert (codes[:, 300:] == 32).all()
    assert screen[5 * 96 :].tolist() == ((w & 3) % 3 == 0).sum(1).tolist()
    w[0, 0] += 4
    assert screen_of(w) is not screen


def test_greedy_texts_are_the_same_and_a_changed_head_is_seen() -> None:
    plain, screened = bitnet_ops.load(), bitnet_ops.load(head_format="int8_screened")
    assert screened.model.head.head_format == "int8_screened"
    for options in ({}, {"repetition_penalty": 1.2}, {"temperature": 0.8, "seed": 3}):
        texts = [lm.generate("In the beginning", max_new_tokens=40, **options)  # type: ignore[arg-type]
                 for lm in (plain, screened)]  # fmt: skip
        assert texts[0] == texts[1]
    for lm in (plain, screened):
        with torch.no_grad():
            lm.model.head.weight.copy_(lm.model.head.weight.flip(0))
    texts = [lm.generate("In the beginning", max_new_tokens=20) for lm in (plain, screened)]
    assert texts[0] == texts[1]


def test_only_steps_of_one_best_token_leave_logits_out() -> None:
    lm = bitnet_ops.load(head_format="int8_screened")
    seen: list[tuple[StepBatch, bool]] = []
    step = lm.model.step

    def watched(batch: StepBatch, pool: object) -> Tensor:
        logits = step(batch, pool)  # type: ignore[arg-type]
        seen.append((batch, bool((logits == -torch.inf).any())))
        return logits

    lm.model.step = watched  # type: ignore[method-assign]
    left_to_filters = {"temperature": 0.5, "top_p": 0.9}
    for options in ({"logprobs": 1}, left_to_filters, {"repetition_penalty": 1.5}):
        run = lm.engine.start([[5, 6, 7]], bitnet_ops.SamplingParams(**options))  # type: ignore[arg-type]
        for _ in zip(run, range(4), strict=False):
            pass
        run.close()
        assert not any(left_out for _, left_out in seen), options
    lm.generate("In the beginning", max_new_tokens=8)
    assert any(left_out for batch, left_out in seen if batch.largest == 1)
    seen.clear()
    lm.generate("In the beginning", max_new_tokens=8, temperature=0.5, seed=1)
    assert any(left_out for batch, left_out in seen if batch.draws is not None)


def test_wrong_screens_and_formats_are_rejected() -> None:
    w, scale = ops.quantize_head(torch.randn(20, 70), "int8")
    with pytest.raises(RuntimeError, match=r"expected embed.screen .*int32"):
        Head(w, scale, screen_of(w).float())
    with pytest.raises(RuntimeError, match=r"expected embed.screen .*\[980\], got \[979\]"):
        Head(w, scale, screen_of(w)[1:])
    with pytest.raises(ValueError, match="head_format: expected one of int8, int8_screened, "):
        bitnet_ops.load(head_format="int6")
    assert HeadWeight.from_dense(torch.randn(20, 70), "int8").head_format == "int8"


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
