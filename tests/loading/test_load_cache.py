"""The load cache: used when it fits, else made again, and never in the way.

Its files are read or mapped, and nothing but the time may tell. Must not know CPU-specific layouts.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitnet_ops.cli import main
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.sglbitnt import MODEL_FILE, Reader
from bitnet_ops.language_model import DEMO_DIR, load
from bitnet_ops.loading import cache_files, load_cache
from bitnet_ops.nn.packing import PackedWeight
from bitnet_ops.nn.storage import CPU_SPECIFIC
from cached_models import cache as cache
from cached_models import files, load_without_warning, tokens
from cached_models import model_dir as model_dir


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache_files.ENVIRONMENT, raising=False)


def map_all(descriptor: int) -> torch.Tensor:
    """map_huge without its conditions: any size, pages of any size."""
    return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


@pytest.fixture(params=["read", "mapped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache files are read into memory of our own, or mapped."""
    read = request.param == "read"
    monkeypatch.setattr(load_cache, "map_huge", (lambda descriptor: None) if read else map_all)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that loading takes from the model file."""
    names: list[str] = []
    original = Reader.tensor

    def tensor(self: Reader, name: str) -> torch.Tensor:
        names.append(name)
        return original(self, name)

    monkeypatch.setattr(Reader, "tensor", tensor)
    return names


@pytest.mark.parametrize(
    "formats",
    [("auto", "int4"), ("auto", "bf16"), *((name, "stored") for name in CPU_SPECIFIC)],
    ids="/".join,
)
@pytest.mark.usefixtures("way")
def test_the_second_load_reads_the_cache_alone(
    formats: tuple[str, str], model_dir: Path, cache: Path, reads: list[str]
) -> None:
    options = dict(zip(("weight_format", "head_format"), formats, strict=True))
    plain = load(model_dir, **options)  # type: ignore[arg-type]
    first = load_without_warning(model_dir, **options, cache=cache)
    assert len(files(cache)) == 1 and reads
    reads.clear()
    second = load_without_warning(model_dir, **options, cache=cache)
    assert not reads
    assert tokens(plain) == tokens(first) == tokens(second)
    state = plain.model.state_dict()
    for lm in (first, second):
        assert lm.model.weight_format == plain.model.weight_format
        assert lm.model.head.head_format == plain.model.head.head_format
        got = lm.model.state_dict()
        assert got.keys() == state.keys()
        assert all(torch.equal(got[name], value) for name, value in state.items())


@pytest.mark.usefixtures("way")
def test_weights_from_the_cache_are_one_sequential_read(model_dir: Path, cache: Path) -> None:
    for _ in range(2):
        model = load(model_dir, cache=cache).model
    layers = model.model.layers
    names = [f"self_attn.{p}_proj" for p in "qkvo"]
    names += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    weights = [layer.get_buffer(f"{name}.weight") for layer in layers for name in names]
    for before, after in zip(weights, weights[1:], strict=False):
        assert after.data_ptr() == before.data_ptr() + -(-before.nbytes // 64) * 64


def test_a_cache_is_read_where_pages_are_dealt_out_to_memory_nodes(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into memory of our own, for pages of a file lie where the system has cached it."""
    mapped = []

    def map_and_note(descriptor: int) -> torch.Tensor:
        mapped.append(descriptor)
        return map_all(descriptor)

    monkeypatch.setattr(load_cache, "map_huge", map_and_note)
    expected = tokens(load(model_dir, cache=cache))
    assert tokens(load(model_dir, cache=cache)) == expected and len(mapped) == 1
    monkeypatch.setattr(load_cache._runtime, "interleaves_pages", lambda: True)
    assert tokens(load_without_warning(model_dir, cache=cache)) == expected
    assert len(mapped) == 1


def test_a_file_for_every_format_and_source(model_dir: Path, cache: Path) -> None:
    every = len(CPU_SPECIFIC)
    # "auto" is one of those; the file's own rows are mapped
    for i, weight_format in enumerate((*CPU_SPECIFIC, "auto", "canonical"), 1):
        load_without_warning(model_dir, weight_format=weight_format, cache=cache)
        assert len(files(cache)) == min(i, every), weight_format
    load_without_warning(model_dir, head_format="int4", cache=cache)
    load_without_warning(DEMO_DIR, cache=cache)
    assert len(files(cache)) == every + 2


def test_a_model_may_move_and_keeps_its_cache(
    model_dir: Path, cache: Path, reads: list[str], tmp_path: Path
) -> None:
    load(model_dir, cache=cache)
    reads.clear()
    load(shutil.move(model_dir, tmp_path / "moved"), cache=cache)
    assert not reads and len(files(cache)) == 1


