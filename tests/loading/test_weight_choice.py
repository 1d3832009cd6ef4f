"""weight_format="auto": the rule on given figures, what is kept of a probe, and what is loaded."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet_ops import cli, language_model
from bitnet_ops.bench import run_model
from bitnet_ops.cli import chat, embed, serve
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.sglbitnt import Reader, TensorInfo
from bitnet_ops.language_model import DEMO_DIR, load
from bitnet_ops.loading import weight_choice, weight_probe
from bitnet_ops.loading.resolve import LoadError
from bitnet_ops.loading.weight_choice import Matrices, choose, choose_for_file, decide
from bitnet_ops.loading.weight_probe import Probe, alternate, measure, probe_here
from bitnet_ops.nn.storage import CPU_SPECIFIC
from isa_control import torch_threads

MIB = 1 << 20
LARGE = Matrices(((1 << 16, 1 << 12),) * 4)  # 256 MiB in 2 bits a weight
FAST, SLOW = Probe(0.82, 40, 0.03), Probe(0.97, 40, 0.03)
PROMPT = "And God said unto"


def no_probe() -> Probe | None:
    raise AssertionError("a probe was asked for")


# The rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probe", "expected", "reason"),
    [
        (FAST, "1.6bit", "0.82 of the time with 1.6bit, less than 0.93"),
        (SLOW, "2bit", "0.97 of the time with 1.6bit, not less than 0.93"),
        (Probe(0.93, 40, 0.03), "2bit", "not less"),  # prompts would lose more than that
        (Probe(2.4, 9, 0.03), "2bit", "2.40"),
        (Probe(0.5, 40, 0.03, busy=True), "2bit", "others had the CPUs"),
        (Probe(0.82, 40, 0.03, kept=True), "1.6bit", "by an earlier load"),
        (None, "2bit", "no memory to measure in"),
    ],
)
def test_one_text_takes_what_the_probe_found_faster(
    probe: Probe | None, expected: str, reason: str
) -> None:
    choice = decide(LARGE, "single", 32 * MIB, None, lambda: probe)
    assert choice.weight_format == expected and choice.probe == probe
    assert reason in choice.reason and "\n" not in choice.reason


@pytest.mark.parametrize(
    ("matrices", "use", "cache", "available", "expected", "reason"),
    [
        (LARGE, "batch", 32 * MIB, None, "2bit", "many tokens"),
        (LARGE, "single", 256 * MIB, None, "2bit", "fit in a cache"),
        (LARGE, "single", 32 * MIB, 230 * MIB, "1.6bit", "256 MiB of 2bit do not fit in the 230"),
        (LARGE, "batch", 32 * MIB, 230 * MIB, "1.6bit", "do not fit"),
        (LARGE, "batch", 32 * MIB, 100 * MIB, "2bit", "many tokens"),  # neither does
        (Matrices(((64, 64), (64, 40000))), "single", 0, None, "auto", "40000 columns"),
        (Matrices(()), "single", 0, None, "2bit", "fit in a cache"),
    ],
)
def test_what_needs_no_probe_asks_for_none(
    matrices: Matrices, use: str, cache: int, available: int | None, expected: str, reason: str
) -> None:
    choice = decide(matrices, use, cache, available, no_probe)
    assert choice.weight_format == expected and choice.probe is None
    assert reason in choice.reason


def test_matrices_are_those_of_the_file_and_of_the_dummy(tmp_path: Path) -> None:
    reader = Reader(DEMO_DIR / "model.bin")
    found = Matrices.of_tensors(reader.tensors.values())
    lm = load(weight_format="2bit")
    weights = [b for n, b in lm.model.named_buffers() if n.endswith("_proj.weight")]
    assert len(found.shapes) == len(weights) and found.group_size == 0
    assert found.bytes("2bit") == sum(weight.nbytes for weight in weights)
    assert found.bytes("1.6bit") < found.bytes("2bit")
    file = dummy.write("tiny", tmp_path / "tiny")
    of_file = Matrices.of_tensors(Reader(file).tensors.values())
    assert sorted(of_file.shapes) == sorted(dummy.matrices("tiny").shapes)
    assert of_file.group_size == dummy.matrices("tiny").group_size == 0
    # version 1 knows no K: that of the blocks; dense tensors do not count
    of_info = functools.partial(TensorInfo, scale=None, offset=0, nbytes=0)
    packed = of_info("a", torch.uint8, (40, 96), group_size=64)
    dense = of_info("b", torch.float32, (7, 8))
    assert Matrices.of_tensors([packed, dense]) == Matrices(((40, 384),), 64)
    exact = dataclasses.replace(packed, in_features=300)
    assert Matrices.of_tensors([exact]) == Matrices(((40, 300),), 64)
    bonsai = dummy.matrices("bonsai-1.7b")  # its tied embedding is ternary too
    assert bonsai.group_size == 128 and len(bonsai.shapes) == 28 * 7 + 1


# The probe ----------------------------------------------------------------------------------------


class Clock:
    """Time that passes in calls of the runs alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: float, called: list[int]) -> Callable[[int], object]:
        def run(call: int) -> None:
            called.append(call)
            self.now += seconds

        return run


