"""Every report that a section of the page is made of, and the page from what is stored.

About a quarter of an hour; the machine should have nothing else to do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitnet_ops.bench import report, run_model, run_ops
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.measure import Row
from bitnet_ops.bench.page import goals, plots, render
from bitnet_ops.bench.page.parts import parts_rows
from bitnet_ops.bench.page.torch_int8 import with_int8
from bitnet_ops.bench.pinning import pinned
from bitnet_ops.bench.run_model import ModelBench, ModelSettings
from bitnet_ops.bench.run_ops import OpsSettings, Progress
from bitnet_ops.bench.shapes import USUAL
from bitnet_ops.untrusted import UntrustedFileError, read_json_object

_FORMATS = ((USUAL, "int8"), ("1.6bit", "int4"), ("canonical", "int8"))
MoreRows = Callable[[ModelBench, list[MachineLimits]], list[Row]]


def check(page: Path) -> None:
    """Complain before anything is measured: ValueError."""
    if not page.absolute().parent.is_dir() or page.is_dir():
        raise ValueError(f"expected a file in a directory that exists, got {page}")
    if page.is_file() and not page.read_bytes().startswith(render.HEADER[:13].encode()):
        raise ValueError(f"expected a page that bench page wrote, or a new file, got {page}")
    if plots.available():
        plots.require(str(page.parent / "plots"))


def write(
    page: Path,
    progress: Progress,
    *,
    quick: bool = False,
    data: Path | None = None,
    engine_rows: MoreRows = lambda bench, limits: [],
    missing: list[str] | None = None,
) -> Path:
    """Measure this machine and write `page`, which keeps other machines' sections.

    quick: tiny shapes, to try the page itself. data: where the JSON of every step is kept; a step
    whose file is there is not run again. engine_rows: rows of other engines in the run of the large
    model, `missing` those that are not installed. Returns the folder of this machine's figures.
    """
    found = _measure(data, progress, engine_rows, missing or [], quick=quick)
    models = [found["model"], found["small-model"]]
    folder = render.store(found["ops"], found["goals"], models, page)
    render.write(page)
    return folder


def _settings(*, quick: bool) -> tuple[OpsSettings, ModelSettings, ModelSettings]:
    threads = tuple(sorted({1, torch.get_num_threads()}))
    if quick:
        small: dict[str, Any] = {"threads": threads, "quick": True, "cold_mib": 16}
        tiny = ModelSettings("tiny", _FORMATS[:1], (16,), (0, 8), (1, 2), **small)
        return OpsSettings("demo", (1, 4), seconds=0.002, **small), tiny, tiny
    tokens = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
    large = ModelSettings(formats=_FORMATS, threads=threads)
    small_model = ModelSettings(
        "0.7b", _FORMATS[:1], (128, 512), (0, 2048), (1, 4), threads=threads
    )
    return OpsSettings(tokens=tokens, threads=threads, seconds=0.25), large, small_model


def _kept(file: Path) -> dict[str, Any]:
    """The report of a step that was run before; ValueError for a file that is none."""
    try:
        kept = read_json_object(file)
    except UntrustedFileError as error:
        raise ValueError(f"{error}; remove it to run the step again") from None
    if not str(kept.get("schema")).startswith("bitnet_ops.bench."):
        raise ValueError(f"expected a report of bench in {file}, got another file")
    return kept


def _measure(
    data: Path | None,
    progress: Progress,
    engine_rows: MoreRows,
    missing: list[str],
    *,
    quick: bool,
) -> dict[str, dict[str, Any]]:
    shapes, large, small = _settings(quick=quick)
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "goals": lambda: goals.run(shapes, progress),
        "model": lambda: (
            run_model.run(large, progress, lambda *run: parts_rows(*run) + engine_rows(*run))
            | {"missing": missing}
        ),
        "small-model": lambda: run_model.run(small, progress, parts_rows),
        "ops": lambda: run_ops.run(shapes, progress, with_int8),
    }
    if data:
        data.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, step in steps.items():
        file = data / f"{name}.json" if data else None
        if file and file.is_file():
            found[name] = _kept(file)
            continue
        progress(name)
        with pinned():
            found[name] = step()
        if file:
            report.write_json(found[name], file)
    return found
