"""Threads: torch's setting honoured, many callers at once, oneDNN beside us, a busy core, a fork.

Results must never depend on any of it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import _runtime, ops
from bounds import assert_equal
from isa_control import torch_threads
from op_values import activations, positive
from stack_of_layers import Stack, make_stack, random_bytes


@pytest.fixture(scope="module")
def stack() -> Stack:
    return make_stack()


@pytest.fixture(scope="module")
def expected(stack: Stack) -> Tensor:
    with torch_threads(1):
        return stack.step()


def regions_of(function: Callable[[], object]) -> int:
    before = _runtime.region_count()
    function()
    return _runtime.region_count() - before


def os_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# torch.set_num_threads ------------------------------------------------------------------------


def test_set_num_threads_is_honoured(stack: Stack) -> None:
    """In a fresh process: 1 starts no thread, 2 starts one, 3 and 7 on any machine that many."""
    code = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from stack_of_layers import make_stack
torch.set_num_threads(1)
stack = make_stack(hidden=1024, inner=4096)  # work enough for seven shares
for count in (1, 2, 3, 7, 1):
    torch.set_num_threads(count)
    before = len(os.listdir("/proc/self/task"))
    stack.step()
    print(count, len(os.listdir("/proc/self/task")) - before)
"""
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1] / "helpers")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert out[:5] == ["1 0", "2 1", "3 1", "7 4", "1 0"]


@pytest.mark.parametrize("count", [1, 2, 3, 2 * (os.cpu_count() or 1) + 1])
def test_any_number_of_threads_gives_the_same_bits(
    count: int, stack: Stack, expected: Tensor
) -> None:
    with torch_threads(count):
        for _ in range(20):
            assert_equal(stack.step(), expected, f"{count} threads")


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_a_step_is_at_most_one_parallel_region(batch: int) -> None:
    stack = make_stack(batch=batch)
    with torch_threads(2):
        assert regions_of(stack.step) == 1
    with torch_threads(1):
        assert regions_of(stack.step) == 0
    tiny = make_stack(layers=1, hidden=64, heads=2, kv_heads=1, inner=64, vocab=50, batch=batch)
    with torch_threads(2):
        assert regions_of(tiny.step) == 0, "too little work for two threads"


def test_inside_a_parallel_region_a_step_runs_on_its_thread(stack: Stack, expected: Tensor) -> None:
    """A caller that has no threads to give, as inside a parallel region of torch's: one share."""
    with torch_threads(2), ThreadPoolExecutor(1) as pool:

        def limited() -> Tensor:
            torch.set_num_threads(1)
            return stack.step()

        assert_equal(pool.submit(limited).result(), expected)


# Several callers --------------------------------------------------------------------------------