@pytest.mark.parametrize(("milliseconds", "rounds"), [(0.1, 40), (2.5, 6), (7, 3), (100, 1)])
def test_a_probe_ends_with_the_first_round_after_30_ms(milliseconds: float, rounds: int) -> None:
    clock = Clock()
    first: list[int] = []
    second: list[int] = []
    runs = [clock.run(milliseconds / 1e3, calls) for calls in (first, second)]
    samples = alternate(runs, clock)
    assert [len(one) for one in samples] == [rounds, rounds]
    assert samples[0] == pytest.approx([milliseconds / 1e3] * rounds)
    # the stretches of memory are taken in order, by both
    assert sorted([*first, *second]) == list(range(2 * rounds + 2))


@pytest.mark.parametrize("kind", [(0, "int8"), (128, "int8_group"), (64, "int16_group")])
def test_products_are_timed_on_every_isa(
    kind: tuple[int, str], isa: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_probe, "last_cache", lambda: 0)  # the least memory
    probe = measure(*kind)
    assert probe is not None and probe.ratio > 0 and probe.seconds > 0
    assert 1 <= probe.rounds <= weight_probe.MAX_ROUNDS and not probe.kept


def test_a_probe_takes_far_less_than_a_second() -> None:
    """Some 30 to 100 ms; the quickest of three, for tests run beside each other."""
    seconds = []
    with torch_threads(1):
        for _ in range(3):
            began = time.perf_counter()
            measure()
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1


def test_without_memory_there_is_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int) -> Any:
        raise RuntimeError("not enough memory: you tried to allocate")

    monkeypatch.setattr(weight_probe, "Arena", full)
    assert measure() is None


@pytest.mark.parametrize("given", [3 << 26, 1 << 20])
def test_a_probe_takes_the_models_memory_where_it_is_enough(
    given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, taken = torch.zeros(given, dtype=torch.uint8), []
    monkeypatch.setattr(weight_probe, "last_cache", lambda: 0)
    monkeypatch.setattr(weight_probe, "_product", lambda place, *kind: taken.append(place) or int)
    assert measure(memory=lambda: memory) is not None
    assert all(place.nbytes == 64 * MIB and bool((place == 1).all()) for place in taken[:1])
    assert (taken[0].data_ptr() == memory.data_ptr()) == (given > 64 * MIB)
    assert int(memory.sum()) == (64 * MIB if given > 64 * MIB else 0)


def test_too_few_rounds_count_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_probe, "last_cache", lambda: 0)  # the least memory
    monkeypatch.setattr(weight_probe, "_MEASURE_S", 0.0)
    probe = measure()
    assert probe is not None and probe.rounds == 1 and probe.busy


# What is kept -------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Probe]]:
    """What `measure` gave, a new figure at each call; set `measured.append` for the next."""
    given: list[Probe] = []

    def next_probe(group_size: int, activations: str, memory: object = None) -> Probe:
        given.append(Probe(0.5 + len(given) / 16, 40, 0.03))
        return given[-1]

    monkeypatch.setattr(weight_probe, "measure", next_probe)
    yield given


def kept_file(cache: Path) -> Path:
    (file,) = (cache / weight_probe.PROBES).iterdir()
    return file


def test_a_probe_is_kept_for_the_machine(tmp_path: Path, measured: list[Probe]) -> None:
    first = probe_here(cache=tmp_path)
    again = probe_here(cache=tmp_path)
    assert len(measured) == 1 and first is not None and again is not None
    assert (again.ratio, again.kept, first.kept) == (first.ratio, True, False)
    contents = json.loads(kept_file(tmp_path).read_text())
    assert contents["key"]["threads"] == torch.get_num_threads()


