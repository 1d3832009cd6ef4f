"""Prompts with rows among their tokens: the same tokens however they are cut, shared and kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops.generate.engine import Engine
from bitnet_ops.generate.prompt import PromptError, PromptRows, RowRuns, split_prompt
from bitnet_ops.generate.request import Limits
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.models import Decoder
from engine_schedules import Form, alone, run_schedule
from hybrid_models import hybrid

SCHEDULES = 1000 if os.environ.get("BITNET_CI_ALL") == "1" else 25
VOCAB, PAD = 321, 320
GREEDY, FOUR = SamplingParams(temperature=0), Limits(4)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return hybrid("rotated", layers=4)


def image(
    model: Decoder, grid: tuple[int, int] | None, seed: int, identity: bool = True, n: int = 0
) -> PromptRows:
    generator = torch.Generator().manual_seed(seed)
    count = n or (grid[0] * grid[1] if grid else 1)
    rows = torch.randn(count, model.config.hidden_size, generator=generator)
    return PromptRows(rows, PAD, b"image %d" % seed if identity else None, grid)


# What a prompt is ---------------------------------------------------------------------------------


def positions_of(runs: RowRuns, length: int) -> list[list[int]]:
    found = runs.positions(0, length)
    assert found is not None
    return found.tolist()


def test_positions_of_two_images(model: Decoder) -> None:
    """The example of transformers' get_rope_index: 4 tokens, 4 x 3, 4 tokens, 2 x 5, 5 tokens."""
    prompt = [1, 2, 3, 4, image(model, (4, 3), 1), 5, 6, 7, 8, image(model, (2, 5), 2), *range(5)]
    ids, runs = split_prompt(prompt, model.config.hidden_size)
    assert runs is not None and len(ids) == 35 and ids.count(PAD) == 22
    time, height, width = positions_of(runs, 35)
    assert time == [0, 1, 2, 3, *[4] * 12, 8, 9, 10, 11, *[12] * 10, 17, 18, 19, 20, 21]
    tail = [17, 18, 19, 20, 21]
    rows = [r for r in (4, 5, 6, 7) for _ in range(3)]
    assert height == [0, 1, 2, 3, *rows, 8, 9, 10, 11, *[12] * 5, *[13] * 5, *tail]
    columns = [4, 5, 6] * 4
    assert width == [0, 1, 2, 3, *columns, 8, 9, 10, 11, *[12, 13, 14, 15, 16] * 2, *tail]
    assert runs.delta == 22 - 35 and runs.shift(30) == -13 and runs.shift(17) == 12 - 20


@pytest.mark.parametrize("length", [1, 2, 7])
def test_positions_do_not_depend_on_the_cut(model: Decoder, length: int) -> None:
    prompt = [image(model, (3, 2), 1), 1, image(model, None, 2, n=3), image(model, (1, 4), 3), 5, 6]
    ids, runs = split_prompt(prompt, model.config.hidden_size)
    assert runs is not None
    whole, rows = runs.positions(0, len(ids)), dict(runs.rows(0, len(ids)))
    assert whole is not None and list(rows) == [0, 7, 10]
    for begin in range(len(ids)):
        end = min(begin + length, len(ids))
        part = runs.positions(begin, end)
        if part is None:  # tokens alone
            part = (torch.arange(begin, end) + runs.shift(begin)).expand(3, -1)
            assert PAD not in ids[begin:end]
        assert torch.equal(part, whole[:, begin:end])
        for at, cut in runs.rows(begin, end):
            start = max(s for s in rows if s <= begin + at)
            first = begin + at - start
            assert torch.equal(cut, rows[start][first : first + len(cut)])
        assert sum(len(cut) for _, cut in runs.rows(begin, end)) == ids[begin:end].count(PAD)


