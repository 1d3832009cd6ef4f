"""The prefix cache on disk: files, and engines that find again what earlier ones computed.

Whatever lies in the directory, an engine's tokens are those that it gives without one.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import bitnet_ops
import hf_writer
from bitnet_ops.convert import convert
from bitnet_ops.generate import prefix_store
from bitnet_ops.generate.engine import Engine, Limits, SamplingParams, SchedulerOptions
from bitnet_ops.generate.prefix_store import PrefixStore, bytes_of, copy_parts
from bitnet_ops.language_model import DEMO_DIR, load
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_config import KV_DTYPES
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.lora import Adapter, LoraWeight
from hybrid_models import hybrid
from isa_control import torch_threads
from paged_fake import FakeEngine
from tiny_models import SMALL, tiny_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# Files ------------------------------------------------------------------------------------------

KEYS = [bytes([i]) * 32 for i in range(40)]


def parts_of(number: int, numbers: int = 250) -> list[Tensor]:
    """Three parts of other types, one of them no multiple of eight bytes."""
    values = torch.arange(numbers) + number
    return [values.to(torch.bfloat16), values[:7].to(torch.int8), values.float().view(5, -1)]


def read(store: PrefixStore, key: bytes, like: list[Tensor]) -> list[Tensor] | None:
    piece = store.read(key, bytes_of(like))
    if piece is None:
        return None
    found = [torch.empty_like(part) for part in like]
    copy_parts(found, piece, back=True)
    return found


def same(found: list[Tensor] | None, parts: list[Tensor]) -> bool:
    return found is not None and all(map(torch.equal, found, parts))


def fill(store: PrefixStore, keys: list[bytes], **options: Any) -> None:
    for i, key in enumerate(keys):
        assert store.put(key, parts_of(i), time.time_ns(), **options)
    assert store.flush(10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    store = PrefixStore(tmp_path / "prefix", 10)
    yield store
    store.close()


def test_what_is_put_is_read_by_another_store(store: PrefixStore) -> None:
    fill(store, KEYS[:5])
    other = PrefixStore(store.directory, 10)
    assert other.flush(10) and other.counts == store.counts and other.counts[0] == 5
    for i, key in enumerate(KEYS[:5]):
        assert other.exists(key) and same(read(other, key, parts_of(i)), parts_of(i))
    assert not other.exists(KEYS[5]) and read(other, KEYS[5], parts_of(0)) is None
    other.close()


def test_nobody_else_may_read_it(store: PrefixStore) -> None:
    fill(store, KEYS[:1])
    assert store.directory.stat().st_mode & 0o777 == 0o700
    (file,) = store.directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def other_version(data: bytes) -> bytes:
    return data[:8] + (prefix_store.VERSION + 1).to_bytes(4, "little") + data[12:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "torn header": lambda data: data[:40],
    "torn": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zeros, as after a power cut": lambda data: bytes(len(data)),
    "zeros behind": lambda data: data[:512] + bytes(len(data) - 512),
    "another version": other_version,
    "foreign": lambda data: b"%PDF-1.7" + data[8:],
    "of another key": lambda data: data.replace(KEYS[0], KEYS[1]),
    "another length": lambda data: data[:48] + b"\xff" * 8 + data[56:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_whole_is_removed(store: PrefixStore, damage: Callable[[bytes], bytes]) -> None:
    fill(store, KEYS[:2])
    file = store.directory / f"{KEYS[0].hex()}.kv"
    file.write_bytes(damage(file.read_bytes()))
    assert read(store, KEYS[0], parts_of(0)) is None
    assert not file.exists() and store.counts[0] == 1
    fill(store, KEYS[:1])
    assert same(read(store, KEYS[0], parts_of(0)), parts_of(0))


def test_a_piece_of_another_size_is_none(store: PrefixStore) -> None:
    fill(store, KEYS[:1])
    assert read(store, KEYS[0], parts_of(0, 255)) is None


def test_names_that_are_no_files_are_not_read(store: PrefixStore, tmp_path: Path) -> None:
    fill(store, KEYS[:1])
    names = [store.directory / f"{key.hex()}.kv" for key in KEYS[:4]]
    names[0].rename(tmp_path / "elsewhere")
    names[0].symlink_to(tmp_path / "elsewhere")
    names[1].mkdir()
    os.mkfifo(names[2])
    for key in KEYS[:3]:
        assert read(store, key, parts_of(0)) is None


PIECE: list[bytes] = []


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data())
def flipped(store: PrefixStore, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(PIECE[0]) - 1))
    bits = data.draw(st.integers(1, 255))
    wrong = bytearray(PIECE[0])
    wrong[at] ^= bits
    (store.directory / f"{KEYS[0].hex()}.kv").write_bytes(wrong)
    assert read(store, KEYS[0], parts_of(0)) is None


def test_every_flipped_byte_is_noticed(store: PrefixStore) -> None:
    fill(store, KEYS[:1])
    PIECE[:] = [(store.directory / f"{KEYS[0].hex()}.kv").read_bytes()]
    flipped(store)


def size_of(number: int = 0) -> int:
    return 64 + bytes_of(parts_of(number))


def test_the_bound_is_kept_and_the_least_used_goes(tmp_path: Path) -> None:
    directory = tmp_path / "prefix"
    store = PrefixStore(directory, 16.5 * size_of() / 2**20)
    theirs = directory / "notes.txt"
    theirs.write_text("of somebody else")
    for i, key in enumerate(KEYS):
        assert store.put(key, parts_of(i), time.time_ns())
        assert store.put(KEYS[0], parts_of(0), time.time_ns())  # used all the time
        assert store.flush(10)
        files = list(directory.glob("*.kv"))
        assert len(files) == store.counts[0] <= 16
        assert sum(f.stat().st_size for f in files) == store.counts[1] <= 16.5 * size_of()
    kept = [key for key in KEYS if store.exists(key)]
    assert kept == [KEYS[0], *KEYS[-len(kept) + 1 :]] and len(kept) >= 14
    assert theirs.read_text() == "of somebody else"
    store.close()


def test_of_one_text_the_end_goes_first(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path / "prefix", 16.5 * size_of() / 2**20)
    begun = time.time_ns()
    for i, key in enumerate(KEYS[:17]):
        assert store.put(key, parts_of(i), begun, i)
    assert store.flush(10)
    assert [store.exists(key) for key in KEYS[:17]] == [True] * 15 + [False] * 2
    store.close()


def test_a_smaller_bound_is_kept_from_the_start(store: PrefixStore) -> None:
    fill(store, KEYS)
    smaller = PrefixStore(store.directory, 8.5 * size_of() / 2**20)
    assert smaller.flush(10) and smaller.counts[0] <= 8
    assert len(list(store.directory.glob("*.kv"))) <= 8
    smaller.close()


def test_what_a_killed_process_left_is_removed(store: PrefixStore) -> None:
    old, new = (store.directory / f".{KEYS[i].hex()}.1.{i}.tmp" for i in range(2))
    for file in old, new:
        file.write_bytes(b"half")
    real, later = time.time, time.time() + 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        other = PrefixStore(store.directory, 10)
        assert other.flush(10) and not old.exists() and not new.exists()
        other.close()
    new.write_bytes(b"half")
    other = PrefixStore(store.directory, 10)
    assert time.time is real and other.flush(10) and new.exists(), "somebody may be writing it"
    other.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_full_disk_warns_once_and_what_is_there_is_read(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, KEYS[:2])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    fill(store, KEYS[2:20])
    (warning,) = warnings_of(caplog)
    assert "No space left" in warning and "\n" not in warning
    assert len(list(store.directory.iterdir())) == 2, "nothing half written stays"
    assert same(read(store, KEYS[1], parts_of(1)), parts_of(1))


def test_a_directory_of_others_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "file").write_text("")
    for place in tmp_path, tmp_path / "file", tmp_path / "file" / "below":
        caplog.clear()
        store = PrefixStore(place, 10)
        assert not store.active and len(warnings_of(caplog)) == 1
        fill(store, KEYS[:3])
        assert not store.exists(KEYS[0])
        store.close()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_waits_to_be_written_is_bounded(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "_QUEUE_BYTES", 3 * size_of())
    held, write = [], store._write_one
    monkeypatch.setattr(store, "_write_one", lambda *a: (wait(lambda: held), write(*a)))
    taken = [store.put(key, parts_of(i), 0) for i, key in enumerate(KEYS[:6])]
    assert taken == [True] * 3 + [False] * 3
    assert not store.flush(0.05)
    held.append(1)
    assert store.flush(10) and store.put(KEYS[5], parts_of(5), 0)


def wait(until: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_child(work: Callable[[], None]) -> int:
    """A forked process that does `work` on a store of its own, and its id."""
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            logging.exception("in the child")
        os._exit(1)
    return child


def test_a_forked_child_goes_on_without(store: PrefixStore) -> None:
    fill(store, KEYS[:1])

    def use() -> None:
        assert not store.active and not store.exists(KEYS[0])
        assert store.put(KEYS[1], parts_of(1), 0)
        store.close()

    assert os.waitpid(in_child(use), 0)[1] == 0
    assert store.active and store.counts[0] == 1


def test_a_process_killed_while_it_writes_leaves_nothing_wrong(tmp_path: Path) -> None:
    directory, rng = tmp_path / "prefix", random.Random(3)

    def write() -> None:
        store = PrefixStore(directory, 200)
        for i in range(10**6):
            store.put(rng.randbytes(32), parts_of(i, 250_000), time.time_ns())
            store.put(KEYS[i % 40], parts_of(i % 40, 250_000), time.time_ns())

    seen = kills = 0
    while kills < 20 or (seen <= 20 and kills < 400):  # a busy machine writes few in that time
        kills += 1
        child = in_child(write)
        time.sleep(rng.uniform(0.01, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = PrefixStore(directory, 200)
        for i, key in enumerate(KEYS):
            found = read(store, key, parts_of(i, 250_000))
            assert found is None or same(found, parts_of(i, 250_000))
            seen += found is not None
            store.directory.joinpath(f"{key.hex()}.kv").unlink(missing_ok=True)
        store.close()
    assert seen > 20


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    """A bound that both exceed, so that each removes what the other wrote."""
    directory, bound = tmp_path / "prefix", 12.5 * size_of()

    def use() -> None:
        rng, store, hits = random.Random(os.getpid()), PrefixStore(directory, bound / 2**20), 0
        for _ in range(600):
            i = rng.randrange(len(KEYS))
            assert store.put(KEYS[i], parts_of(i), time.time_ns())
            j = rng.randrange(len(KEYS))
            found = read(store, KEYS[j], parts_of(j))
            assert found is None or same(found, parts_of(j))
            hits += found is not None
        assert hits > 20
        store.close()

    children = [in_child(use) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    left = [file.stat().st_size for file in directory.iterdir()]
    assert sum(left) <= bound * 1.25, "an eighth for each process"


# Engines ----------------------------------------------------------------------------------------

LIMITS, GREEDY = Limits(12), SamplingParams()


def adapter_of(model: Decoder, seed: int) -> Adapter:
    g = torch.Generator().manual_seed(seed)
    weights = {
        name: LoraWeight(
            torch.randn(3, layer.in_features, generator=g) * 0.4,
            torch.randn(layer.out_features, 3, generator=g) * 0.4,
            0.4,
        )
        for name, layer in model.named_modules()
        if type(layer) is BitLinear
    }
    return Adapter(Path("made"), 3, weights)


def run(
    model: Any,
    directory: Path | None,
    prompt: list[int],
    adapter: str | None = None,
    **options: Any,
) -> tuple[list[int], int]:
    """The tokens of a new engine, and how many of the prompt's came from the disk."""
    engine = Engine(model, prefix_dir=directory, **{"block_size": 16, **options})
    (generation,) = _run_all(engine, [prompt], adapter)
    tokens = engine.stats().disk_tokens
    engine.close(10)
    return generation, tokens