def test_another_machine_number_of_threads_or_kind_of_scales_has_its_own(
    tmp_path: Path, measured: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_here(cache=tmp_path)
    with torch_threads(torch.get_num_threads() + 1):
        probe_here(cache=tmp_path)
    probe_here(128, cache=tmp_path)
    probe_here(128, "int16_group", cache=tmp_path)
    assert len(measured) == 4
    probe_here(128, "int8_group", cache=tmp_path)  # what "auto" means there
    probe_here(0, "int8_group", cache=tmp_path)  # which the model refuses
    assert len(measured) == 4
    monkeypatch.setattr(weight_probe.machine, "cpu_model", lambda: "another CPU")
    probe_here(cache=tmp_path)
    assert len(measured) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: b"\xff\x00{",
        lambda kept: b"[1]",
        lambda kept: b"{}",
        lambda kept: json.dumps({**kept, "ratio": "0.5"}).encode(),
        lambda kept: json.dumps({**kept, "ratio": float("nan")}).encode(),
        lambda kept: json.dumps({**kept, "ratio": -1}).encode(),
        lambda kept: json.dumps({**kept, "rounds": None}).encode(),
        lambda kept: json.dumps({**kept, "key": {**kept["key"], "cpu": "another"}}).encode(),
    ],
)
def test_what_is_damaged_is_measured_again_and_replaced(
    damage: Callable[[Any], bytes], tmp_path: Path, measured: list[Probe]
) -> None:
    probe_here(cache=tmp_path)
    file = kept_file(tmp_path)
    whole = json.loads(file.read_text())
    file.write_bytes(damage(whole))
    second = probe_here(cache=tmp_path)
    assert second == measured[1] and not second.kept
    third = probe_here(cache=tmp_path)
    assert third is not None and third.kept and third.ratio == second.ratio
    assert kept_file(tmp_path) == file


@pytest.mark.parametrize("age", [weight_probe.KEPT_S + 60, -3600])
def test_what_is_old_or_of_the_future_is_measured_again(
    age: float, tmp_path: Path, measured: list[Probe]
) -> None:
    probe_here(cache=tmp_path)
    written = time.time() - age
    os.utime(kept_file(tmp_path), (written, written))
    assert probe_here(cache=tmp_path) == measured[1]
    assert probe_here(cache=tmp_path) is not None and len(measured) == 2


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, measured: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", Path("/proc/nothing")):
        assert probe_here(cache=place) == measured[-1]
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o500)
    if os.geteuid():  # root writes everywhere
        assert probe_here(cache=folder) == measured[-1] and not list(folder.iterdir())

    def nowhere(choice: object = None) -> Path:
        raise LoadError("load: expected a home directory, got none")

    before = len(measured)
    monkeypatch.setattr(weight_probe, "cache_directory", nowhere)
    assert probe_here() == measured[-1] and len(measured) == before + 1


def test_a_busy_probe_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Probe(0.5, 40, 0.03, busy=True)
    monkeypatch.setattr(weight_probe, "measure", lambda *kind, memory: busy)
    probe = probe_here(cache=tmp_path)
    assert probe is not None and probe.busy and not list(tmp_path.iterdir())


# What is loaded -----------------------------------------------------------------------------------