def test_several_python_threads_at_once() -> None:
    stacks = [make_stack(seed=i, batch=1 + i % 3) for i in range(4)]
    with torch_threads(1):
        wanted = [s.step(5) for s in stacks]
    failures: list[str] = []

    def caller(index: int) -> None:
        for _ in range(25):
            if not torch.equal(stacks[index].step(5), wanted[index]):
                failures.append(f"caller {index}")

    with torch_threads(2):
        threads = [threading.Thread(target=caller, args=(i,)) for i in range(len(stacks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_interleaved_with_onednn(stack: Stack, expected: Tensor, rng: torch.Generator) -> None:
    """A bfloat16 F.linear (oneDNN, with AMX where there is any) between steps: both stay right."""
    x = torch.randn(64, 512, generator=rng).bfloat16()
    w = torch.randn(256, 512, generator=rng).bfloat16()
    weight, scale, tokens = random_bytes(rng, 300, 512), positive(rng, 1), activations(rng, 33, 512)
    with torch_threads(2):
        dense, ternary = F.linear(x, w), ops.linear(tokens, weight, scale)
        for _ in range(30):
            assert_equal(F.linear(x, w), dense)
            assert_equal(stack.step(), expected)
            assert_equal(F.linear(x, w), dense)
            assert_equal(ops.linear(tokens, weight, scale), ternary)


def test_onednn_in_another_thread(stack: Stack, expected: Tensor, rng: torch.Generator) -> None:
    x = torch.randn(128, 512, generator=rng).bfloat16()
    w = torch.randn(512, 512, generator=rng).bfloat16()
    stop = threading.Event()
    wrong: list[int] = []

    def dense() -> None:
        wanted = F.linear(x, w)
        while not stop.is_set():
            wrong.append(int(not torch.equal(F.linear(x, w), wanted)))

    with torch_threads(2):
        other = threading.Thread(target=dense)
        other.start()
        steps = 0
        while steps < 30 or (not wrong and other.is_alive()):  # on a busy machine it starts late
            assert_equal(stack.step(), expected)
            steps += 1
        stop.set()
        other.join()
    assert wrong and not sum(wrong)


# A neighbour ------------------------------------------------------------------------------------


@pytest.fixture
def busy_core() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process that keeps one core busy; ended after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def median_step(stack: Stack, steps: int) -> float:
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        stack.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


CONTENTION_LIMIT = 2.4  # a third process on two cores: two thirds of them are left, at worst half


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to lose one of them")
def test_a_busy_core_costs_no_more_than_its_share(
    busy_core: Callable[[], subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads = cores, one core taken by another process: not 4 times slower, 2.4 at most.

    Steps of some milliseconds, as long as a time slice; medians of many; the best of a few tries,
    for a machine may be busy with more than this test.
    """
    stack = make_stack(layers=8, hidden=1536, heads=12, kv_heads=4, head_dim=128, inner=4096)
    cores = len(os.sched_getaffinity(0))
    ratios = []
    with torch_threads(cores):
        for _ in range(6):
            alone = median_step(stack, 150)
            neighbours = [busy_core() for _ in range(max(1, cores // 2))]
            time.sleep(0.3)
            contended = median_step(stack, 150)
            for process in neighbours:
                process.kill()
                process.wait()
            ratios.append(contended / alone)
            if ratios[-1] <= CONTENTION_LIMIT:
                break
    with capsys.disabled():
        text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"\nstep with a busy core: {text} times ({1e3 * alone:.2f} ms alone)")
    assert min(ratios) <= CONTENTION_LIMIT, ratios


# Fork -------------------------------------------------------------------------------------------


def exit_status_of_fork(body: Callable[[], bool], seconds: int = 60) -> int:
    """Runs body in a forked child: 0 where it is true, 1 where not, a signal where it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process
        signal.alarm(seconds)
        status = 2
        try:
            status = 0 if body() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_after_fork_ops_run_serially(
    stack: Stack, expected: Tensor, rng: torch.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parent has used its threads, which a fork does not copy."""
    weight, scale, x = random_bytes(rng, 900, 512), positive(rng, 1), activations(rng, 64, 512)
    wide = torch.randn(2_000_000, generator=rng)
    with torch_threads(2):
        ternary, summed = ops.linear(x, weight, scale), wide + wide
        assert regions_of(stack.step) == 1

        def child() -> bool:
            torch.set_num_threads(2)  # whoever asks for more threads gets none from our ops
            step, product = stack.step(), ops.linear(x, weight, scale)
            torch.set_num_threads(1)  # a region of torch's own would hang
            same = torch.equal(step, expected) and torch.equal(product, ternary)
            return same and _runtime.region_count() == before

        def untouched() -> bool:  # torch itself is set to one thread and does not hang either
            return torch.get_num_threads() == 1 and torch.equal(wide + wide, summed)

        before = _runtime.region_count()
        assert exit_status_of_fork(child) == 0
        assert exit_status_of_fork(untouched) == 0
        assert torch.get_num_threads() == 2, "the parent keeps its threads"
        assert regions_of(stack.step) == 1
    text = capfd.readouterr().err
    assert text.count("bitnet_ops: this process was forked") == 1, text
    assert "spawn" in text and text.count("\n") == 1


def _step_in_worker(index: int) -> bool:
    stack = make_stack()
    with torch.inference_mode():
        return bool(torch.isfinite(stack.step(index)).all())


def test_multiprocessing_fork_pool(stack: Stack) -> None:
    with torch_threads(2):
        assert regions_of(stack.step) == 1
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(_step_in_worker, range(4)).get(timeout=120) == [True] * 4


def test_fork_before_the_first_region_keeps_its_threads() -> None:
    """Loading after the fork is the advice: the child then has threads of its own."""
    code = """
import os, signal, sys, torch
import bitnet_ops
from bitnet_ops import _runtime
sys.path.insert(0, sys.argv[1])
from stack_of_layers import make_stack
torch.set_num_threads(2)
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    make_stack().step()
    os._exit(0 if _runtime.region_count() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1] / "helpers")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("0\n", "")


# The CPUs ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_two_threads_on_one_cpu_take_the_time_of_one() -> None:
    """A call whose second thread only takes its CPU away would take a hundred times as long."""
    code = """
import os, time, torch
from bitnet_ops import ops
weight = ops.pack(torch.randint(-1, 2, (2560, 2560), dtype=torch.int8))
x, scale = torch.randn(1, 2560), torch.ones(1)
def seconds(threads, runs):  # of processor time: what other processes do matters little
    torch.set_num_threads(threads)
    best = 1e9
    for _ in range(runs):
        before = time.process_time()
        for _ in range(100):
            ops.linear(x, weight, scale)
        best = min(best, time.process_time() - before)
    return best
torch.set_num_threads(2)
ops.linear(x, weight, scale)  # the second thread is made
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
print(seconds(2, 5) / seconds(1, 5))
"""
    ours = ("OMP_", "GOMP_", "BITNET_OPS_TUNING")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert float(run.stdout) < 3, run.stdout


# The process ------------------------------------------------------------------------------------


def test_one_openmp_runtime_beside_onednn_and_the_step() -> None:
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from stack_of_layers import make_stack
torch.set_num_threads(2)
make_stack().step()
torch.nn.functional.linear(torch.ones(64, 512).bfloat16(), torch.ones(256, 512).bfloat16())
print(open("/proc/self/maps").read())
"""
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1] / "helpers")]
    maps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    openmp = [path for path in paths if re.match(r"lib(gomp|omp|iomp5)\b", Path(path).name)]
    assert len(openmp) == 1, openmp
