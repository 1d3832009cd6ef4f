"""MTP heads beside a decoder: against float64, in every division, with mistakes that must show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrids
from bitnet_ops import ops
from bitnet_ops.blocks import draft as blocks
from bitnet_ops.blocks import listing as listings
from bitnet_ops.models import Decoder, decoder
from bitnet_ops.models.draft import DraftPool, kept_states
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.tracked import changed
from draft_oracle import Layer, RandomHead
from hybrid_models import hybrid
from isa_control import ISAS, forced_isa, torch_threads
from tiny_models import SMALL, tiny_model

CLOSE = 5e-4  # of the largest, with inputs of 16 bits; measured up to 1.2e-4
SEEN = 20 * CLOSE  # how far a mistake moves rows, at least
DRAFTS = 3
CASES = ["plain", "plain-tied", "rotated", "square", "bitnet-offline"]


def made(
    case: str, *, feed: str = "after", rotated: bool = True
) -> tuple[Decoder, RandomHead, Layer]:
    """A model with a head, and the oracle of the head."""
    signs, block = None, 0
    if case in hybrids.CASES:
        model = hybrid(case, layers=4)
        source = hybrids.make(case, layers=4)
        block = source.sizes.block
        signs = {w: torch.from_numpy(s).double().flatten() for w, s in source.signs.items()}
    else:
        model = tiny_model(SMALL[case])
    head = RandomHead.of(model.config, feed=feed, rotated=bool(block) and rotated)
    attach(model, head)
    return model, head, Layer(model.config, head, signs, block)


def attach(model: Decoder, head: RandomHead) -> None:
    model.set_draft_head(head.draft, head.tensors())
    assert model.mtp is not None
    for module in model.mtp.modules():
        if isinstance(module, BitLinear):
            module.set_activation_format("int16_group")


def pool_of(model: Decoder, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(model.cache_config, 16, 32, dtype, state_slots=3)


def step(
    model: Decoder, pool: KVPool, ids: Sequence[int], start: int, state: tuple[int, int, int] | None
) -> Tensor:
    batch = StepBatch.of(
        [SequenceStep(ids, start, [*range(1, 14)], len(ids), None, state)], pool.block_size
    )
    return model.step(batch, pool)


@torch.inference_mode()
def drafts(
    model: Decoder, pool: KVPool, token: int, at: int, row: int = 0, count: int = DRAFTS
) -> tuple[list[Tensor], list[int]]:
    """The rows of `count` drafts behind `token` at position `at`, and their tokens."""
    assert model.mtp is not None
    state, rows, tokens = kept_states(pool, [1], [row]), [], []
    for depth in range(count):
        sequence = SequenceStep([token], at + depth, [*range(1, 14)], 1, None, (0, 0, 0))
        batch = StepBatch.of([sequence], pool.block_size)
        y = model.draft_rows(batch, DraftPool(pool).of(state))
        normed = ops.rms_norm(y, model.mtp.norm.weight, model.config.rms_norm_eps)
        token = int(model.head(normed)[0].argmax())
        state = normed if model.mtp.draft.feed == "after" else y
        rows.append(y[0])
        tokens.append(token)
    return rows, tokens


def prompt(model: Decoder, tokens: int) -> list[int]:
    given = torch.Generator().manual_seed(tokens)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=given).tolist()


@torch.inference_mode()
def of_oracle(model: Decoder, layer: Layer, ids: list[int], tokens: Sequence[int]) -> list[Tensor]:
    """The rows of drafts, fed `tokens`: the newest one, then drafts."""
    h = model.hidden(torch.tensor([ids]))[0].double()
    embed = model.model.embed_tokens.embed
    scale = model.config.scalings.embedding
    x = layer.enter(embed(torch.tensor(ids)).double()[1:] * scale, h[:-1])
    state, rows = h[-1], list[Tensor]()
    for token in tokens:
        e = embed(torch.tensor([token])).double() * scale
        x = torch.cat([x, layer.enter(e, state[None])])
        rows.append(layer.run(x, torch.arange(1, len(x) + 1))[-1])
        state = layer.next_state(rows[-1])
    return rows


def error(rows: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(
        float((y.double() - e).abs().max() / e.abs().max())
        for y, e in zip(rows, expected, strict=True)
    )


@torch.inference_mode()
def drafted(model: Decoder, ids: list[int], ends: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Rows of drafts behind `ids`, computed in steps that end at `ends`; what they are fed."""
    pool, begin, logits = pool_of(model), 0, torch.empty(0)
    for end in ends:
        logits = step(model, pool, ids[begin:end], begin, (1, 0, 0))
        begin = end
    token = int(logits[-1].argmax())
    rows, tokens = drafts(model, pool, token, len(ids))
    return rows, [token, *tokens[:-1]]


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed", ["after", "before"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_a_float64_layer(case: str, feed: str) -> None:
    model, _, layer = made(case, feed=feed)
    for tokens in (1, 2, 70, *([300] if case in ("rotated", "bitnet-offline") else [])):
        ids = prompt(model, tokens)
        rows, fed = drafted(model, ids, [tokens])
        assert error(rows, of_oracle(model, layer, ids, fed)) < CLOSE


