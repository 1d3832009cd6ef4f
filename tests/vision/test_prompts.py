"""Prompts with pictures: logits and positions of transformers, however the prompt is cut.

transformers' whole model computes in float32 from the same pixels; ours rounds inputs of ternary
products to 16 bits, as in models/test_hybrid.py. Mistakes in what joins tower and text, planted one
by one, are seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrids
import towers
from bitnet_ops.generate.prompt import PromptRows, RowRuns, split_prompt
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.tower import VisionTower
from hybrid_models import decoder

CLOSE = 2e-3  # of the largest logit, as in models/test_hybrid.py
MADE = {case: hybrids.make(case, layers=4) for case in ("plain", "rotated", "plain-tied")}
VOCAB = MADE["plain"].sizes.vocab
PAD, START, END = VOCAB - 5, VOCAB - 8, VOCAB - 7
# (rows, columns) of patches: one of a side of 2, one larger than the 8 x 8 grid of positions
GRIDS = [(4, 6), (2, 10), (12, 4), (6, 6), (4, 2)]
Layout = Sequence["int | tuple[int, int]"]  # numbers of words, and grids of pictures
LAYOUTS: dict[str, Layout] = {
    "one": [3, (4, 6), 4],
    "two": [4, (4, 6), 2, (2, 10), 4],
    "five": [1, *GRIDS, 3],
    "first": [(12, 4), 5],
    "last": [5, (6, 6)],
}


def words(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (count,), generator=generator).tolist()


def parts_of(layout: Layout) -> list[list[int] | tuple[int, int]]:
    return [words(p, i) if isinstance(p, int) else p for i, p in enumerate(layout)]


def pixels_of(layout: Layout) -> tuple[Tensor, list[tuple[int, int]]]:
    grids = [p for p in layout if not isinstance(p, int)]
    return towers.pictures(grids), grids


@functools.cache
def sizes(case: str) -> towers.Sizes:
    return hybrids.tower_sizes(MADE[case])


@functools.cache
def theirs(case: str) -> Any:
    """transformers' model for texts and pictures, float32."""
    import transformers

    config = transformers.AutoConfig.for_model(**hybrids.nested_config(MADE[case], sizes(case)))
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForConditionalGeneration(config).float().eval()
    state = {
        n.replace("model.", "model.language_model.", 1): v
        for n, v in hybrids.state_dict(MADE[case]).items()
    }
    state |= {f"model.visual.{n}": v for n, v in towers.tensors(sizes(case)).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def asked(layout: Layout) -> dict[str, Tensor]:
    """What transformers is given."""
    ids: list[int] = []
    for part in parts_of(layout):
        ids += part if isinstance(part, list) else [START, *[PAD] * (part[0] * part[1] // 4), END]
    pixels, grids = pixels_of(layout)
    given = torch.tensor([ids])
    return {
        "input_ids": given,
        "pixel_values": towers.doubled(pixels),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]),
        "mm_token_type_ids": (given == PAD).long(),
    }


@functools.cache
def expected(case: str, name: str) -> Tensor:
    with torch.no_grad():
        logits: Tensor = theirs(case)(**asked(LAYOUTS[name])).logits[0]
    return logits


@functools.cache
def tower(case: str) -> VisionTower:
    config = hybrids.nested_config(MADE[case], sizes(case))
    found = VisionTower(VisionConfig.from_hf(config, None))
    found.load_state_dict(towers.tensors(sizes(case)))
    return found


@functools.cache
def ours(case: str) -> Decoder:
    model = decoder(MADE[case])
    model.set_activation_format("int16_group")
    return model


@functools.cache
def rows_of(case: str, name: str) -> list[Tensor]:
    pixels, grids = pixels_of(LAYOUTS[name])
    with torch.inference_mode():
        return tower(case)(pixels, grids)


def prompt_of(
    case: str, name: str, rows: Sequence[Tensor] | None = None, merged: Any = None
) -> list[Any]:
    features = iter(rows_of(case, name) if rows is None else rows)
    prompt: list[Any] = []
    for part in parts_of(LAYOUTS[name]):
        if isinstance(part, list):
            prompt += part
        else:
            grid = merged(part) if merged else (part[0] // 2, part[1] // 2)
            prompt += [START, PromptRows(next(features), PAD, None, grid), END]
    return prompt


@torch.inference_mode()
def logits_of(
    model: Decoder, prompt: list[Any], ends: Sequence[int] = (), runs: RowRuns | None = None
) -> Tensor:
    """Of all positions; in steps that end at `ends`."""
    ids, found = split_prompt(prompt, model.config.hidden_size)
    runs = runs or found
    cache = KVCache(model.config, 1, 256, torch.float32)
    logits = []
    for begin, end in pairwise([0, *ends, len(ids)]):
        cache.prepare(end - begin)
        step = SequenceStep(ids[begin:end], begin, cache.blocks[0], end - begin, None,
                            (cache.slots[0], 0, 0))  # fmt: skip
        if runs is not None:
            step = step._replace(
                shift=runs.shift(begin),
                axes=runs.positions(begin, end),
                rows=runs.rows(begin, end),
            )
        logits.append(model.step(StepBatch.of([step], cache.pool.block_size), cache.pool))
        cache.advance(end - begin)
    return torch.cat(logits)


def distance(logits: Tensor, case: str, name: str) -> float:
    wanted = expected(case, name)
    return float((logits - wanted).abs().max() / wanted.abs().max())


# As transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", MADE)
def test_logits_are_those_of_transformers(case: str, name: str) -> None:
    assert distance(logits_of(ours(case), prompt_of(case, name)), case, name) < CLOSE


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_are_those_of_transformers(name: str) -> None:
    given = asked(LAYOUTS[name])
    positions, delta = theirs("plain").model.get_rope_index(
        given["input_ids"], given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
    )
    ids, runs = split_prompt(prompt_of("plain", name), MADE["plain"].sizes.hidden)
    assert runs is not None and len(ids) == given["input_ids"].shape[1]
    assert torch.equal(runs.positions(0, len(ids)), positions[:, 0])
    assert runs.delta == int(delta)


def test_answers_go_on_at_positions_of_transformers() -> None:
    """Ten more tokens behind the prompt, one a step."""
    name, more = "two", words(10, 77)
    given = asked(LAYOUTS[name])
    ids = torch.cat([given["input_ids"], torch.tensor([more])], 1)
    with torch.no_grad():
        wanted = theirs("plain")(
            **{**given, "input_ids": ids, "mm_token_type_ids": (ids == PAD).long()}
        ).logits[0, -10:]
    prompt = [*prompt_of("plain", name), *more]
    total = ids.shape[1]
    got = logits_of(ours("plain"), prompt, range(total - 10, total))[-10:]
    assert float((got - wanted).abs().max() / wanted.abs().max()) < CLOSE


def test_no_cut_changes_a_bit() -> None:
    prompt = prompt_of("rotated", "two")
    whole = logits_of(ours("rotated"), prompt)
    for cut in range(1, len(whole)):
        assert torch.equal(logits_of(ours("rotated"), prompt, [cut]), whole), cut
    assert torch.equal(logits_of(ours("rotated"), prompt, range(1, len(whole))), whole)


# Mistakes -----------------------------------------------------------------------------------------


class Wrong(RowRuns):
    """Runs whose positions are changed: `change(time, height, width, is_row)`."""

    def __init__(self, runs: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(runs._runs)
        self._change = change

    def positions(self, begin: int, end: int) -> Tensor:
        right = super().positions(begin, end)
        assert right is not None and begin == 0
        is_row = torch.zeros(end, dtype=torch.bool)
        for start, run in self._runs:
            is_row[start : start + len(run)] = True
        return self._change(right.clone(), is_row)


def _shifted(axes: Tensor, is_row: Tensor) -> Tensor:
    return axes + is_row


def _counting_time(axes: Tensor, is_row: Tensor) -> Tensor:
    axes[0] = torch.arange(axes.shape[1])
    return axes


def _time_alone(axes: Tensor, is_row: Tensor) -> Tensor:
    return axes[:1].expand(3, -1)


def _indices(axes: Tensor, is_row: Tensor) -> Tensor:
    return torch.arange(axes.shape[1]).expand(3, -1)


POSITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "height and width swapped": lambda axes, _: axes[[0, 2, 1]],
    "time for all": _time_alone,
    "time counts inside": _counting_time,
    "one late": _shifted,
    "positions 0, 1, 2, ...": _indices,
}
_TRANSPOSED = "transposed inside a picture"


@pytest.mark.parametrize("mistake", POSITIONS)
def test_mistakes_in_positions_are_seen(mistake: str) -> None:
    prompt = prompt_of("plain", "two")
    _, runs = split_prompt(prompt, MADE["plain"].sizes.hidden)
    wrong = Wrong(runs, POSITIONS[mistake])
    assert distance(logits_of(ours("plain"), prompt, (), wrong), "plain", "two") > 3 * CLOSE


@pytest.mark.parametrize("advance", ["h * w", "1", "w", "patches"])
def test_mistakes_in_what_follows_a_picture_are_seen(
    advance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: dict[str, Callable[[PromptRows], int]] = {
        "h * w": len,
        "1": lambda run: 1,
        "w": lambda run: (run.grid or (0, 0))[1],
        "patches": lambda run: 2 * max(run.grid or (0, 0)),
    }
    monkeypatch.setattr(PromptRows, "advance", property(wrong[advance]))
    prompt = prompt_of("plain", "five")
    assert distance(logits_of(ours("plain"), prompt), "plain", "five") > 3 * CLOSE


def _mistaken_rows(name: str) -> dict[str, list[Tensor]]:
    rows, grids = rows_of("plain", name), pixels_of(LAYOUTS[name])[1]
    transposed = [
        r.view(h // 2, w // 2, -1).transpose(0, 1).reshape(r.shape)
        for r, (h, w) in zip(rows, grids, strict=True)
    ]
    joined = torch.cat(rows)
    late = torch.cat([joined[-1:], joined[:-1]])
    again = torch.cat([rows[0], rows[0]])
    counts = [len(r) for r in rows]
    return {
        "swapped": list(joined.flip(0).split(counts)),
        _TRANSPOSED: transposed,
        "one row late": list(late.split(counts)),
        "the first's rows for the second": list(again[: sum(counts)].split(counts)),
        "no picture": [torch.zeros_like(r) for r in rows],
    }


@pytest.mark.parametrize(
    "mistake", ["swapped", _TRANSPOSED, "one row late", "the first's rows for the second",
                "no picture"],
)  # fmt: skip
def test_mistakes_in_rows_are_seen(mistake: str) -> None:
    prompt = prompt_of("plain", "two", _mistaken_rows("two")[mistake])
    assert distance(logits_of(ours("plain"), prompt), "plain", "two") > 10 * CLOSE


def test_a_chunk_that_begins_the_rows_again_is_seen() -> None:
    prompt = prompt_of("plain", "one")
    ids, runs = split_prompt(prompt, MADE["plain"].sizes.hidden)
    assert runs is not None
    right = runs.rows

    def again(begin: int, end: int) -> list[tuple[int, Tensor]]:
        return [(at, rows_of("plain", "one")[0][: len(rows)]) for at, rows in right(begin, end)]

    runs.rows = again  # type: ignore[method-assign]
    got = logits_of(ours("plain"), prompt, [6], runs)
    assert distance(got, "plain", "one") > 10 * CLOSE


def test_pairs_in_three_runs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The composed ops, with pairs that are divided among the axes but not interleaved."""
    from bitnet_ops import ops
    from bitnet_ops.models import composed

    def rope(
        x: Tensor, positions: Tensor, inv_freq: Tensor, factor: float, sections: Any = ()
    ) -> Any:
        if not len(sections):
            return ops.rope(x, positions, inv_freq, factor)
        pairs, (time, height, _) = len(inv_freq), sections
        streams = [0] * time + [1] * height + [2] * (pairs - time - height)
        half = x.shape[-1] // 2
        parts = [ops.rope(x, positions[s], inv_freq, factor) for s in range(3)]
        found = parts[0].clone()
        for i, s in enumerate(streams):
            found[..., i], found[..., half + i] = parts[s][..., i], parts[s][..., half + i]
        return found

    model = decoder(MADE["plain"])
    model.set_activation_format("int16_group")
    model.run_as = "ops"
    prompt = prompt_of("plain", "two")
    assert distance(logits_of(model, prompt), "plain", "two") < CLOSE

    class Mistaken:
        def __getattr__(self, name: str) -> Any:
            return rope if name == "rope" else getattr(ops, name)

    monkeypatch.setattr(composed, "ops", Mistaken())
    assert distance(logits_of(model, prompt), "plain", "two") > 3 * CLOSE


def test_a_prompt_without_the_tokens_around_a_picture_is_seen() -> None:
    prompt = [p for p in prompt_of("plain", "one") if p not in (START, END)]
    got = logits_of(ours("plain"), prompt)[-1]
    wanted = expected("plain", "one")
    assert float((got - wanted[-1]).abs().max() / wanted.abs().max()) > 10 * CLOSE
