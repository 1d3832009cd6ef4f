"""Fixtures shared by all tests: ISAs, thread counts, deterministic random numbers.

The ops and their samples live in ops_*.py, forcing an ISA in isa_control.py.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# transformers decorates its BitNet functions with torch.compile when it is imported; as oracles
# they must run as written. Set before anything imports it; test_compile.py takes it back.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Waiting threads sleep instead of spinning: on a machine with more work than cores, such as one
# that runs several test processes, spinning costs ten times the work. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests count parallel regions; on a busy machine ops would do without some. Read at the first one.
os.environ.setdefault("BITNET_OPS_TUNING", "back_off=0")

# Nothing is downloaded. Read when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell starts background jobs with Ctrl-C ignored, and they pass that on to what they start: the
# tests that press it would wait for nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: for this process, not its children
    signal.signal(signal.SIGHUP, lambda number, frame: None)

import hypothesis
import pytest
import torch

from isa_control import ISAS, THREAD_COUNTS, forced_isa, torch_threads

# Its conftest.py speaks for every test of a session; scripts/prove_sglang and prove_vllm run it.
collect_ignore = [] if "BITNET_PROOF_ENGINE" in os.environ else ["engines"]

# `pytest -m quick` (scripts/quick): file and test, and how many of its cases each ISA takes.
QUICK = {
    "test_ops.py::test_the_registry_holds_the_catalogue": 1,
    "test_ops.py::test_result_agrees_with_the_reference": 2,  # of each op
    "test_convert.py::test_family_converts_and_verifies": 1,  # a round trip, and the fp64 forward
    "test_convert.py::test_plain_forward_agrees_with_transformers_and_fp64": 1,
    "test_scaled_families.py::test_the_step_is_the_composition_of_ops": 1,
    "test_model.py::test_demo_greedy_ids_are_those_of_transformers": 1,  # the demo model's engine
    "test_model.py::test_r2_prefill_and_decode_agree": 2,
    "test_engine.py::test_a_row_is_what_it_is_alone": 1,
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Other files are not even imported for a quick run."""
    files = {name.partition("::")[0] for name in QUICK}
    quick = config.option.markexpr == "quick" and collection_path.suffix == ".py"
    return True if quick and collection_path.name not in files else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is quick, and takes the sample that a whole run takes."""
    taken: Counter[tuple[object, ...]] = Counter()
    for item in items:
        kind = _kind(item)
        taken[kind] += 1
        if taken[kind] <= QUICK.get(str(kind[0]), 0):
            item.add_marker(pytest.mark.quick)
    if config.option.file_or_dir or config.option.keyword:
        return
    if config.option.markexpr == "quick":
        lost = QUICK.keys() - {kind[0] for kind in taken}
        if lost:
            raise pytest.UsageError(f"tests/conftest.py, QUICK: no such tests: {sorted(lost)}")
    elif os.environ.get("BITNET_CI_ALL") != "1":
        _leave_to_the_night(config, items)


def _kind(item: pytest.Item) -> tuple[object, ...]:
    """File and test, ISA, and op: cases of one kind differ in the rest."""
    cases = item.callspec.params if hasattr(item, "callspec") else {}
    name = f"{item.path.name}::{item.name.partition('[')[0]}"
    return name, cases.get("isa"), getattr(cases.get("sample"), "op", None)


def _leave_to_the_night(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked sampled(count), `count` cases of each kind stay, evenly spread.

    Of one marked by_turns, which has the fixture isa, every case stays on the ISA that is chosen by
    itself, and on one of the others: that all give the same bits is tested on its own.
    """
    taken: Counter[tuple[object, ...]] = Counter()
    cases = Counter(map(_kind, items))
    kept, later = [], []
    for item in items:
        mark = item.get_closest_marker("sampled")
        taken[kind := _kind(item)] += 1
        stays = mark is None or _spread(taken[kind] - 1, mark.args[0], cases[kind])
        if item.get_closest_marker("by_turns") and (isa := kind[1]) != ISAS[0]:
            stays = taken[kind] % (len(ISAS) - 1) == ISAS.index(str(isa)) - 1
        (kept if stays else later).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=later)


def _spread(index: int, count: int, of: int) -> bool:
    """Whether case `index` is among `count` that stand evenly spread, the first one of them."""
    return index * count % of < count


hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own cache directory is neither read nor filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        patch.delenv("BITNET_OPS_CACHE", raising=False)
        yield


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an ISA, in force during the test; one test run for every ISA of this machine."""
    with forced_isa(request.param):
        yield request.param


@pytest.fixture(params=THREAD_COUNTS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads, in force during the test: 1 to 4, whatever the machine has."""
    with torch_threads(request.param):
        yield request.param


@pytest.fixture
def rng() -> torch.Generator:
    """A generator with a fixed seed: a failure repeats."""
    return torch.Generator().manual_seed(20261121)