def test_matrices_that_are_not_rotated_beside_those_that_are() -> None:
    model, _, layer = made("rotated", rotated=False)
    ids = prompt(model, 40)
    rows, fed = drafted(model, ids, [40])
    assert error(rows, of_oracle(model, layer, ids, fed)) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["rotated", "bitnet-offline"])
def test_heads_of_programs_and_of_single_ops_are_equal(case: str, dtype: torch.dtype) -> None:
    model, _, _ = made(case)
    model.to(dtype)
    ids, found = prompt(model, 70), []
    for model.run_as in ("program", "ops"):
        found.append(drafted(model, ids, [5, 6, 70]))
    assert found[0][1] == found[1][1]
    assert all(map(torch.equal, found[0][0], found[1][0]))


@pytest.mark.parametrize("case", ["plain", "bitnet-offline"])
def test_no_cut_of_a_prompt_changes_a_draft(case: str) -> None:
    model, _, _ = made(case)
    ids = prompt(model, 70)
    whole = drafted(model, ids, [70])
    for ends in ([1, 2, 70], [33, 64, 70], [69, 70]):
        rows, fed = drafted(model, ids, ends)
        assert fed == whole[1] and all(map(torch.equal, rows, whole[0]))


@pytest.mark.parametrize("case", ["plain", "bitnet-offline"])
@torch.inference_mode()
def test_rejected_drafts_leave_nothing(case: str) -> None:
    model, _, _ = made(case)
    ids = prompt(model, 40)
    expected = drafted(model, ids, [40])
    for right in range(4):
        pool = pool_of(model)
        step(model, pool, ids[:20], 0, (1, 0, 0))
        wrong = [(t + 1) % model.config.vocab_size for t in ids[21 + right : 24]]
        given = [*ids[20 : 21 + right], *wrong]
        drafts(model, pool, ids[20], 20)  # writes keys of guesses
        step(model, pool, given, 20, (1, 0, len(given) - 1))
        logits = step(model, pool, ids[21 + right :], 21 + right, (1, right, 0))
        rows, _ = drafts(model, pool, int(logits[-1].argmax()), 40)
        assert all(map(torch.equal, rows, expected[0]))


@torch.inference_mode()
def test_right_drafts_leave_their_state() -> None:
    """The next drafts begin from the state behind the drafts that were right."""
    model, _, _ = made("plain")
    ids = prompt(model, 40)
    expected = drafted(model, ids, [40])
    for right in range(4):
        pool = pool_of(model)
        step(model, pool, ids[: 39 - right], 0, (1, 0, 0))
        given = [*ids[39 - right :], *[3] * (3 - right)]
        logits = step(model, pool, given, 39 - right, (1, 0, 3))
        rows, _ = drafts(model, pool, int(logits[right].argmax()), 40, row=right)
        assert all(map(torch.equal, rows, expected[0]))


@torch.inference_mode()
def test_the_model_computes_the_same_with_a_head() -> None:
    for case in CASES:
        model, _, _ = made(case)
        ids = prompt(model, 50)
        with_head = step(model, pool_of(model), ids, 0, (1, 0, 0))
        assert torch.equal(model(torch.tensor([ids]))[0], with_head)
        kept = KVPool(model.config, 16, 32, torch.float32, state_slots=3)
        state = (1, 0, 0) if kept.states is not None else None
        assert torch.equal(step(model, kept, ids, 0, state), with_head)


@pytest.mark.parametrize("isa", ISAS)
def test_drafts_are_equal_on_every_instruction_set(isa: str) -> None:
    with forced_isa(ISAS[0]):
        model, _, _ = made("rotated")
        ids = prompt(model, 40)
        expected = drafted(model, ids, [40])
    for threads in (1, 3):
        with forced_isa(isa), torch_threads(threads):
            model, _, _ = made("rotated")
            rows, fed = drafted(model, ids, [40])
        assert fed == expected[1] and all(map(torch.equal, rows, expected[0]))


