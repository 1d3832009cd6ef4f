"""What a command writes never costs what was there: renames, one rule for every command.

What is written is other tests' business.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_writer
from bitnet_ops import training
from bitnet_ops.bench import ops as bench_ops
from bitnet_ops.bench import report
from bitnet_ops.cli import bench, main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert import write as convert_write
from bitnet_ops.convert.gguf_export import export_gguf
from bitnet_ops.convert.quantize import quantize
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats import atomic, destination
from bitnet_ops.formats.destination import DestinationError
from bitnet_ops.language_model import DEMO_DIR
from hf_writer import FAMILIES
from isa_control import torch_threads
from slow_conversion import SLOW

OFFLINE, ONLINE = FAMILIES["bitnet-offline"], FAMILIES["bitnet-online"]


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


@pytest.fixture(params=["hard links", "none"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with hard links, and one without them."""

    def reject(*args: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if request.param == "none":
        monkeypatch.setattr(atomic.os, "link", reject)


@pytest.mark.parametrize("there", ["file", "full folder", "link", "nothing"])
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.usefixtures("links")
def test_rename_new_replaces_nothing(what: str, there: str, tmp_path: Path) -> None:
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
    elif there == "full folder":
        target.mkdir()
        (target / "thesis").write_text("ten years")
    before = tree(tmp_path)
    if there == "nothing":
        atomic.rename_new(source, target)
        assert tree(tmp_path) == {name.replace("a", "b", 1): data for name, data in before.items()}
        return
    with pytest.raises(FileExistsError):
        atomic.rename_new(source, target)
    assert tree(tmp_path) == before and target.is_symlink() == (there == "link")


# The rule -------------------------------------------------------------------------------------


def test_what_comes_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with (
        pytest.raises(DestinationError, match="destination-exists"),
        destination.new_folder(target) as folder,
    ):
        (folder / "model.bin").write_bytes(b"SGLBITNT")
        target.mkdir()
        (target / "thesis").write_text("ten years")
    assert tree(tmp_path) == {"out": b"<folder>", "out/thesis": b"ten years"}


def test_what_comes_meanwhile_stays_under_replace_too(tmp_path: Path) -> None:
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


def test_an_earlier_result_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "out", atomic.rename_new
    target.mkdir()
    (target / "model.bin").write_bytes(b"SGLBITNT")

    def refuse(source: Path, place: Path) -> None:
        if source.name == "new":
            raise OSError(28, "No space left on device")
        rename(source, place)

    monkeypatch.setattr(destination, "rename_new", refuse)
    with (
        pytest.raises(OSError, match="No space"),
        destination.new_folder(target, replace=True) as folder,
    ):
        (folder / "model.bin").write_bytes(b"SGLBITNT new")
    assert tree(tmp_path) == {"out": b"<folder>", "out/model.bin": b"SGLBITNT"}


def test_of_two_writers_the_first_to_end_has_the_name(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with (
        pytest.raises(DestinationError, match="destination-exists"),
        destination.new_folder(target) as slow,
    ):
        (slow / "x").write_text("second")
        with destination.new_folder(target) as fast:
            (fast / "x").write_text("first")
    assert tree(tmp_path) == {"out": b"<folder>", "out/x": b"first"}


def test_remains_of_killed_runs_neither_block_nor_stay(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom bitnet_ops.formats import destination\n"
        "with destination.new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'x').write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with destination.new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("whole")
        assert left.exists()  # so young, it may belong to a process that has just begun
    os.utime(left, (0, 0))
    with atomic.beside(tmp_path / "out"):
        assert not left.exists()
    assert tree(tmp_path) == {"out": b"<folder>", "out/x": b"whole"}


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_living_writer_is_not_swept_away(
    locks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reject(*args: object) -> None:
        raise OSError(37, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", reject)
    with atomic.beside(tmp_path / "out") as place:
        (place / "large").write_text("intermediate")
        os.utime(place, (0, 0))
        with destination.new_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("whole")
        assert (place / "large").read_text() == "intermediate"
    assert os.listdir(tmp_path) == ["out"]


def test_long_names(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    for replace in (False, True):
        with destination.new_folder(target, replace=replace) as folder:
            (folder / "model.bin").write_bytes(b"SGLBITNT")
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
    target, build = tmp_path / "out", convert_write._write

    def slow(*args: Any) -> Any:
        result = build(*args)
        target.mkdir()
        (target / "thesis.txt").write_text("ten years")
        return result

    monkeypatch.setattr(convert_write, "_write", slow)
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
            assert "destination-exists" in stderr
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


# Mount points -------------------------------------------------------------------------------------

MOUNTS = (
    "21 1 0:20 / / rw - ext4 /dev/x rw\n22 21 0:21 / {0}/out rw,relatime shared:1 - tmpfs none rw\n"
    "23 21 0:22 /f {0}/a\\040b.gguf rw - ext4 /dev/x rw\n"
)


def test_mount_points_are_read_from_the_table(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text(MOUNTS.format(tmp_path.resolve()))
    for name, mounted in (("out", True), ("out/model", False), ("a b.gguf", True), ("a", False)):
        assert atomic.is_mount(tmp_path / name, table) == mounted
    assert atomic.is_mount(Path("/proc")) and not atomic.is_mount(tmp_path)


@pytest.mark.parametrize("force", [False, True])
def test_a_mount_point_is_rejected_before_the_work(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, force: bool
) -> None:
    """As `docker run -v $PWD/out:/out` makes it: nothing can be renamed to it at the end."""
    (tmp_path / "out").mkdir()
    (tmp_path / "m.gguf").touch()
    places = {str(tmp_path / "out"), str(tmp_path / "m.gguf")}
    monkeypatch.setattr(destination, "is_mount", lambda path: str(path) in places)
    monkeypatch.setattr(convert_write, "_write", None)
    with pytest.raises(ConvertError, match=r"name a new folder in it, as .*out/model") as caught:
        convert(source, tmp_path / "out", force=force)
    assert caught.value.code == "destination-mount"
    with pytest.raises(ConvertError, match="mount its folder instead"):
        export_gguf(DEMO_DIR, tmp_path / "m.gguf", force=force)
