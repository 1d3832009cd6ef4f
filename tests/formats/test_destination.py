"""What a command writes never costs what was there: renames, locks, one rule for every command.

What is written is other tests' business. The rule is tried with the system's own calls for renaming
and with what stands in for them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_writer
from bitnet_ops import training
from bitnet_ops.bench import ops as bench_ops
from bitnet_ops.bench import report
from bitnet_ops.cli import bench, main
from bitnet_ops.convert import ConvertError, convert, pipeline
from bitnet_ops.convert.gguf.export import export_gguf
from bitnet_ops.convert.quantize import quantize
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats import destination, renames
from bitnet_ops.formats.destination import DestinationError
from bitnet_ops.language_model import DEMO_DIR
from hf_writer import FAMILIES
from isa_control import torch_threads
from slow_conversion import SLOW

OFFLINE, ONLINE = FAMILIES["bitnet-offline"], FAMILIES["bitnet-online"]


@pytest.fixture(params=["system", "portable"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Renaming by the system's calls, and without them."""
    if request.param == "portable":
        monkeypatch.setattr(renames, "_system_call", lambda how: None)
    return str(request.param)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(hf_writer.write_checkpoint(tmp_path_factory.mktemp("checkpoint"), OFFLINE))


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(hf_writer.write_checkpoint(tmp_path_factory.mktemp("masters"), ONLINE))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with torch_threads(1):
        yield


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its content; folders with none."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"<folder>"
        for p in folder.rglob("*")
    }