@torch.inference_mode()
def test_streams_draft_together_as_alone() -> None:
    model, _, _ = made("plain")
    assert model.mtp is not None
    prompts = [prompt(model, n) for n in (3, 40, 25)]
    pool = KVPool(model.cache_config, 16, 32, torch.float32, state_slots=3)
    tables = [[5 * i + j for j in range(5)] for i in range(3)]
    parts = [
        SequenceStep(ids, 0, table, 1, None, (slot, 0, 0))
        for slot, (ids, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    tokens = model.step(StepBatch.of(parts, 32), pool).argmax(-1).tolist()
    states = kept_states(pool, [0, 1, 2], [0, 0, 0])
    asked = [
        SequenceStep([token], len(ids), table, 1, None, (row, 0, 0))
        for row, (token, ids, table) in enumerate(zip(tokens, prompts, tables, strict=True))
    ]
    together = model.draft_rows(StepBatch.of(asked, 32), DraftPool(pool).of(states))
    for row, ids in zip(together, prompts, strict=True):
        assert torch.equal(row, drafted(model, ids, [len(ids)])[0][0])


# Mistakes -----------------------------------------------------------------------------------------


def of_line(name: str, **changes: Any) -> Callable[[pytest.MonkeyPatch, Decoder, RandomHead], None]:
    """A mistake in the keys of the lines that `name` makes; a value may be a key of the line."""

    def plant(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
        make = getattr(blocks, name)

        def made_wrongly(c: Any) -> Any:
            line = make(c)
            keys = dict(line.keys)
            for key, value in changes.items():
                if value is None:
                    keys.pop(key)
                else:
                    keys[key] = keys.get(value, value)
            return dataclasses.replace(line, keys=keys)

        patch.setattr(blocks, name, made_wrongly)
        patch.setattr(listings, name, made_wrongly)

    return plant


def in_weights(
    change: Callable[[dict[str, Tensor]], None],
) -> Callable[[pytest.MonkeyPatch, Decoder, RandomHead], None]:
    def plant(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
        values = dict(head.values)
        change(values)
        attach(model, dataclasses.replace(head, values=values))

    return plant


def halves(values: dict[str, Tensor]) -> None:
    first, second = values["mtp.fc"].chunk(2, 1)
    values["mtp.fc"] = torch.cat([second, first], 1)


def without_one(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if value.dim() == 1:
            values[name] = value - 1


def without_gate(values: dict[str, Tensor]) -> None:
    """Gates of 0 give sigmoids of one half, whatever the token."""
    name = "mtp.layers.0.self_attn.q_proj"
    dim = hybrids.CASES["rotated"].head_dim
    values[name] = (
        values[name]
        .clone()
        .unflatten(0, (-1, 2, dim))
        .mul(torch.tensor([1.0, 0])[:, None, None])
        .flatten(0, 2)
    )


def not_rotated(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """The head's input is not turned."""
    attach(model, dataclasses.replace(head, draft=dataclasses.replace(head.draft, rotated=())))


def lookup_not_turned(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """The rows of a rotated embedding are not turned back, in front of the head alone."""
    embed, table = model._embed, model.model.embed_tokens

    def wrong(ids: Tensor) -> Tensor:
        if len(ids) > 1:
            return embed(ids)
        return ops.embedding(
            ids, table.weight, table.scale, (table.out_features, table.in_features)
        )

    patch.setattr(model, "_embed", wrong)


def tap_before_norm(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """States are taken in front of the last norm, divided by their length alone."""
    line = blocks.DraftKeys.line

    def wrong(self: Any, c: Any, layer: int) -> Any:
        return line(self, c, layer).with_keys(output_norm="ones")

    patch.setattr(blocks.DraftKeys, "line", wrong)
    model.add_module("ones", decoder.norm_weight(torch.ones(model.config.hidden_size)))


def same_token(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """The state of token t beside token t: its own, not that of the token before."""
    shift = blocks._shift

    def wrong(states: Tensor, c: Any) -> Tensor:
        shift(states, c)
        return states

    patch.setattr(blocks, "_shift", wrong)
    model.run_as = "ops"


def begun_late(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """Attention of the head begins at the newest token."""
    of_line("attention_line", skip=69)(patch, model, head)


def positions_apart(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """Drafts stand at other positions than the prompt was numbered for."""
    of = StepBatch.of

    def wrong(sequences: Any, *more: Any) -> StepBatch:
        if len(sequences[0].token_ids) == 1:
            sequences = [s._replace(shift=7) for s in sequences]
        return of(sequences, *more)

    patch.setattr(StepBatch, "of", wrong)


def positions_still(patch: pytest.MonkeyPatch, model: Decoder, head: RandomHead) -> None:
    """Every draft stands at the position of the first one."""
    of = StepBatch.of

    def wrong(sequences: Any, *more: Any) -> StepBatch:
        if len(sequences[0].token_ids) == 1:
            sequences = [s._replace(shift=70 - s.start) for s in sequences]
        return of(sequences, *more)

    patch.setattr(StepBatch, "of", wrong)


MISTAKES = {
    "tap before the output norm": tap_before_norm,
    "halves of fc exchanged": in_weights(halves),
    "lookup not turned back": lookup_not_turned,
    "input not rotated": not_rotated,
    "state t beside token t": same_token,
    "keys begin at the last token": begun_late,
    "a gap between prompt and drafts": positions_apart,
    "positions that stand still": positions_still,
    "norms without the 1": in_weights(without_one),
    "gate lost": in_weights(without_gate),
    "k without its norm": of_line("attention_line", k_norm=None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_head_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head, layer = made("square")
    ids = prompt(model, 70)
    rows, fed = drafted(model, ids, [70])
    expected = of_oracle(model, layer, ids, fed)
    assert error(rows, expected) < CLOSE
    forget_listings()
    try:
        MISTAKES[name](monkeypatch, model, head)
        changed()  # so that programs are bound anew
        rows, fed = drafted(model, ids, [70])
        monkeypatch.undo()
        assert error(rows, of_oracle(model, layer, ids, fed)) > SEEN
    finally:
        forget_listings()


def forget_listings() -> None:
    listings.listing.cache_clear()
    listings.draft_listing.cache_clear()
