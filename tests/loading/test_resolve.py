"""`load` takes what people have: checkpoint folders, GGUF files, ids; converted once, into a cache.

Nothing is downloaded: the hub is a module of this file's. Conversions are judged against converting
by hand. Must not know formats.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import beside
import vision_models
from bitnet_ops import conversions as converting
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.generate.engine import Limits
from bitnet_ops.language_model import LanguageModel, load
from bitnet_ops.loading import hub, resolve
from bitnet_ops.loading.hub import HubError
from bitnet_ops.loading.resolve import LoadError, cache_directory
from cached_models import load_without_warning
from gguf_models import model_file
from hf_writer import FAMILIES, make_network, write_checkpoint

FAMILY = next(f for f in FAMILIES.values() if f.model_type == "llama")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", FAMILY)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    file = tmp_path / "some model.gguf"
    file.write_bytes(model_file(FAMILY, make_network(FAMILY), "llama", "I2_S"))
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources of the conversions that take place."""
    done: list[Path] = []
    original = converting._convert

    def counted(source: Path, mmproj: Path | None, target: Path) -> None:
        done.append(source)
        original(source, mmproj, target)

    monkeypatch.setattr(converting, "_convert", counted)
    return done


def tokens(lm: LanguageModel) -> list[int]:
    return lm.engine.generate([[1, 2, 3]], limits=Limits(8))[0].token_ids


