"""Threads of the benchmark's own process on CPUs of their own.

Without it two OpenMP threads may stay on one CPU for a whole measurement, beside an idle one. A
process that hosts the library is never pinned: nothing here runs outside `pinned`, which only the
commands enter. It must not know what is measured.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bitnet_ops import _runtime, machine

_LOOK_S = 5e-3  # long enough for every thread of a team to be seen working
_cpus: list[int] = []  # what the process may use, while pinning is on
_pinned: list[int] = []  # ids of the threads that `use_threads` pinned last


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """For its time `use_threads` pins; afterwards every thread may run where it might before."""
    global _cpus
    if not hasattr(os, "sched_setaffinity") or _cpus:
        yield
        return
    _cpus = machine.one_of_each_core_first(machine.affinity())
    try:
        yield
    finally:
        free_all(_cpus)
        _cpus = []


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """No pinning for a while: for other engines, which inherit the mask of the calling thread."""
    global _cpus
    before, _cpus = _cpus, []
    if before:
        free_all(before)
    try:
        yield
    finally:
        _cpus = before


def use_threads(count: int) -> None:
    """torch.set_num_threads(count); while pinning is on, each thread on a CPU of its own."""
    if not _cpus:
        torch.set_num_threads(count)
        return
    if len(_pinned) == count == torch.get_num_threads() and set(_pinned) <= set(_threads()):
        return
    # a thread that is made inherits the mask of its maker
    free_all(_cpus)
    torch.set_num_threads(count)
    if count > len(_cpus):
        return
    _pinned[:] = team()
    for tid, cpu in zip(_pinned, _cpus, strict=False):
        _set(tid, {cpu})


def cpus() -> list[int]:
    """The CPUs that this process may use, pinned or not."""
    return sorted(_cpus) or machine.affinity()


def team() -> list[int]:
    """Ids of the threads that a parallel region runs on, the calling one first."""
    _runtime.probe_int8_peak(1)  # threads that are to be made are made
    before, end = _run_times(), time.perf_counter() + _LOOK_S
    while time.perf_counter() < end:
        _runtime.probe_int8_peak(100)
    ran = {tid: ns - before.get(tid, 0) for tid, ns in _run_times().items()}
    own = threading.get_native_id()
    others = sorted((tid for tid in ran if tid != own), key=lambda tid: -ran[tid])
    return [own, *others[: torch.get_num_threads() - 1]]


def free_all(allowed: list[int]) -> None:
    """Let every thread of this process run on all of `allowed`."""
    _pinned.clear()
    for tid in _threads():
        _set(tid, set(allowed))


def _threads() -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir("/proc/self/task"))
    except OSError:
        return [os.getpid()]


def _run_times() -> dict[int, int]:
    """Nanoseconds that each thread has run."""
    found = {}
    for tid in _threads():
        with contextlib.suppress(OSError, ValueError, IndexError):  # ended meanwhile
            found[tid] = int(Path(f"/proc/self/task/{tid}/schedstat").read_text().split()[0])
    return found


def _set(tid: int, mask: set[int]) -> None:
    with contextlib.suppress(OSError):  # the thread has ended, or a sandbox forbids it
        os.sched_setaffinity(tid, mask)