def test_a_changed_model_gets_another_file(model_dir: Path, cache: Path, tmp_path: Path) -> None:
    first = load(model_dir, cache=cache)
    times = os.stat(model_dir / MODEL_FILE)
    dummy.write("tiny", model_dir, seed=1, force=True)
    os.utime(model_dir / MODEL_FILE, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = load_without_warning(model_dir, cache=cache)  # same size, same time, other data
    assert len(files(cache)) == 2 and tokens(first) != tokens(second)
    os.utime(model_dir / MODEL_FILE, ns=(1, 1))
    load_without_warning(model_dir, cache=cache)  # the content counts, not the time
    assert len(files(cache)) == 2


def flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        i = at % len(data)
        return data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :]

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[:20],
    "cut in the JSON": lambda data: data[:300],
    "cut in the data": lambda data: data[:-200],
    "cut at a line": lambda data: data[:-64],
    "longer": lambda data: data + bytes(64),
    "another file": lambda data: b"GIF89a" * 1000,
    "another version": lambda data: data[:8] + b"\x63" + data[9:],
    "a huge JSON": lambda data: data[:12] + b"\xff" * 8 + data[20:],
    "another magic": flip(0),
    "a bit of the digest": flip(25),
    "a bit of the JSON": flip(120),
    "a bit of the data": flip(-100),
    "a bit in the middle": flip(150000),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.usefixtures("way")
def test_damaged_files_are_ignored_with_a_warning_and_made_again(
    name: str, model_dir: Path, cache: Path, reads: list[str]
) -> None:
    expected = tokens(load(model_dir, cache=cache))
    (file,) = files(cache)
    good = file.read_bytes()
    bad = DAMAGE[name](good)
    assert bad != good
    file.write_bytes(bad)
    with pytest.warns(UserWarning, match="expected a cached model in .*; it is made again") as w:
        assert tokens(load(model_dir, cache=cache)) == expected
    assert len(w) == 1
    assert files(cache) == [file] and file.read_bytes() == good
    reads.clear()
    load_without_warning(model_dir, cache=cache)
    assert not reads


def test_the_file_of_another_model_is_ignored(model_dir: Path, cache: Path) -> None:
    expected = tokens(load(model_dir, cache=cache))
    (file,) = files(cache)
    dummy.write("tiny", model_dir.parent / "other", seed=1)
    load(model_dir.parent / "other", cache=cache)
    (other,) = set(files(cache)) - {file}
    shutil.copy(other, file)
    with pytest.warns(UserWarning, match="got the cached form of another model"):
        assert tokens(load(model_dir, cache=cache)) == expected


def test_a_cache_that_cannot_be_written_costs_a_warning(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="going on without") as caught:
        assert tokens(load(model_dir, cache=tmp_path / "file")) == tokens(load(model_dir))
    assert len(caught) == 1


def test_nothing_is_left_behind(model_dir: Path, cache: Path) -> None:
    load(model_dir, cache=cache)
    (file,) = files(cache)
    assert file.suffix == ".prepared" and len(file.stem) == 32
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    shutil.rmtree(cache)  # safe to delete, at any time
    load_without_warning(model_dir, cache=cache)
    assert files(cache) == [file]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_files.directory(None) is None and cache_files.directory(False) is None
    assert cache_files.directory(True) == tmp_path / "xdg" / "bitnet_ops"
    assert cache_files.directory(tmp_path) == tmp_path
    assert cache_files.directory("here") == Path("here")
    monkeypatch.setenv(cache_files.ENVIRONMENT, str(tmp_path / "mine"))
    assert cache_files.directory(None) == cache_files.directory(True) == tmp_path / "mine"
    assert cache_files.directory(False) is None and cache_files.directory("here") == Path("here")
    monkeypatch.delenv(cache_files.ENVIRONMENT)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_files.directory(True) == tmp_path / ".cache" / "bitnet_ops"


def test_command_line_and_environment(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "And God said unto", "-n", "8"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "xdg"))
    assert main(command) == 0
    assert not cache.exists()
    assert main([*command, "--cache", "auto"]) == 0
    assert len(files(cache / "xdg" / "bitnet_ops")) == 1
    monkeypatch.setenv(cache_files.ENVIRONMENT, str(cache / "env"))
    assert main(command) == 0
    assert len(files(cache / "env")) == 1
    texts = capsys.readouterr().out.splitlines()
    assert len(texts) == 3 and len(set(texts)) == 1


@pytest.mark.usefixtures("way")
def test_odd_tensors_survive(tmp_path: Path) -> None:
    """Sizes that fill no line, no dimension, every dtype that a model has."""
    tensors: dict[str, torch.Tensor | PackedWeight] = {
        "a": torch.arange(7, dtype=torch.float16),
        "b": torch.tensor(2.5),
        "c": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "d": torch.arange(33, dtype=torch.int8).view(3, 11),
        "e": torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).t(),
    }
    load_cache.write(tmp_path / "x", tensors)
    got = load_cache.read(tmp_path / "x")
    assert got is not None and got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        value = got[name]
        assert isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor)
        assert value.dtype == tensor.dtype and torch.equal(value, tensor)
    load_cache.write(tmp_path / "empty", {})
    assert load_cache.read(tmp_path / "empty") == {}