@pytest.fixture
def memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without caches, on which 1.6 bit is the faster one."""
    monkeypatch.setattr(weight_choice, "last_cache", lambda: 0)
    monkeypatch.setattr(weight_choice, "probe_here", lambda *given: FAST)


def test_auto_gives_the_same_tokens_as_both_layouts(memory_decides: None) -> None:
    """And 1.6 bit in the place of 2 where one text is decoded."""
    texts = {
        name: load(weight_format=name).generate(PROMPT, max_new_tokens=12) for name in CPU_SPECIFIC
    }
    assert len(set(texts.values())) == 1
    for use, expected in (("single", "1.6bit"), ("batch", "2bit")):
        lm = load(weight_format="auto", use=use)
        assert lm.generate(PROMPT, max_new_tokens=12) == texts["2bit"]
        assert lm.weight_choice is not None and lm.weight_choice.weight_format == expected
        assert lm.model.weight_format == expected
    assert load().model.weight_format == "1.6bit"


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_model_lies_in_the_memory_it_was_measured_in(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[torch.Tensor] = []

    def probe(group_size: int, activations: str, cache: object, memory: Any) -> Probe:
        memories.append(memory().fill_(255))
        return Probe(ratio, 40, 0.03)

    monkeypatch.setattr(weight_choice, "last_cache", lambda: 0)
    monkeypatch.setattr(weight_choice, "probe_here", probe)
    lm = load()
    (memory,) = memories
    first = lm.model.model.layers[0].self_attn.q_proj.weight
    assert first.data_ptr() == memory.data_ptr()
    assert lm.model.weight_format == ("1.6bit" if ratio < 0.93 else "2bit")
    assert lm.weight_choice is not None and lm.weight_choice.arena is None
    expected = load(weight_format="canonical").generate(PROMPT, max_new_tokens=12)
    assert lm.generate(PROMPT, max_new_tokens=12) == expected


def test_the_choice_can_be_seen_and_an_explicit_format_wins(memory_decides: None) -> None:
    for name in ("canonical", *CPU_SPECIFIC):
        lm = load(weight_format=name)
        assert lm.weight_choice is not None
        assert (lm.weight_choice.weight_format, lm.weight_choice.reason) == (name, "asked for")
        assert lm.model.weight_format == name
    assert language_model.LanguageModel(lm.model).weight_choice is None


def test_small_models_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_choice, "last_cache", lambda: 32 * MIB)
    monkeypatch.setattr(weight_choice, "probe_here", lambda *given: no_probe())
    lm = load()
    assert lm.weight_choice is not None and "fit in a cache" in lm.weight_choice.reason
    assert lm.model.weight_format == "2bit"


def test_embedding_models_take_whole_texts(
    memory_decides: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DEMO_DIR / "model.bin"
    assert choose_for_file(file).weight_format == "1.6bit"

    class Config:
        embedding_only = True

    monkeypatch.setattr(weight_choice, "model_config", lambda reader: Config)
    assert choose_for_file(file).weight_format == "2bit"


def test_the_environment_says_what_auto_means(
    memory_decides: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("canonical", *CPU_SPECIFIC):
        monkeypatch.setenv(weight_choice.ENVIRONMENT, name)
        assert load(use="batch").model.weight_format == name
        assert load(weight_format="2bit").model.weight_format == "2bit"
    monkeypatch.setenv(weight_choice.ENVIRONMENT, "")
    assert load().model.weight_format == "1.6bit"
    monkeypatch.setenv(weight_choice.ENVIRONMENT, "3bit")
    expected = (
        "BITNET_OPS_WEIGHT_FORMAT: expected one of canonical, 2bit, 1.6bit, got '3bit'; unset it, "
        "or name one of them"
    )
    with pytest.raises(LoadError, match=f"^{re.escape(expected)}$"):
        load()
    assert load(weight_format="1.6bit").model.weight_format == "1.6bit"


@pytest.mark.parametrize("use", ["one", "", None, 1, ["single"]])
def test_other_uses_are_refused_in_one_line(use: Any) -> None:
    expected = re.escape(f"use: expected one of single, batch, got {use!r}")
    for call in (lambda: load(use=use), lambda: choose(LARGE, use)):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            call()


# The commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "1.6bit"), (["--speculation", "4"], "2bit"), (["--weight-format", "2bit"], "2bit")],
)
def test_generate_says_what_it_chose_and_why(
    words: list[str], expected: str, memory_decides: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", PROMPT, "-n", "2", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weight_format"] == expected
    reasons = {"1.6bit": "less than 0.93", "2bit": "asked for" if "2bit" in words else "many"}
    assert reasons[expected] in report["weight_format_reason"]


def test_chat_loads_for_one_text_and_serve_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):
        pass

    uses = []

    def stop(*args: Any, **given: Any) -> None:
        uses.append(given["use"])
        raise Loaded

    monkeypatch.setattr(language_model, "load", stop)
    calls: list[tuple[list[str], Callable[[Any], object]]] = [
        (["chat"], chat.run),
        (["chat", "--speculation", "auto"], chat.run),
        (["chat", "--speculation", "ngram"], chat.run),
        (["embed", "model", "In"], embed.run),
        (["serve"], serve._load),
    ]
    for words, call in calls:
        with pytest.raises(Loaded):
            call(cli._parse(words))
    assert uses == ["single", "single", "batch", "batch", "batch"]


def test_bench_model_chooses_as_a_load_does_and_times_what_lost(
    memory_decides: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = run_model.ModelSettings("tiny", (("auto", "int8"), ("2bit", "bf16")), threads=(1, 2))
    with torch_threads(torch.get_num_threads()):
        pairs, choices = run_model._chosen(settings, lambda text: None)
        assert pairs == [("1.6bit", "int8"), ("2bit", "bf16"), ("2bit", "int8")]
        chosen = [(row["threads"], row["weights"]) for row in choices]
        assert chosen == [(1, "1.6bit"), (2, "1.6bit")]
        monkeypatch.setattr(weight_choice, "last_cache", lambda: 32 * MIB)
        pairs, choices = run_model._chosen(settings, lambda text: None)
        assert pairs == [("2bit", "int8"), ("2bit", "bf16")]
        assert all("fit in a cache" in row["reason"] for row in choices)
    explicit = run_model.ModelSettings("tiny", (("2bit", "int8"),))
    assert run_model._chosen(explicit, lambda text: None) == ([("2bit", "int8")], [])
