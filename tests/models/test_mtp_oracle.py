"""The two references of draft heads (helpers/mtp_oracle.py): that they agree, and see.

What is compared with them is ours; here they are compared with each other, over the states of
transformers' own trunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import hybrids
import mtp
import mtp_oracle
from mtp_oracle import Plain, Transformers

TOKENS = 300
AGREE = 1e-5  # of the largest value: what float32 leaves of transformers' products
CASES = ("plain", "square", "rotated")


@functools.cache
def prompt(case: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h_t [T, H], embedding of token t + 1, the table [V, H], the output head [V, H])."""
    made = hybrids.make(case, layers=4)
    model = hybrids.transformers_model(made)
    ids = torch.randint(0, 300, (TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = model.model(input_ids=ids[None, :-1]).last_hidden_state[0]
    table = model.get_input_embeddings().weight.detach()
    return states, table[ids[1:]], table, model.get_output_embeddings().weight.detach().double()


@functools.cache
def head(case: str) -> dict[str, np.ndarray]:
    return mtp.plain(mtp.make(hybrids.make(case, layers=4)))


def shape(case: str) -> mtp_oracle.Shape:
    return mtp_oracle.shape_of(hybrids.make(case, layers=4))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


POSITIONS = torch.arange(1, TOKENS + 1)


@pytest.mark.parametrize("case", CASES)
def test_both_give_the_same_over_a_prompt(case: str) -> None:
    hidden, embedded, _, output = prompt(case)
    outputs = [
        mtp_oracle.run(kind(head(case), shape(case)), hidden, embedded, POSITIONS)
        for kind in (Plain, Transformers)
    ]
    assert relative(outputs[1].before, outputs[0].before) < AGREE
    assert relative(outputs[1].after, outputs[0].after) < AGREE
    assert relative(outputs[1].after @ output.T, outputs[0].after @ output.T) < AGREE


def test_both_place_images_alike() -> None:
    """Three positions a token: 40 words, an image of 6 x 10 patches' rows, words again."""
    hidden, embedded, _, _ = prompt("plain")
    rows, columns = 6, 10
    at = torch.arange(40)
    image = torch.stack([torch.full((rows * columns,), 40),
                         40 + torch.arange(rows).repeat_interleave(columns),
                         40 + torch.arange(columns).repeat(rows)])  # fmt: skip
    after = 50 + torch.arange(TOKENS - 40 - rows * columns)
    positions = torch.cat([at.expand(3, -1), image, after.expand(3, -1)], dim=1)
    plain, theirs = (kind(head("plain"), shape("plain")) for kind in (Plain, Transformers))
    expected = mtp_oracle.run(plain, hidden, embedded, positions)
    assert relative(mtp_oracle.run(theirs, hidden, embedded, positions).before,
                    expected.before) < AGREE  # fmt: skip
    flat = mtp_oracle.run(plain, hidden, embedded, POSITIONS)
    assert relative(flat.after, expected.after) > 1e-2


@pytest.mark.parametrize("feed", ["after", "before"])
@pytest.mark.parametrize("case", CASES)
def test_both_draft_the_same_three_tokens(case: str, feed: str) -> None:
    hidden, embedded, table, output = prompt(case)

    def steps(kind: type[Plain] | type[Transformers]) -> list[mtp_oracle.Draft]:
        return mtp_oracle.drafts(
            kind(head(case), shape(case)), hidden, embedded, POSITIONS,
            lambda token: table[token], lambda state: output @ state, feed=feed,
        )  # fmt: skip

    ours, theirs = steps(Plain), steps(Transformers)
    assert [d.token for d in ours] == [d.token for d in theirs] and len(ours) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert relative(other.logits, one.logits) < AGREE
    first = mtp_oracle.run(Plain(head(case), shape(case)), hidden, embedded, POSITIONS)
    assert torch.equal(ours[0].before, first.before[-1])


# What a wrong head would do, in the words of the reference. Every one must be seen.
Run = Callable[[mtp_oracle.Oracle, Tensor, Tensor], Tensor]


def right(oracle: mtp_oracle.Oracle, hidden: Tensor, embedded: Tensor) -> Tensor:
    return mtp_oracle.run(oracle, hidden, embedded, POSITIONS).after


def with_weights(change: Callable[[dict[str, Tensor]], None]) -> Run:
    def run(oracle: mtp_oracle.Oracle, hidden: Tensor, embedded: Tensor) -> Tensor:
        weights = dict(oracle.weights)
        change(weights)
        return right(Plain(weights, oracle.shape), hidden, embedded)

    return run


def at_positions(positions: Tensor) -> Run:
    def run(oracle: mtp_oracle.Oracle, hidden: Tensor, embedded: Tensor) -> Tensor:
        return mtp_oracle.run(oracle, hidden, embedded, positions).after

    return run


def halves_exchanged(weights: dict[str, Tensor]) -> None:
    left, right_half = weights["mtp.fc.weight"].chunk(2, dim=1)
    weights["mtp.fc.weight"] = torch.cat([right_half, left], dim=1)


def norms_without_the_1(weights: dict[str, Tensor]) -> None:
    for name in weights:
        weights[name] = weights[name] - 1 if weights[name].dim() == 1 else weights[name]


def gate_lost(weights: dict[str, Tensor]) -> None:
    name = "mtp.layers.0.self_attn.q_proj.weight"
    rows = weights[name].clone().view(4, 2, 64, -1)
    rows[:, 1] = 0  # sigmoid(0): the same half everywhere
    weights[name] = rows.view_as(weights[name])
    weights["mtp.layers.0.self_attn.o_proj.weight"] = (
        2 * weights["mtp.layers.0.self_attn.o_proj.weight"]
    )


def begun_at_the_last(oracle: mtp_oracle.Oracle, hidden: Tensor, embedded: Tensor) -> Tensor:
    alone = mtp_oracle.run(oracle, hidden[-1:], embedded[-1:], POSITIONS[-1:]).after
    return torch.cat([right(oracle, hidden, embedded)[:-1], alone])


MISTAKES: dict[str, Run] = {
    "halves of fc exchanged": with_weights(halves_exchanged),
    "norms without the 1": with_weights(norms_without_the_1),
    "gate lost": with_weights(gate_lost),
    "state t beside token t": lambda o, h, e: right(o, h, e.roll(1, dims=0)),
    "KV begun at the last token": begun_at_the_last,
    "a gap of positions": at_positions(POSITIONS + 7 * (POSITIONS > TOKENS - 5)),
    "positions that stand still": at_positions(POSITIONS.clamp(max=TOKENS - 5)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_references_see_mistakes(mistake: str) -> None:
    """In the last four rows, which hold what a draft behind the prompt starts from."""
    hidden, embedded, _, output = prompt("plain")
    oracle = Plain(head("plain"), shape("plain"))
    expected = right(oracle, hidden, embedded)[-4:] @ output.T
    found = MISTAKES[mistake](oracle, hidden, embedded)[-4:] @ output.T
    assert relative(found, expected) > 1000 * AGREE


def test_a_constant_shift_of_all_positions_is_not_seen() -> None:
    hidden, embedded, _, _ = prompt("plain")
    oracle = Plain(head("plain"), shape("plain"))
    shifted = at_positions(POSITIONS + 1)(oracle, hidden, embedded)
    assert relative(shifted, right(oracle, hidden, embedded)) < 1e-9


def test_layers_of_other_families_have_a_plain_reference() -> None:
    """Without gates and norms of heads, all features turned, relu2: no feature looks ahead."""
    made = hybrids.make("plain", layers=4)
    weights = {n: v for n, v in head("plain").items() if "q_norm" not in n and "k_norm" not in n}
    name = "mtp.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name][: made.sizes.heads * made.sizes.head_dim]
    other = mtp_oracle.Shape(4, 2, 64, 64, 1e4, 1e-5, gate=False, activation="relu2")
    hidden, embedded, _, _ = prompt("plain")
    whole = mtp_oracle.run(Plain(weights, other), hidden, embedded, POSITIONS)
    half = mtp_oracle.run(Plain(weights, other), hidden[:100], embedded[:100], POSITIONS[:100])
    assert relative(half.before, whole.before[:100]) < 1e-12
    assert relative(whole.before, mtp_oracle.run(
        Plain(weights, mtp_oracle.Shape(4, 2, 64, 64, 1e4, 1e-5, gate=False)), hidden, embedded,
        POSITIONS).before) > 1e-2  # fmt: skip


def test_a_rotated_matrix_is_turned_back() -> None:
    """(W' H) diag(s) of the W' that a bundle stores is W."""
    made = hybrids.make("rotated", layers=4)
    fixture = mtp.make(made)
    for name in mtp.rotated_names(made, fixture):
        matrix = fixture.matrices[name]
        assert np.abs(mtp.turned_back(made, mtp.turned(made, matrix)) - matrix).max() < 1e-6
