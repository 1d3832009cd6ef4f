"""Fixtures shared by all tests: ISAs, thread counts, deterministic random numbers.

The ops and their samples live in ops_*.py, forcing an ISA in isa_control.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

# transformers decorates its BitNet functions with torch.compile when it is imported; as oracles
# they must run as written. Set before anything imports it; test_compile.py takes it back.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Waiting threads sleep instead of spinning: on a machine with more work than cores, such as one
# that runs several test processes, spinning costs ten times the work. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests count parallel regions; on a busy machine ops would do without some. Read at the first one.
os.environ.setdefault("BITNET_OPS_BACK_OFF", "0")

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
