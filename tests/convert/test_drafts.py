"""Heads that draft tokens: every form of their files against the fixture of helpers/mtp.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybrids
import mtp
from bitnet_ops import ops
from bitnet_ops.config.draft import DraftConfig
from bitnet_ops.convert import convert
from bitnet_ops.convert.report import ConvertReport
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.loading.draft import read_draft_head
from hybrids import Hybrid
from mtp import Head


@functools.cache
def trunk(name: str) -> Hybrid:
    return hybrids.make(name, layers=4)


@functools.cache
def head_of(name: str) -> Head:
    return mtp.make(trunk(name))


# form -> (what writes it, the trunk, what its tensors stand for)
Values = Callable[[Hybrid, Head], dict[str, np.ndarray]]


def stored(dtype: torch.dtype) -> Values:
    """Of matrices and norms in a dtype; norms are raised by 1 behind it."""

    def values(made: Hybrid, head: Head) -> dict[str, np.ndarray]:
        found = {
            n: torch.from_numpy(v).to(dtype).double().numpy() for n, v in head.matrices.items()
        }
        found |= {n: torch.from_numpy(v).to(dtype).double().numpy() + 1
                  for n, v in head.norms.items()}  # fmt: skip
        return {f"{name}.weight": value for name, value in found.items()}

    return values


def mlx(bits: int) -> Values:
    def values(made: Hybrid, head: Head) -> dict[str, np.ndarray]:
        found = mtp.plain(head)
        for name, matrix in head.matrices.items():
            plain = matrix.astype(np.float16).astype(np.float64)
            quantised = bits and name != "mtp.fc"
            found[f"{name}.weight"] = mtp.mlx_values(matrix, bits) if quantised else plain
        return found

    return values


SIDECAR = "mtp/weights.safetensors"
FORMS: dict[str, tuple[Callable[..., Path], str, Values]] = {
    "nested": (mtp.write_hf, "plain", stored(torch.float32)),
    "nested-bf16": (partial(mtp.write_hf, dtype=torch.bfloat16), "plain-tied",
                    stored(torch.bfloat16)),
    "flat": (partial(mtp.write_hf, nested=False), "plain", stored(torch.float32)),
    "model.mtp": (partial(mtp.write_hf, nested=False, prefix="model."), "plain-tied",
                  stored(torch.float32)),
    "language_model.mtp": (partial(mtp.write_hf, prefix="model.language_model."), "plain",
                           stored(torch.float32)),
    "bundle": (mtp.write_bundle, "rotated", mtp.gguf_values),
    "bundle-rotated": (partial(mtp.write_bundle, rotated=True), "rotated",
                       partial(mtp.gguf_values, rotated=True)),
    "bundle-square": (partial(mtp.write_bundle, rotated=True, kind="PTQ1_0"), "square",
                      partial(mtp.gguf_values, rotated=True)),
    "bundle-plain": (partial(mtp.write_bundle, kind="Q2_0"), "plain-tied", mtp.gguf_values),
    "mlx": (mtp.write_mlx, "rotated", mlx(0)),
    "mlx-4": (partial(mtp.write_mlx, bits=4), "plain", mlx(4)),
    "mlx-8": (partial(mtp.write_mlx, bits=8, place=SIDECAR), "square", mlx(8)),
    "mlx-moved": (partial(mtp.write_mlx, place=SIDECAR), "rotated", mlx(0)),
    "mlx-raw": (partial(mtp.write_mlx, raw_norms=True), "plain", mlx(0)),
}  # fmt: skip


def run(source: Path, out: Path, **options: Any) -> ConvertReport:
    if source.suffix == ".gguf":
        options = {"tokenizer": "none", **options}
    return convert(source, out, **options)


def drafted(folder: Path) -> tuple[DraftConfig, dict[str, np.ndarray]]:
    """What the head in a model file stands for, float64."""
    found = read_draft_head(folder)
    assert found is not None
    values = {}
    for name, value in found[1].items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float32
            values[name] = value.double().numpy()
            continue
        rows, columns = value.out_features, value.in_features
        codes = ops.unpack(value.weight, columns).double().numpy()
        size = 128 if columns % 384 == 0 else 64
        assert value.group_size == size and value.scale.dtype == torch.float32
        digits = codes * np.repeat(value.scale.double().numpy(), size, axis=1)
        values[name] = digits.reshape(rows, 3, -1).sum(axis=1)
    return found[0], values


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Norms to the last bit of float32, matrices as 27 levels of their groups."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value.ndim == 1:
            assert np.array_equal(found[name].astype(np.float32), value.astype(np.float32)), name
            continue
        size = 128 if value.shape[1] % 128 == 0 else 64
        steps = np.abs(value).reshape(len(value), -1, size).max(axis=2) / 13
        step = np.repeat(steps, size, axis=1)
        off = np.abs(found[name] - value)
        assert (off <= step * (0.5 + 1e-4)).all(), name  # to the nearest level, ties to any
        level = found[name] / step
        assert (np.abs(level - np.rint(level)) < 1e-4).all() and (np.abs(level) < 13.5).all(), name


def trunk_bytes(folder: Path) -> dict[str, bytes]:
    with Reader(folder / "model.bin") as reader:
        return {n: bytes(reader.memory(n)) for n in reader.tensors if not n.startswith("mtp.")}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_taken_without_asking(tmp_path: Path, form: str) -> None:
    write, name, values = FORMS[form]
    made, head = trunk(name), head_of(name)
    source = write(tmp_path / "source", made, head)
    report = run(source, tmp_path / "out")
    config, found = drafted(tmp_path / "out")
    compare(found, values(made, head))
    rotated = mtp.rotated_names(made, head) if form in ("bundle-rotated", "bundle-square") else []
    origin = "the file" if source.suffix == ".gguf" else "the checkpoint"
    assert config == DraftConfig(made.sizes.inter, rotated=tuple(rotated), origin=origin)
    said = [remark for remark in report.remarks if "draft" in remark]
    assert len(said) == (2 if form == "mlx-raw" else 1)
    assert said[-1].startswith(f"a head that drafts tokens, from {origin}: ")
    assert report.tensors == len(hybrids.converted(made)) + 15
    # the text model is the same one without the head, to the bit, and loads as ever
    run(source, tmp_path / "without", draft=False)
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "without")
    assert read_draft_head(tmp_path / "without") is None
    loaded, plain = (load(tmp_path / folder).model for folder in ("out", "without"))
    assert loaded.config == plain.config