def _run_all(engine: Engine, prompts: list[list[int]], adapter: str | None) -> list[list[int]]:
    started = engine.start(prompts, GREEDY, LIMITS, adapter=adapter)
    for _ in started:
        pass
    return [list(g.token_ids) for g in started.generations]


PROMPT = [(i * i) % 97 for i in range(100)]
MODELS: dict[str, Callable[[], Decoder]] = {
    "dense": lambda: tiny_model(SMALL["bitnet-offline"]),
    "composed": lambda: tiny_model(SMALL["llama3-8b-like"]),
    "hybrid": lambda: hybrid("rotated", layers=4),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_new_engine_goes_on_where_one_before_it_came_to(
    name: str, kv_dtype: str, tmp_path: Path
) -> None:
    model = MODELS[name]()
    form: dict[str, Any] = {"kv_dtype": kv_dtype}
    expected, _ = run(model, None, PROMPT, **form)
    assert run(model, tmp_path / "p", PROMPT, **form) == (expected, 0)
    assert run(MODELS[name](), tmp_path / "p", PROMPT, **form) == (expected, 96)
    longer = [*PROMPT, *expected, 5, 6, 7]
    again, tokens = run(model, tmp_path / "p", longer, **form)
    assert (again, tokens) == (run(model, None, longer, **form)[0], 96)
    parted = [*PROMPT[:70], 3, 3, 3]
    again, tokens = run(model, tmp_path / "p", parted, **form)
    # the states of recurrent layers are kept at the ends of prompts
    assert (again, tokens) == (run(model, None, parted, **form)[0], 0 if name == "hybrid" else 64)


def test_blocks_of_others_are_not_taken(tmp_path: Path) -> None:
    """Other weights, settings or sizes; another layout of weights is no other model."""
    family = dataclasses.replace(hf_writer.FAMILIES["bitnet-online-untied-fp32"], vocab=260)
    convert(hf_writer.write_checkpoint(tmp_path / "source", family), tmp_path / "out")
    directory = tmp_path / "p"

    def load(**options: Any) -> Decoder:
        return bitnet_ops.load(tmp_path / "out", **options).model

    base = load(weight_format="2bit")
    expected, _ = run(base, directory, PROMPT)
    assert run(load(weight_format="canonical"), directory, PROMPT) == (expected, 96)
    assert run(base, directory, PROMPT, block_size=32)[1] == 0
    assert run(base, directory, PROMPT, kv_dtype="float16")[1] == 0
    assert run(load(dtype="bfloat16"), directory, PROMPT)[1] == 0
    assert run(load(head_format="int4"), directory, PROMPT)[1] == 0
    changed = load()
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    found, tokens = run(changed, directory, PROMPT)
    assert tokens == 0 and found == run(changed, None, PROMPT)[0]


def test_weights_that_no_file_tells_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    models = [MODELS["dense"]() for _ in range(3)]
    with torch.no_grad():
        models[2].get_buffer("model.layers.1.input_layernorm.weight")[3] += 0.5
    tokens = [run(model, tmp_path / "p", PROMPT)[1] for model in models]
    assert tokens == [0, 96, 0]
    assert run(models[2], tmp_path / "p", PROMPT)[1] == 96


def test_an_adapter_is_told_by_its_numbers_not_by_its_name(tmp_path: Path) -> None:
    found = []
    for seed in (1, 1, 2):
        model = MODELS["dense"]()
        model.add_adapter(adapter_of(model, seed), "mine")
        expected, _ = run(model, None, PROMPT, "mine")
        tokens, reused = run(model, tmp_path / "p", PROMPT, "mine")
        assert tokens == expected
        found.append(reused)
        assert run(model, tmp_path / "p", PROMPT)[0] == run(model, None, PROMPT)[0]
    assert found == [0, 96, 0]


def test_an_adapter_of_all_texts_counts_too(tmp_path: Path) -> None:
    model = MODELS["dense"]()
    run(model, tmp_path / "p", PROMPT)
    model.add_adapter(adapter_of(model, 1))
    found, tokens = run(model, tmp_path / "p", PROMPT)
    assert tokens == 0 and found == run(model, None, PROMPT)[0]


def test_weights_changed_while_a_request_runs_are_not_mixed(tmp_path: Path) -> None:
    model = MODELS["dense"]()
    weight = model.get_buffer("model.layers.0.input_layernorm.weight")
    engine = Engine(model, block_size=16, prefix_dir=tmp_path / "p", prefill_chunk=24)
    engine.add(PROMPT, GREEDY, LIMITS)
    engine.step()
    with torch.no_grad():
        weight.mul_(2)
    engine.step()
    with torch.no_grad():
        weight.mul_(0.5)  # as before: what lies between must not count as theirs
    while engine.has_work:
        engine.step()
    engine.close(10)
    tokens, reused = run(model, tmp_path / "p", PROMPT)
    assert tokens == run(model, None, PROMPT)[0] and reused == 16


SCRIPT = """
import sys
from bitnet_ops.generate.engine import Limits
from bitnet_ops.language_model import load
prompt = [(i * i) % 97 for i in range(100)]
lm = load(sys.argv[1], prefix_dir=sys.argv[2])
lm.engine._plan.block_size = 16
print(list(lm.engine.generate([prompt], None, Limits(12))[0].token_ids))
print(lm.engine.stats().disk_tokens)
"""


def in_new_process(directory: Path, model: Path = DEMO_DIR) -> tuple[list[int], int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    tokens, reused = done.stdout.splitlines()
    return [int(i) for i in tokens.strip("[]").split(",")], int(reused)


def test_a_new_process_goes_on_too(tmp_path: Path) -> None:
    """The end of a process writes what waits; nobody closes the engine."""
    expected, _ = run(load().model, None, PROMPT)
    assert in_new_process(tmp_path / "p") == (expected, 0)
    assert in_new_process(tmp_path / "p") == (expected, 96)
    assert run(load().model, tmp_path / "p", PROMPT) == (expected, 96)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_damaged_files_change_no_token(name: str, tmp_path: Path) -> None:
    model, rng = MODELS[name](), random.Random(1)
    expected, _ = run(model, None, PROMPT)
    for _ in range(12):
        run(model, tmp_path / "p", PROMPT)
        for file in rng.sample(sorted((tmp_path / "p").iterdir()), 2):
            damage = rng.choice([*DAMAGE.values()])
            file.write_bytes(damage(file.read_bytes()))
        assert run(model, tmp_path / "p", PROMPT)[0] == expected


def test_a_pool_with_little_room_takes_what_fits(tmp_path: Path) -> None:
    model = MODELS["dense"]()
    expected, _ = run(model, tmp_path / "p", PROMPT)
    for blocks in range(8, 12):
        engine = Engine(model, block_size=16, prefix_dir=tmp_path / "p", kv_cache_mb=1)
        engine._plan.sizes = engine._plan.sizes._replace(blocks=blocks, max_cached=blocks - 5)
        found = _run_all(engine, [PROMPT, PROMPT[:60]], None)
        assert found[0] == expected and engine.stats().disk_tokens > 0
        engine.close()


def test_others_step_while_a_request_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["dense"]()
    expected, _ = run(model, tmp_path / "p", PROMPT)
    engine = Engine(model, block_size=16, prefix_dir=tmp_path / "p")
    beside = engine.add([1, 2, 3], GREEDY, Limits(200))
    engine.step()
    go, read = [], PrefixStore.read
    monkeypatch.setattr(PrefixStore, "read", lambda *a: (wait(lambda: go), read(*a))[1])
    late, aborted = (engine.add(PROMPT, GREEDY, LIMITS) for _ in range(2))
    events = [event for _ in range(5) for event in engine.step()]
    assert {event.request_id for event in events} == {beside} and len(events) == 5
    assert engine.stats().waiting == 2 and engine.abort(aborted)
    assert [e.reason for e in engine.step() if e.request_id == aborted] == ["abort"]
    go.append(1)
    tokens = []
    while engine.has_work:
        tokens += [
            e.token_id for e in engine.step() if hasattr(e, "token_id") and e.request_id == late
        ]
    assert tokens == expected and engine.stats().disk_tokens == 96
    engine.close()


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(MODELS["dense"](), tmp_path / "p", PROMPT)
    engine = Engine(MODELS["dense"](), block_size=16, prefix_dir=tmp_path / "p")
    go, read = [], PrefixStore.read
    monkeypatch.setattr(PrefixStore, "read", lambda *a: (wait(lambda: go), read(*a))[1])
    id = engine.add(PROMPT, GREEDY, LIMITS)
    assert engine.step() == [] and engine.abort(id)
    assert [event.request_id for event in engine.step()] == [id] and not engine.has_work
    go.append(1)
    engine.close()


def test_an_engine_over_a_directory_that_cannot_be_used_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model = MODELS["dense"]()
    found, tokens = run(model, tmp_path / "file", PROMPT)
    assert tokens == 0 and found == run(model, None, PROMPT)[0]
    assert len(warnings_of(caplog)) == 1


def test_background_requests_are_not_written(tmp_path: Path) -> None:
    engine = FakeEngine(prefix_dir=tmp_path / "p")
    engine.add([1] * 40, limits=LIMITS, keep_prefix=False)
    while engine.has_work:
        engine.step()
    engine.close()
    assert list((tmp_path / "p").iterdir()) == []


def test_without_a_prefix_cache_there_is_none_on_disk(tmp_path: Path) -> None:
    options = SchedulerOptions(prefix_cache=False)
    found, tokens = run(MODELS["dense"](), tmp_path / "p", PROMPT, scheduling=options)
    assert tokens == 0 and not (tmp_path / "p").exists() and found


def test_blocks_that_the_queue_had_no_room_for_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time; the others wait for the next step, so that no block lacks those before it."""
    monkeypatch.setattr(prefix_store, "_QUEUE_BYTES", 1)
    model = MODELS["dense"]()
    engine = Engine(model, block_size=16, prefix_dir=tmp_path / "p")
    engine.add(PROMPT, GREEDY, LIMITS)
    while engine.has_work:
        engine.step()
        assert engine._core.store is not None and engine._core.store.flush(10)
    engine.close()
    assert run(model, tmp_path / "p", PROMPT)[1] == 96
