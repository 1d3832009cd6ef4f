"""What commands say of a model file with a draft head, and what conversions cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrids
import mtp
from bitnet_ops.cli import main
from bitnet_ops.conversions import resolve
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.diff import diff, lines
from bitnet_ops.convert.draft_proof import compare_draft
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.verify import verify
from bitnet_ops.formats.sglbitnt import Reader, Writer
from bitnet_ops.loading.draft import read_draft_head
from bitnet_ops.models import TensorError

MADE = hybrids.make("rotated", layers=4)
HEAD = mtp.make(MADE)
WEIGHTS = sum(matrix.size for matrix in (HEAD.matrices | HEAD.norms).values())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp.write_bundle(tmp_path_factory.mktemp("bundle"), MADE, HEAD, rotated=True)


@pytest.fixture(scope="module")
def converted(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "out"
    report = convert(bundle, out, tokenizer="none", verify=True)
    proof = report.verification
    assert proof is not None and proof["failures"] == []
    assert proof["draft"]["tensors"] == 15 and 0.4 < proof["draft"]["largest_error"] <= 0.501
    assert "; draft head: 15 tensors, a weight off by 0.5 of the step" in "\n".join(report.lines())
    return out


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_inspect_says_one_line_of_a_head(
    bundle: Path, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, where, origin in ((bundle, "beside these", "the file"),
                                (converted, "of these", "the file")):  # fmt: skip
        (line,) = [line for line in said(capsys, "inspect", path) if "draft" in line]
        assert line == (
            f"drafts     15 tensors {where}, {WEIGHTS:,} weights: a draft head, from "
            f"{origin} (MLP 384, fed after its norm, 7 of them rotated)"
        )
    rows = {row["name"]: row for row in inspect(converted)["tensors"]}
    assert rows["mtp.fc.weight"]["shape"] == [256, 3 * 512]
    assert rows["mtp.norm.weight"]["format"] == "float32"
    assert not any(row["name"].startswith("mtp.") for row in inspect(bundle)["tensors"])


def test_inspect_says_why_layers_are_no_head(tmp_path: Path) -> None:
    made = hybrids.make("plain", layers=4)
    folder = hybrids.write_unpacked(tmp_path / "nested", made, nested=True)
    file = hybrids.write_gguf(tmp_path / "gguf", made, drafts=True)
    for path, count in ((folder, 3), (file, 2)):
        report = inspect(path)
        assert report["draft"] is None
        assert f"tensors left out: {count} of layers that draft tokens" in report["remarks"]
        assert any(r.startswith("no draft head: expected") for r in report["remarks"])


def test_a_conversion_differs_from_its_source_in_nothing_that_is_compared(
    bundle: Path, converted: Path, tmp_path: Path
) -> None:
    found = diff(bundle, converted)
    assert found["tensors"] == found["only_a"] == found["only_b"] == []
    assert found["draft"] == [True, True] and not found["draft_compared"] and found["equal"]
    assert any("draft heads in both, not compared" in line for line in lines(found))
    convert(converted, tmp_path / "copy")
    copied = diff(converted, tmp_path / "copy")
    assert copied["equal"] and copied["draft_compared"]
    convert(converted, tmp_path / "bare", draft=False)
    without = diff(converted, tmp_path / "bare")
    assert not without["equal"] and len(without["only_a"]) == 15 and without["only_b"] == []
    assert "a draft head in a alone" in lines(without)


def test_verify_compares_the_head(bundle: Path, converted: Path, tmp_path: Path) -> None:
    found = verify(converted, bundle)["verification"]
    assert found["failures"] == [] and found["draft"]["tensors"] == 15
    other = mtp.write_bundle(tmp_path / "other", MADE, mtp.make(MADE, seed=1), rotated=True)
    failures = verify(converted, other)["verification"]["failures"]
    assert any("a weight of the draft head off by" in failure for failure in failures)
    assert any("norms of the draft head differ" in failure for failure in failures)


def test_verify_of_a_grafted_head_asks_for_its_base(tmp_path: Path) -> None:
    made = hybrids.make("plain", layers=4)
    source, base = mtp.write_mlx(tmp_path / "source", made, None), tmp_path / "base"
    mtp.write_base(base, made, HEAD)
    convert(source, tmp_path / "out", draft_from=base)
    alone = verify(tmp_path / "out", source)["verification"]
    assert alone["failures"] == [] and "--draft-from" in alone["draft"]["why_not"]
    result = verify(tmp_path / "out", source, draft_from=base)
    assert result["verification"]["draft"]["why_not"] is None
    assert "base/model-00002-of-00002.safetensors" in result["source_sha256"]


def test_a_proof_sees_a_head_that_is_off(bundle: Path, converted: Path, tmp_path: Path) -> None:
    """A scale of one group, or a norm."""
    unknown = compare_draft(None, converted)
    assert unknown is not None and unknown.why_not is not None
    with Reader(converted / "model.bin") as reader:
        for number, broken in enumerate(("mtp.fc.weight", "mtp.norm.weight", None)):
            file = tmp_path / f"{number}.bin"
            with Writer(file, reader.config, len(reader.tensors)) as writer:
                for name, info in reader.tensors.items():
                    data = reader.tensor(name).clone()
                    if not info.packed:
                        data += 1e-3 * (name == broken)
                        writer.add_dense(name, data)
                        continue
                    scales = reader.scales(name)
                    scales = scales.clone()
                    scales[0, 0] *= 1 + (name == broken)
                    k = info.in_features
                    writer.add_packed(name, data, scales.to(info.scale_dtype), k, info.group_size)
            report = verify(file, bundle)["verification"]
            failing = [line for line in report["failures"] if "draft head" in line]
            assert len(failing) == (broken is not None), failing


def test_an_export_says_that_the_head_was_left_out(converted: Path, tmp_path: Path) -> None:
    report = export_gguf(converted, tmp_path / "out.gguf", type="pq2_0", tokenizer=False)
    assert any(r.startswith("the draft head was left out") for r in report.remarks)
    convert(tmp_path / "out.gguf", tmp_path / "back", tokenizer="none")
    assert read_draft_head(tmp_path / "back") is None
    with Reader(converted / "model.bin") as ours, Reader(tmp_path / "back" / "model.bin") as back:
        names = [name for name in ours.tensors if not name.startswith("mtp.")]
        assert set(names) == set(back.tensors)
        assert all(ours.memory(name) == back.memory(name) for name in names)


def test_the_command_takes_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = hybrids.make("plain", layers=4)
    source = mtp.write_mlx(tmp_path / "source", made, None)
    base = mtp.write_base(tmp_path / "base", made, HEAD)
    done = said(capsys, "convert", source, tmp_path / "out", "--draft-from", base,
                "--draft-feed", "before")  # fmt: skip
    assert any("a draft head, from base: " in line for line in done)
    found = read_draft_head(tmp_path / "out")
    assert found is not None and found[0].feed == "before"
    said(capsys, "convert", tmp_path / "out", tmp_path / "bare", "--no-draft")
    assert read_draft_head(tmp_path / "bare") is None
    said(capsys, "verify", tmp_path / "out", source, "--draft-from", base)
    for option in (["--draft-from", str(base)], ["--draft-feed", "after"]):
        command = ["convert", str(source), str(tmp_path / "never"), "--no-draft", *option]
        assert main(command) == 2
        assert f"expected {option[0]} or --no-draft, got both" in capsys.readouterr().err


def test_version_1_has_no_head(bundle: Path, tmp_path: Path) -> None:
    made = hybrids.make("plain", layers=4)
    for codes in made.scales.values():
        codes[:] = codes.flat[0]  # version 1 has one scale a matrix
    source = mtp.write_bundle(tmp_path / "source", made, HEAD, kind="F32")
    report = convert(source, tmp_path / "out", tokenizer="none", format_version=1)
    assert "tensors left out: 15 of layers that draft tokens" in report.remarks
    assert read_draft_head(tmp_path / "out") is None


def test_what_is_loaded_by_its_source_has_its_head(bundle: Path, tmp_path: Path) -> None:
    """The cache of conversions, of a package whose head lies in a folder of its own."""
    made = hybrids.make("plain", layers=4)
    package = mtp.write_mlx(tmp_path / "package", made, HEAD, place="mtp/weights.safetensors")
    first = resolve(package, cache=tmp_path / "cache").file
    assert read_draft_head(first) is not None
    mtp.write_mlx(tmp_path / "other", made, mtp.make(made, seed=2), place="mtp/weights.safetensors")
    os.replace(tmp_path / "other" / "mtp/weights.safetensors", package / "mtp/weights.safetensors")
    assert resolve(package, cache=tmp_path / "cache").file != first


# Broken files -------------------------------------------------------------------------------------


def rewritten(source: Path, file: Path, **change: Any) -> Path:
    """The model file with tensors by name changed or left out (None), and its entry likewise."""
    with Reader(source / "model.bin") as reader:
        config = json.loads(json.dumps(reader.config))
        config["bitnet_ops"]["draft_head"] |= change.pop("entry", {})
        tensors = {n: (reader.tensor(n), i) for n, i in reader.tensors.items()}
        kept = {n: t for n, t in tensors.items() if change.get(n, 0) is not None}
        with Writer(file, config, len(kept)) as writer:
            for name, (data, info) in kept.items():
                if (other := change.get(name)) is not None:
                    writer.add_dense(name, other)
                elif info.packed:
                    scales = reader.scales(name).to(info.scale_dtype)
                    writer.add_packed(name, data, scales, info.in_features, info.group_size)
                else:
                    writer.add_dense(name, data)
    return file


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"mtp.fc.weight": None}, "missing: mtp.fc.weight"),
    "dense": ({"mtp.fc.weight": torch.zeros(256, 1536)}, "expected mtp.fc.weight ternary, in"),
    "shape": ({"mtp.norm.weight": torch.zeros(8)}, r"mtp.norm.weight dense of shape \[256\]"),
    "width": ({"entry": {"intermediate_size": 512}}, "gate_proj.weight ternary.*512, 768."),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_head_that_is_not_whole_is_one_line(converted: Path, tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    file = rewritten(converted, tmp_path / "model.bin", **change)
    with pytest.raises(TensorError, match=message) as raised:
        read_draft_head(file)
    assert "\n" not in str(raised.value) and "convert the model again" in str(raised.value)
    report = convert(file, tmp_path / "copy")
    assert any(r.startswith("no draft head: expected") for r in report.remarks)
    assert read_draft_head(tmp_path / "copy") is None


def test_an_entry_without_tensors_and_tensors_without_an_entry(
    converted: Path, tmp_path: Path
) -> None:
    names = [n for n in inspect(converted)["tensors"] if n["name"].startswith("mtp.")]
    bare = rewritten(converted, tmp_path / "bare.bin", **{row["name"]: None for row in names})
    with pytest.raises(TensorError, match="got 0; missing: mtp.fc.weight"):
        read_draft_head(bare)
    with Reader(converted / "model.bin") as reader:
        config = json.loads(json.dumps(reader.config))
        del config["bitnet_ops"]["draft_head"]
        with Writer(tmp_path / "other.bin", config, len(reader.tensors)) as writer:
            for name, info in reader.tensors.items():
                scales = reader.scales(name).to(info.scale_dtype) if info.packed else None
                if scales is None:
                    writer.add_dense(name, reader.tensor(name))
                else:
                    k = info.in_features
                    writer.add_packed(name, reader.tensor(name), scales, k, info.group_size)
    with pytest.raises(ConvertError, match="unknown: mtp"):
        convert(tmp_path / "other.bin", tmp_path / "out")


# Cost ---------------------------------------------------------------------------------------------

_FULL = """
import resource, sys
from bitnet_ops.cli import main
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(["convert", *sys.argv[2:]]))
"""


def test_a_disk_that_fills_up_in_the_head_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    convert(bundle, tmp_path / "bare", tokenizer="none", draft=False)
    limit = (tmp_path / "bare" / "model.bin").stat().st_size + 100_000  # in mtp.fc
    arguments = [str(limit), str(bundle), str(tmp_path / "out"), "--tokenizer", "none"]
    command = [sys.executable, "-c", _FULL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "" and "[write-failed]" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare"]


_PEAK = """
import sys, threading, time
from bitnet_ops.convert import convert
def resident():
    with open("/proc/self/status") as file:
        return next(1024 * int(l.split()[1]) for l in file if l.startswith("RssAnon"))
for out in sys.argv[2:]:  # once for the buffers of libraries
    base, peak, stop = resident(), [0], threading.Event()
    def watch():
        while not stop.is_set():
            peak[0] = max(peak[0], resident() - base)
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    convert(sys.argv[1], out, tokenizer="none")
    stop.set()
    thread.join()
print(peak[0])
"""


@pytest.mark.slow
def test_a_head_is_streamed(tmp_path: Path) -> None:
    """Its largest matrix as float32, and pieces of its digits: never the head as a whole."""
    sizes = hybrids.Sizes(hidden=256, inter=32768, dim=128, layers=1, interval=1)
    made = hybrids.make(sizes)
    head = mtp.make(made)
    source = mtp.write_bundle(tmp_path / "source", made, head)
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, source, *(tmp_path / name for name in "ab")],
        capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    peak = int(result.stdout)
    sizes_in_bytes = [4 * matrix.size for matrix in head.matrices.values()]
    pieces = 32 << 20  # of a piece of a million weights, 27 bytes each
    limit = max(sizes_in_bytes) + pieces
    assert peak < limit < sum(sizes_in_bytes) / 1.5, (peak, limit)