# Renames --------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["file", "folder", "full folder", "link"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_rename_new_replaces_nothing(what: str, there: str, how: str, tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    if what == "file":
        source.write_text("new")
    else:
        source.mkdir()
        (source / "x").write_text("new")
    if there == "file":
        target.write_text("old")
    elif there == "link":
        target.symlink_to("nowhere")
    else:
        target.mkdir()
        if there == "full folder":
            (target / "thesis").write_text("ten years")
    before = tree(tmp_path)
    with pytest.raises(FileExistsError):
        renames.rename_new(source, target)
    assert tree(tmp_path) == before and target.is_symlink() == (there == "link")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_rename_new_and_exchange(what: str, how: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        path = tmp_path / name
        if what == "folder":
            path.mkdir()
            path = path / "x"
        path.write_text(name)
    renames.exchange(tmp_path / "a", tmp_path / "b")
    assert sorted(tree(tmp_path).values())[-2:] == [b"a", b"b"]
    inner = "x" if what == "folder" else ""
    assert (tmp_path / "a" / inner).read_text() == "b"
    renames.rename_new(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c" / inner).read_text() == "b" and not (tmp_path / "a").exists()


def test_a_file_system_without_hard_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reject(*args: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(renames, "_system_call", lambda how: None)
    monkeypatch.setattr(renames.os, "link", reject)
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    with pytest.raises(FileExistsError):
        renames.rename_new(tmp_path / "a", tmp_path / "b")
    renames.rename_new(tmp_path / "a", tmp_path / "c")
    assert tree(tmp_path) == {"b": b"old", "c": b"new"}


def test_the_system_has_the_calls() -> None:
    """Linux and macOS; the stand-ins are for file systems that lack them."""
    if sys.platform in ("linux", "darwin"):
        assert renames._system_call("new") and renames._system_call("exchange")


# The rule -------------------------------------------------------------------------------------


def test_what_comes_meanwhile_stays(how: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with (
        pytest.raises(DestinationError, match="destination-exists"),
        destination.new_folder(target) as folder,
    ):
        (folder / "model.bin").write_bytes(b"SGLBITNT")
        target.mkdir()
        (target / "thesis").write_text("ten years")
    assert tree(tmp_path) == {"out": b"<folder>", "out/thesis": b"ten years"}


def test_what_comes_meanwhile_stays_under_replace_too(how: str, tmp_path: Path) -> None:
    """An earlier result at the start, something else in its place at the end."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "model.bin").write_bytes(b"SGLBITNT")
    with (
        pytest.raises(DestinationError, match="destination-foreign.*|.*thesis"),
        destination.new_folder(target, replace=True) as folder,
    ):
        (folder / "model.bin").write_bytes(b"SGLBITNT new")
        (target / "thesis").write_text("ten years")
    assert tree(target) == {"model.bin": b"SGLBITNT", "thesis": b"ten years"}
    assert os.listdir(tmp_path) == ["out"]


FOREIGN: dict[str, Callable[[Path], object]] = {
    "names of ours, no model": lambda p: (p / "tokenizer.json").write_text("{}"),
    "another model.bin": lambda p: (p / "model.bin").write_bytes(b"weights"),
    "a folder under a name of ours": lambda p: (p / "report.json").mkdir(),
    "a link under a name of ours": lambda p: (p / "report.json").symlink_to("/etc/hosts"),
    "another file": lambda p: (p / "thesis").write_text("ten years"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_that_is_not_ours_is_not_replaced(name: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    if name != "another model.bin":
        (target / "model.bin").write_bytes(b"SGLBITNT")
    if name == "names of ours, no model":
        (target / "model.bin").unlink()
    FOREIGN[name](target)
    before = tree(tmp_path)
    with (
        pytest.raises(DestinationError) as caught,
        destination.new_folder(target, replace=True),
    ):
        pytest.fail("it must not begin")
    assert caught.value.code == "destination-foreign" and tree(tmp_path) == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    target, started, go = tmp_path / "out", threading.Event(), threading.Event()

    def slow() -> None:
        with destination.new_folder(target) as folder:
            started.set()
            go.wait(60)
            (folder / "x").write_text("first")

    writer = threading.Thread(target=slow)
    writer.start()
    started.wait(60)
    with (
        pytest.raises(DestinationError, match="another process that is writing it"),
        destination.new_folder(target),
    ):
        pytest.fail("two at a time")
    with destination.new_folder(tmp_path / "other") as folder:  # only this destination is taken
        (folder / "x").write_text("other")
    go.set()
    writer.join()
    assert tree(target) == {"x": b"first"} and sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_remains_of_killed_runs_neither_block_nor_stay(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom bitnet_ops.formats import destination\n"
        "with destination.new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'x').write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 2
    with destination.new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("whole")
    assert tree(tmp_path) == {"out": b"<folder>", "out/x": b"whole"}


def test_a_living_writer_is_not_swept_away(tmp_path: Path) -> None:
    with destination.beside(tmp_path / "out") as place:
        (place / "large").write_text("intermediate")
        with destination.new_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("whole")
        assert (place / "large").read_text() == "intermediate"
    assert os.listdir(tmp_path) == ["out"]


def test_where_there_are_no_locks_nothing_is_swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reject(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", reject)
    with destination.beside(tmp_path / "out") as place:
        with destination.new_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("whole")
        assert place.is_dir()
    assert os.listdir(tmp_path) == ["out"]


def test_long_names(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    with destination.new_folder(target) as folder:
        (folder / "x").write_text("whole")
    assert os.listdir(tmp_path) == [target.name]


# Every command --------------------------------------------------------------------------------


def run_bench(target: Path, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    """`bench ops --output`, the measuring itself left out."""
    made = {"schema": "bitnet_ops.bench.ops", "ok": True}
    monkeypatch.setattr(bench_ops, "run", lambda settings, progress: dict(made))
    monkeypatch.setattr(report, "lines", lambda result: [])
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = ["ops", "--quick", "--output", str(target), *(["--force"] if force else [])]
    assert bench.run(parser.parse_args(options)) == 0


@pytest.fixture
def writers(
    source: Path, masters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Callable[[Path, bool], object]]:
    options = {"assume_trained": True}

    def trained(target: Path, force: bool) -> None:
        training.export(training.load_for_training(masters), target, form="bin", force=force)

    return {
        "convert": lambda t, force: convert(source, t, force=force),
        "quantize": lambda t, force: quantize(masters, t, force=force, **options),
        "dummy": lambda t, force: dummy.write("tiny", t, force=force),
        "training.export": trained,
        "export": lambda t, force: export_gguf(DEMO_DIR, t, tokenizer=False, force=force),
        "bench --output": lambda t, force: run_bench(t, monkeypatch, force),
    }


COMMANDS = ("convert", "quantize", "dummy", "training.export", "export")
COMMANDS += ("bench --output",)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_keeps_the_rule(
    name: str, writers: dict[str, Callable[[Path, bool], object]], tmp_path: Path
) -> None:
    assert set(writers) == set(COMMANDS)
    write, home = writers[name], tmp_path / "home"
    home.mkdir()
    target = home / "out"
    write(target, False)
    first = tree(home)
    with pytest.raises((ConvertError, DestinationError), match="destination-exists"):
        write(target, False)
    assert tree(home) == first
    write(target, True)  # an earlier result is replaced
    assert set(tree(home)) == set(first)
    thesis = home / "thesis.png"
    thesis.write_text("ten years")
    for force, code in ((False, "destination-exists"), (True, "destination-foreign")):
        with pytest.raises((ConvertError, DestinationError), match=code):
            write(thesis, force)
    assert thesis.read_text() == "ten years" and len(os.listdir(home)) == 2


def test_dummy_does_not_overwrite_a_converted_model(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source, tmp_path / "my-demo")
    before = tree(tmp_path)
    assert main(["dummy", "tiny", str(tmp_path / "my-demo")]) == 1
    assert "destination-exists" in capsys.readouterr().err and tree(tmp_path) == before


def test_a_folder_made_during_a_conversion_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, build = tmp_path / "out", pipeline._write

    def slow(*args: Any) -> Any:
        result = build(*args)
        target.mkdir()
        (target / "thesis.txt").write_text("ten years")
        return result

    monkeypatch.setattr(pipeline, "_write", slow)
    with pytest.raises(ConvertError, match="destination-exists"):
        convert(source, target)
    assert tree(tmp_path) == {"out": b"<folder>", "out/thesis.txt": b"ten years"}


def test_of_three_at_once_one_says_that_it_wrote(source: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "bitnet_ops", "convert", str(source), str(tmp_path / "out")]
    running = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    done = [(process.communicate(timeout=120), process.returncode) for process in running]
    assert sorted(status for _, status in done) == [0, 1, 1], done
    for (_, stderr), status in done:
        if status:
            assert "destination-busy" in stderr or "destination-exists" in stderr
    assert os.listdir(tmp_path) == ["out"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["tensors"] == 24


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_leaves_nothing(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    command_line = [sys.executable, "-c", SLOW, "convert", str(source), str(tmp_path / "out")]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"tensor\n"
        assert os.listdir(tmp_path)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number and stderr == b""
    assert os.listdir(tmp_path) == []