def test_contents_tell_rows_by_identity_and_grid(model: Decoder) -> None:
    one = image(model, (2, 3), 1)
    assert one.contents() == image(model, (2, 3), 1).contents()
    assert len(set(one.contents())) == 6 and max(one.contents()) < 0
    others = image(model, (3, 2), 1), image(model, (2, 3), 2), image(model, (2, 3), 1, False)
    for other in (*others, image(model, (2, 3), 1, False), image(model, None, 1, n=6)):
        assert not set(other.contents()) & set(one.contents())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rows": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "rows as a float tensor"),
        ({"rows": torch.zeros(6)}, TypeError, "rows as a float tensor"),
        ({"rows": torch.zeros(0, 4)}, ValueError, "at least one row"),
        ({"rows": torch.full((6, 4), float("nan"))}, ValueError, "finite rows"),
        ({"rows": torch.zeros(6, 4, dtype=torch.float64)}, TypeError, "rows as a float"),
        ({"pad_id": -1}, ValueError, "pad_id"),
        ({"identity": "text"}, TypeError, "identity as bytes"),
        ({"grid": (2, 2)}, ValueError, "a grid of 6 rows"),
        ({"grid": (-2, -3)}, ValueError, "a grid of 6 rows"),
    ],
)
def test_what_cannot_be_rows(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {"rows": torch.zeros(6, 4), "pad_id": 1, "identity": b"x", "grid": (2, 3)}
    PromptRows(**good)
    with pytest.raises(error, match=text):
        PromptRows(**{**good, **change})


def test_rows_of_another_width_and_unknown_ids_are_refused(model: Decoder) -> None:
    engine = Engine(model)
    with pytest.raises(PromptError, match="hidden_size"):
        engine.add([1, PromptRows(torch.zeros(2, 5), PAD)])
    with pytest.raises(PromptError, match="prompt ids from 0"):
        engine.add([1, PromptRows(torch.zeros(2, model.config.hidden_size), VOCAB + 5)])


def test_rows_are_copied(model: Decoder) -> None:
    rows = torch.zeros(2, 4)
    one = PromptRows(rows, 1)
    rows.fill_(float("nan"))
    assert not one.rows.any()


# What comes of it ---------------------------------------------------------------------------------


def tokens_of(engine: Engine, prompt: list[Any], **options: Any) -> list[int]:
    run = engine.start([prompt], GREEDY, FOUR, **options)
    for _ in run:
        pass
    return list(run.generations[0].token_ids)


def test_rows_of_embeddings_are_tokens(model: Decoder) -> None:
    ids = [5, 9, 200, 17, 31, 8, 44]
    rows = model.model.embed_tokens.embed(torch.tensor(ids[2:5])).float()
    prompt = [*ids[:2], PromptRows(rows, PAD), *ids[5:]]
    assert alone(model, prompt, GREEDY, FOUR) == alone(model, ids, GREEDY, FOUR)


def test_axes_matter_and_ops_are_the_program() -> None:
    """A row of patches, a column and no grid: other positions, other logits."""
    model = hybrid("rotated", layers=4)

    def logprobs(grid: tuple[int, int] | None) -> tuple[float, ...]:
        prompt = [3, image(model, grid, 4, n=6), 7, 8]
        params = SamplingParams(temperature=0, logprobs=1)
        run = Engine(model).start([prompt], params, Limits(2))
        for _ in run:
            pass
        assert run.generations[0].logprobs is not None
        return tuple(one.logprob for one in run.generations[0].logprobs)

    grids = ((1, 6), (6, 1), (2, 3), None)
    as_program = [logprobs(grid) for grid in grids]
    model.run_as = "ops"
    assert [logprobs(grid) for grid in grids] == as_program
    assert len(set(as_program)) == 4


def test_chunks_cut_anywhere(model: Decoder) -> None:
    prompt = [1, 2, image(model, (4, 3), 1), 3, image(model, (2, 5), 2), 4, 5]
    wanted = alone(model, prompt, GREEDY, FOUR)
    for budget in range(1, 28):
        options = SchedulerOptions(budget, max_sequences=1, prefix_cache=False)
        assert tokens_of(Engine(model, scheduling=options), prompt) == wanted, budget


def test_texts_and_rows_share_steps(model: Decoder) -> None:
    prompts = [
        [1, image(model, (4, 3), 1), 9],
        [4, 5, 6, 7],
        [image(model, (2, 2), 2)],  # a prompt that ends with an image
        [8, image(model, (1, 7), 3), 9, 9],
    ]
    wanted = [alone(model, p, GREEDY, FOUR) for p in prompts]
    found = Engine(model).generate(prompts, GREEDY, FOUR)
    assert [list(g.token_ids) for g in found] == wanted


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_prefix_cache_knows_images(model: Decoder, block_size: int, tmp_path: Path) -> None:
    one, mirrored = image(model, (6, 5), 1), image(model, (6, 5), 2)
    begin, question, other = [1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11]

    def engine() -> Engine:
        scheduling = SchedulerOptions(checkpoint_tokens=4)
        options: dict[str, Any] = {"block_size": block_size, "prefix_dir": tmp_path}
        return Engine(model, scheduling=scheduling, **options)

    def reused(engine: Engine, prompt: list[Any]) -> int:
        before = engine.stats().reused_tokens
        assert tokens_of(engine, prompt) == alone(model, prompt, GREEDY, FOUR)
        return engine.stats().reused_tokens - before

    first = engine()
    assert reused(first, [*begin, one, *question]) == 0
    assert reused(first, [*begin, mirrored, *question]) <= len(begin)
    assert reused(first, [*begin, one, *other]) == 33  # begins right behind the image
    assert reused(first, [*begin, one, *question, *other]) >= 33
    assert reused(first, [*other, one, *question]) == 0  # the picture in another conversation
    first.close()
    second = engine()
    assert reused(second, [*begin, one, *other]) >= 33 // block_size * block_size
    assert reused(second, [*begin, image(model, (5, 6), 1), *other]) <= len(begin)
    assert reused(second, [*begin, image(model, (6, 5), 1, identity=False), *other]) <= len(begin)


def test_drafts_never_hold_what_stands_for_rows(model: Decoder) -> None:
    one = image(model, (2, 3), 1)
    prompt = [7, 8, 9, one, 7, 8, 9, one, 7, 8, 9]
    wanted = alone(model, prompt, GREEDY, FOUR)
    engine = Engine(model)
    assert tokens_of(engine, prompt, max_drafts=8) == wanted
    assert engine.stats().drafted_tokens == 0 or min(wanted) >= 0


def test_schedules(model: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tuple(image(model, grid, seed) for grid in ((2, 3), (4, 5), (1, 3)) for seed in (1, 2))
    form = Form(VOCAB, 40, block_sizes=(4, 16), positions=(132, 180, 6400), rows=rows)
    total = dict.fromkeys(("accepted", "rejected", "reused", "preempted", "disk"), 0)
    for seed in range(SCHEDULES):
        for name, count in run_schedule(model, form, seed, monkeypatch, tmp_path).items():
            total[name] += count
    assert min(total.values()) > 0, total