def test_old_conversions_are_listed_and_removed(
    folder: Path, gguf_file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By when they were loaded last; what else lies there is nobody's to remove."""
    for source in (folder, gguf_file):
        load_without_warning(source, cache=cache)
    old, new = sorted(path for path in made(cache) if path.is_dir())
    if old.name.startswith("checkpoint-"):
        old, new = new, old
    (cache / "converted" / "mine").mkdir()
    os.utime(old, (0, 0))
    where = ["--cache", str(cache)]
    assert main(["cache", "list", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1970-01-01" in lines[0] and str(old) in lines[0] and str(new) in lines[1]
    assert lines[2].startswith("kept: 2 conversions, ")
    load_without_warning(folder, cache=cache)
    assert main(["cache", "prune", *where, "--json"]) == 0
    (gone,) = json.loads(capsys.readouterr().out)["conversions"]
    assert gone["path"] == str(old) and gone["bytes"] > 0
    assert not old.exists() and new.exists()
    assert main(["cache", "prune", *where, "--days", "0"]) == 0
    assert [path.name for path in made(cache)] == ["mine"]
    assert tokens(load_without_warning(folder, cache=cache)), "made again"
    assert main(["cache", "list", "--cache", str(cache / "none")]) == 0


def made(cache: Path) -> list[Path]:
    """The conversions in the cache: what is no lock."""
    return sorted(p for p in (cache / "converted").iterdir() if p.suffix != ".lock")


# --- kinds of sources -----------------------------------------------------------------------------


def test_a_checkpoint_folder(
    folder: Path, cache: Path, conversions: list[Path], tmp_path: Path
) -> None:
    convert(folder, tmp_path / "by hand")
    expected = load(tmp_path / "by hand")
    for _ in range(2):
        lm = load_without_warning(folder, cache=cache)
        assert tokens(lm) == tokens(expected) and lm.tokenizer.encode("ab") == expected.encode("ab")
        assert lm.stop_ids == expected.stop_ids
        state, own = expected.model.state_dict(), lm.model.state_dict()
        assert state.keys() == own.keys() and all(torch.equal(own[k], state[k]) for k in own)
    assert conversions == [folder] and len(made(cache)) == 1
    assert made(cache)[0].name.startswith("checkpoint-")


def test_a_gguf_file_and_a_folder_with_one(
    gguf_file: Path, cache: Path, conversions: list[Path], tmp_path: Path
) -> None:
    convert(gguf_file, tmp_path / "by hand")
    expected = tokens(load(tmp_path / "by hand"))
    assert tokens(load_without_warning(gguf_file, cache=cache)) == expected
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.move(gguf_file, alone / gguf_file.name)
    assert tokens(load_without_warning(alone, cache=cache)) == expected
    assert conversions[0] == gguf_file
    assert all(p.name.startswith("some_model-") for p in made(cache))
    shutil.copy(alone / gguf_file.name, alone / "other.gguf")
    with pytest.raises(LoadError, match="got 2 GGUF files; name one of them"):
        load(alone, cache=cache)


def test_a_converted_model_is_taken_as_it_is(
    folder: Path, cache: Path, conversions: list[Path], tmp_path: Path
) -> None:
    convert(folder, tmp_path / "by hand")
    for path in (tmp_path / "by hand", tmp_path / "by hand" / "model.bin"):
        for strict in (True, False):
            assert (
                load_without_warning(path, cache=cache, convert=strict).path
                == tmp_path / "by hand/model.bin"
            )
    shutil.copy(tmp_path / "by hand" / "model.bin", folder)  # a checkpoint converted in place
    assert load_without_warning(folder, cache=cache).path == folder / "model.bin"
    assert conversions == []


def test_without_conversion_it_is_strict(folder: Path, gguf_file: Path, cache: Path) -> None:
    for path, what in ((folder, "a Hugging Face checkpoint"), (gguf_file, "a GGUF file")):
        with pytest.raises(LoadError, match=f"got {what}; convert it first: bitnet-ops convert"):
            load(path, cache=cache, convert=False)
    with pytest.raises(LoadError, match="got no such file or directory"):
        load("some/where", cache=cache, convert=False)
    assert not cache.exists()


def test_where_conversions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "bitnet_ops"
    assert cache_directory("here") == Path("here")
    monkeypatch.setenv(resolve.ENVIRONMENT, str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine" and cache_directory("here") == Path("here")
    monkeypatch.delenv(resolve.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "bitnet_ops"
    for choice in (True, False):
        with pytest.raises(TypeError, match="expected cache to be a directory or None, got"):
            cache_directory(choice)


def test_the_cache_of_the_user_is_the_place_if_none_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_without_warning(folder)
    assert len(made(tmp_path / "xdg" / "bitnet_ops")) == 1
    monkeypatch.setenv(resolve.ENVIRONMENT, str(tmp_path / "env"))
    load_without_warning(folder)
    assert len(made(tmp_path / "env")) == 1


def test_a_rejection_of_the_converter_is_the_users(folder: Path, cache: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConvertError, match="config-json"):
        load(folder, cache=cache)
    assert made(cache) == []


def test_the_command_line(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(resolve.ENVIRONMENT, str(cache))
    assert main(["generate", str(folder), "ab", "-n", "3", "--no-convert"]) == 1
    assert "convert it first" in capsys.readouterr().err and not cache.exists()
    texts = []
    for options in (["--cache", "auto"], ["--cache", str(cache)]):
        assert main(["generate", str(folder), "ab", "-n", "3", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "" and len(made(cache)) == 1


# --- what a conversion belongs to -----------------------------------------------------------------


def rewrite_a_weight(folder: Path) -> None:
    """Another weight of the same size, with the times of change put back."""
    file = folder / "model.safetensors"
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 0x01
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))


def other_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')


@pytest.mark.parametrize("change", [rewrite_a_weight, other_config, other_tokenizer])
def test_a_changed_source_is_converted_anew(
    change: Callable[[Path], None], folder: Path, cache: Path, conversions: list[Path]
) -> None:
    load_without_warning(folder, cache=cache)
    change(folder)
    lm = load_without_warning(folder, cache=cache)
    assert conversions == [folder] * 2 and len(made(cache)) == 2
    if change is other_config:
        assert lm.config.rope_theta == 12345.0
    if change is other_tokenizer:
        assert lm.stop_ids == {1, 7}  # and the end that the tokenizer names


def test_a_source_that_changes_meanwhile_is_not_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["a", "b"])
    monkeypatch.setattr(converting, "_name", lambda *_: next(names))
    with pytest.raises(LoadError, match="to stay as it is while it is converted"):
        load(folder, cache=cache)
    assert made(cache) == []


# --- what is wrong with the cache ----------------------------------------------------------------


def flip_a_weight(target: Path) -> None:
    data = bytearray((target / "model.bin").read_bytes())
    data[len(data) // 2] ^= 0x55
    (target / "model.bin").write_bytes(data)


SPOILT: dict[str, Callable[[Path], Any]] = {
    "no tokenizer": lambda t: (t / "tokenizer.json").unlink(),
    "no model": lambda t: (t / "model.bin").unlink(),
    "no report": lambda t: (t / "report.json").unlink(),
    "a report of another kind": lambda t: (t / "report.json").write_text("[]"),
    "a nested report": lambda t: (t / "report.json").write_text("[" * 100000),
    "a model cut off": lambda t: os.truncate(t / "model.bin", 1000),
    "a flipped weight": flip_a_weight,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_conversion_is_made_again(name: str, folder: Path, cache: Path) -> None:
    expected = tokens(load_without_warning(folder, cache=cache))
    (target,) = made(cache)
    SPOILT[name](target)
    with pytest.warns(UserWarning, match="expected a converted model .*; it is made again") as w:
        assert tokens(load(folder, cache=cache)) == expected
    assert len(w) == 1 and made(cache) == [target]
    assert tokens(load_without_warning(folder, cache=cache)) == expected


def test_a_cache_that_is_no_directory_is_rejected(folder: Path, cache: Path) -> None:
    cache.write_text("in the way")
    with pytest.raises(LoadError, match="room for a conversion .*; name another directory"):
        load(folder, cache=cache)


def test_what_a_killed_process_left_is_removed(folder: Path, cache: Path) -> None:
    load(folder, cache=cache)
    (target,) = made(cache)
    (target.parent / f".{target.name}.making-x").mkdir()
    shutil.rmtree(target)
    load(folder, cache=cache)
    assert made(cache) == [target]


LOAD = """
import sys, warnings
warnings.simplefilter("error")
from bitnet_ops.generate.engine import Limits
from bitnet_ops.language_model import load
lm = load(sys.argv[1], cache=sys.argv[2])
print(lm.engine.generate([[1, 2, 3]], limits=Limits(8))[0].token_ids)
"""


def test_at_the_same_time(folder: Path, cache: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(folder), str(cache)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    texts = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert texts == [f"{tokens(load(folder, cache=cache))}\n"] * 3 and len(made(cache)) == 1


# --- ids ------------------------------------------------------------------------------------------


def test_a_folder_of_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    """What people find in ~/.cache/huggingface/hub: the revision in it is meant."""
    home = tmp_path / "models--org--name"
    (home / "snapshots").mkdir(parents=True)
    folder.rename(home / "snapshots" / "0123")
    assert hub.local_path(home) == home / "snapshots" / "0123"
    (home / "snapshots" / "4567").mkdir()
    with pytest.raises(HubError, match="expected one revision, got 2 of them"):
        hub.local_path(home)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123")
    assert hub.local_path(home) == home / "snapshots" / "0123"
    assert hub.local_path(tmp_path) == tmp_path


class FakeHub(types.ModuleType):
    """What resolve.py uses of huggingface_hub, over a folder; `log` has what was asked for."""

    def __init__(self, files: Path | None, *, offline: bool = False, here: bool = False) -> None:
        super().__init__("huggingface_hub")
        self.constants = types.SimpleNamespace(HF_HUB_OFFLINE=offline)
        self._files, self._here, self.log = files, here, [""][:0]

    def HfApi(self) -> FakeHub:
        return self

    def list_repo_files(self, repo: str) -> list[str]:
        self.log.append(f"list {repo}")
        if self._files is None:
            raise ConnectionError("no route to the hub\nand a second line")
        return sorted(p.relative_to(self._files).as_posix() for p in self._files.rglob("*.*"))

    def snapshot_download(
        self, repo: str, *, allow_patterns: Any = None, local_files_only: bool = False
    ) -> str:
        self.log.append(f"{'find' if local_files_only else 'get'} {repo}")
        self.patterns = allow_patterns
        if self._files is None or (local_files_only and not self._here):
            raise FileNotFoundError("no snapshot")
        return str(self._files)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    def put(*args: Any, **options: Any) -> FakeHub:
        fake = FakeHub(*args, **options)
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        return fake

    return put


Install = Callable[..., FakeHub]


def test_an_id_is_downloaded_and_converted_once(
    folder: Path, cache: Path, conversions: list[Path], install: Install
) -> None:
    fake = install(folder)
    expected = tokens(load_without_warning(folder, cache=cache))
    assert tokens(load_without_warning("org/name", cache=cache)) == expected and conversions == [
        folder
    ]
    assert fake.log == ["list org/name", "get org/name"]
    assert "*.safetensors" in fake.patterns and "config.json" in fake.patterns
    assert inspect("org/name")["kind"] == "Hugging Face checkpoint"


def test_an_id_with_one_gguf_file(gguf_file: Path, cache: Path, install: Install) -> None:
    repo = gguf_file.parent / "repo"
    repo.mkdir()
    shutil.move(gguf_file, repo / "model.gguf")
    fake = install(repo)
    assert tokens(load_without_warning("org/name", cache=cache))
    assert fake.patterns == ["model.gguf"]
    (repo / "other.gguf").touch()
    with pytest.raises(HubError, match=r"one GGUF file, got model.gguf, other.gguf; .*name:model$"):
        load("org/name", cache=cache)
    (repo / "other.gguf").unlink()
    (repo / "model.gguf").rename(repo / "weights.pth")
    with pytest.raises(HubError, match="safetensors or a GGUF file, got 1 other file;"):
        load("org/name", cache=cache)


def test_convert_takes_an_id(folder: Path, tmp_path: Path, install: Install) -> None:
    install(folder)
    assert main(["convert", "org/name", str(tmp_path / "out")]) == 0
    assert tokens(load(tmp_path / "out"))


def test_offline_nothing_is_asked_for(folder: Path, cache: Path, install: Install) -> None:
    fake = install(folder, offline=True)
    message = "HF_HUB_OFFLINE is set, got no copy of it; download it .* and give the folder"
    with pytest.raises(HubError, match=message):
        load("org/name", cache=cache)
    assert fake.log == ["find org/name"] and not cache.exists()
    fake = install(folder, offline=True, here=True)
    assert tokens(load_without_warning("org/name", cache=cache))
    assert fake.log == ["find org/name"]


def test_a_hub_that_cannot_be_reached(folder: Path, cache: Path, install: Install) -> None:
    install(None)
    with pytest.raises(HubError, match="got ConnectionError: no route to the hub; download") as e:
        load("org/name", cache=cache)
    assert "\n" not in str(e.value)


def test_the_real_library_offline(cache: Path) -> None:
    """conftest.py sets HF_HUB_OFFLINE; the library itself rejects."""
    pytest.importorskip("huggingface_hub", reason="an optional extra, which transformers brings")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, got no copy of it"):
        load("no-such-organisation/no-such-model", cache=cache)


def test_without_the_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["generate", "org/name", "a prompt"]) == 1
    error = capsys.readouterr().err
    assert "pip install 'huggingface_hub>=0.30', or download it" in error and error.count("\n") == 1


def test_paths_win_over_ids(
    folder: Path, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(None)
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert tokens(load_without_warning("org/name", cache=tmp_path / "cache")) and fake.log == []
    (tmp_path / "org" / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(LoadError, match="got no such file or directory"):
        load("org/dangling")
    assert fake.log == []


@pytest.mark.parametrize(
    "text",
    ["name", "/org/name", "./name", "../name", "org/name/more", "org/model.bin", "org/m.gguf"]
    + ["~/name", "org/", "/", "", ".", "org/na me", "-x/name", "org/na\0me", "org/name\n"]
    + ["org/name:", "org/name:a/b", "org/name.gguf:a", "C:/name", "org/name: a"],
)
def test_what_is_no_id(text: str) -> None:
    assert not hub.is_id(text)


@pytest.mark.parametrize(
    "text", ["org/name", "microsoft/bitnet-b1.58-2B-4T", "a_b/c.d", "o1/n-x", "org/name:PQ2_0"]
)
def test_what_is_an_id(text: str) -> None:
    assert hub.is_id(text) and hub.is_id(Path(text))


def test_an_id_of_a_package_with_all_that_writers_add(
    folder: Path, cache: Path, install: Install
) -> None:
    """mlx-lm's index, and weights once more in folders and files that are left where they are."""
    expected = tokens(load_without_warning(folder, cache=cache))
    for writer in ("mlx-lm", "mistral", "trainer"):
        beside.write(folder, writer)
    fake = install(folder)
    assert tokens(load_without_warning("org/name", cache=cache)) == expected
    assert "model.safetensors" in fake.patterns and "*.safetensors" not in fake.patterns
    assert not any("checkpoint-10" in p or "consolidated" in p for p in fake.patterns)


def test_an_id_with_a_tower_beside_its_gguf_file(
    gguf_file: Path, cache: Path, install: Install
) -> None:
    """A model that reads texts alone has no use for one."""
    repo = gguf_file.parent / "repo"
    repo.mkdir()
    shutil.move(gguf_file, repo / "model.gguf")
    for name in ("mmproj-F16.gguf", "model.imatrix.gguf"):
        (repo / name).touch()
    fake = install(repo)
    assert tokens(load_without_warning("org/name", cache=cache))
    assert fake.patterns == ["model.gguf"] and len(fake.log) == 2


class Copies(FakeHub):
    """A hub whose snapshot has no more than what was asked for, as the library's."""

    def snapshot_download(self, repo: str, **options: Any) -> str:
        source = Path(super().snapshot_download(repo, **options))
        target = source.parent / "snapshot"
        target.mkdir(exist_ok=True)
        for name in source.iterdir() if options.get("allow_patterns") else ():
            if any(fnmatch(name.name, pattern) for pattern in self.patterns):
                shutil.copyfile(name, target / name.name)
        return str(target)


def test_an_id_with_one_of_many_gguf_files_and_its_tower(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PrismML publishes: several types, one with a layer that drafts, and a tower."""
    repo = tmp_path / "repo"
    made = vision_models.write_gguf(repo)
    (repo / "mmproj-F16.gguf").rename(repo / "Some-2-2B-mmproj-Q8_0.gguf")
    for name in ("Some-2-2B-PQ2_0-MTP-Q8_0.gguf", "Some-2-2B-Q2_0.gguf", "mmproj-F16.gguf"):
        shutil.copyfile(repo / "Some-2-2B-mmproj-Q8_0.gguf", repo / name)
    made.rename(repo / "Some-2-2B-PQ2_0.gguf")
    fake = Copies(repo)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    for name in ("org/name", "org/name:MTP2"):
        with pytest.raises(HubError, match=r"Q2_0.gguf; name one behind a colon: org/name:\S+$"):
            load(name, cache=cache)
    lm = load_without_warning("org/name:pq2_0", cache=cache)
    assert lm.images is not None
    files = {file.name for file in (tmp_path / "snapshot").iterdir()}
    assert files == {"Some-2-2B-PQ2_0.gguf", "Some-2-2B-mmproj-Q8_0.gguf"}
    offline = Copies(repo, offline=True, here=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", offline)
    assert load_without_warning("org/name:PQ2_0.gguf", cache=cache).images is not None
    with pytest.raises(HubError, match="one GGUF file with Q8_0 in its name in .*, got 0"):
        load("org/name:Q8_0", cache=cache)
