"""How fast products of one token are with "1.6bit" weights beside "2bit" ones, on this machine.

Measured in some 30 ms and kept in the cache directory for a day, one small file for each CPU,
instruction set, number of threads and kind of scales; weight_choice.py decides by it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitnet_ops import _runtime, machine, ops
from bitnet_ops.arguments import is_number
from bitnet_ops.errors import BitNetError
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.loading.resolve import LoadError, cache_directory
from bitnet_ops.memory.arena import Arena
from bitnet_ops.nn.packing import PackedWeight, blocked_scales, packed_shape
from bitnet_ops.nn.storage import GROUP_ACTIVATION_FORMAT, USUAL_FORMAT
from bitnet_ops.untrusted import read_json_object

SMALL_FORMAT = "1.6bit"
PROBES = "probes"  # the folder of measurements in the cache directory
# A virtual machine reads memory at half or twice its speed after its host has moved it.
KEPT_S = 24 * 3600

# Of the product that is timed: 8 MB, so that the call itself takes no part; less for slow kernels.
_N, _FEW, _K = 12800, 640, 2560
_SLOW_S = 0.0003  # of the small product, a twentieth of the other
MAX_ROUNDS, MIN_ROUNDS = 40, 3
_MEASURE_S = 0.03
_UNKNOWN_CACHE = 32 << 20
_MIN_BYTES, _MAX_BYTES = 64 << 20, 192 << 20
_BUSY_SHARE = 0.1  # of the time of a probe's threads that others may take


@dataclass(frozen=True)
class Probe:
    """Products of one token in both layouts, over memory that no cache holds.

    ratio: the time of SMALL_FORMAT by that of USUAL_FORMAT. rounds: how often each was timed.
    seconds: what the measurement took, without the first touch of its memory. busy: whether other
    processes took much of that time: then it says nothing and is not kept. kept: whether it comes
    from an earlier load.
    """

    ratio: float
    rounds: int
    seconds: float
    busy: bool = False
    kept: bool = False


# Kept for the machine -----------------------------------------------------------------------------


def probe_here(
    group_size: int = 0,
    activation_format: str = "auto",
    cache: str | os.PathLike[str] | None = None,
    memory: Callable[[], torch.Tensor] | None = None,
) -> Probe | None:
    """The kept probe of this machine and number of threads, or else a new one, which is kept.

    A cache that cannot be read or written, or has other contents, is no error: then it is measured.
    `memory`: gives the memory to `measure` in, if that has to be done.
    """
    measure_now = functools.partial(measure, memory=memory)
    activations = _activations(group_size, activation_format)
    key = machine_key(group_size, activations)
    try:
        place = cache_directory(cache) / PROBES / f"{_digest(key)}.json"
    except LoadError:  # no home directory
        return measure_now(group_size, activations)
    if (kept := read_probe(place, key)) is not None:
        return kept
    found = measure_now(group_size, activations)
    if found is not None and not found.busy:
        write_probe(place, key, found)
    return found


def machine_key(group_size: int, activations: str) -> dict[str, Any]:
    """All that a probe depends on, as JSON values."""
    return {
        "cpu": machine.cpu_model(),
        "isa": _runtime.isa(),
        "threads": torch.get_num_threads(),
        "group_size": group_size,
        "activations": activations,
        "placement": _runtime.memory_placement(),
        "version": importlib.metadata.version("bitnet-ops"),
        "built": int(Path(str(_runtime.__file__)).stat().st_mtime),
    }


def read_probe(place: Path, key: dict[str, Any]) -> Probe | None:
    """What `write_probe` has kept for `key` at `place` within a day; None for anything else."""
    try:
        if not 0 <= time.time() - place.stat().st_mtime < KEPT_S:
            return None
        found = read_json_object(place, limit=1 << 16)
    except (BitNetError, OSError):
        return None
    ratio, rounds, seconds = (found.get(name) for name in ("ratio", "rounds", "seconds"))
    if found.get("key") != key or not (is_number(ratio) and 0 < ratio < 100):
        return None
    if not isinstance(rounds, int) or not is_number(seconds):
        return None
    return Probe(float(ratio), rounds, float(seconds), kept=True)


def write_probe(place: Path, key: dict[str, Any], probe: Probe) -> None:
    """Keep `probe` at `place`, where that is possible."""
    contents = {
        "key": key,
        "ratio": probe.ratio,
        "rounds": probe.rounds,
        "seconds": probe.seconds,
    }
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_file(place) as file:
            file.write(json.dumps(contents, indent=1).encode())


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


# Measured -----------------------------------------------------------------------------------------


def measure(
    group_size: int = 0,
    activations: str = "int8",
    memory: Callable[[], torch.Tensor] | None = None,
) -> Probe | None:
    """Time products of one token in both layouts, in turns, on torch's threads.

    They walk through memory of three times the last-level cache, 64 to 192 MiB, so each finds its
    weights in memory, as a step of a large model does. A CPU with a cache of more than 100 MiB has
    some of them there, which tells in favour of USUAL_FORMAT.

    `memory` gives uint8 that may be overwritten, best what the model is about to be loaded into:
    the first touch of its pages takes as long as the measurement, on a virtual machine several
    times that, and a load has to touch them anyway. Without it, or with too little, other memory is
    taken. None where there is none.
    """
    try:
        place = _memory(memory)
    except (RuntimeError, MemoryError):
        return None
    began = time.perf_counter()
    waited = machine.run_delay_ns()
    kind = group_size, activations
    with torch.inference_mode():
        rows = _FEW if _seconds_of(_product(place, USUAL_FORMAT, _FEW, *kind)) > _SLOW_S else _N
        samples = alternate(
            [_product(place, name, rows, *kind) for name in (USUAL_FORMAT, SMALL_FORMAT)]
        )
    seconds = time.perf_counter() - began
    waited = machine.run_delay_ns() - waited
    usual, small = map(_lower_quartile, samples)
    threads, rounds = torch.get_num_threads(), len(samples[0])
    busy = waited > _BUSY_SHARE * 1e9 * sum(map(sum, samples)) * threads or rounds < MIN_ROUNDS
    return Probe(round(small / usual, 4), rounds, round(seconds, 4), busy)


def alternate(
    runs: Sequence[Callable[[int], object]], clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of each run in each round; every other round goes backwards.

    All get the same counter, the number of calls so far. Ends with the first round after 30 ms, at
    the latest with the 40th.
    """
    calls = 0
    for run in runs:  # finds the code, the threads and the scratch memory
        run(calls)
        calls += 1
    samples: list[list[float]] = [[] for _ in runs]
    end, order = clock() + _MEASURE_S, list(range(len(runs)))
    while not samples[0] or (len(samples[0]) < MAX_ROUNDS and clock() < end):
        for i in order:
            start = clock()
            runs[i](calls)
            samples[i].append(clock() - start)
            calls += 1
        order.reverse()
    return samples


def _product(
    memory: torch.Tensor, weight_format: str, rows: int, group_size: int, activations: str
) -> Callable[[int], object]:
    """A product with weights that begin at the n-th stretch of `memory`, by the number of the call.

    A stretch has room for a matrix of either layout. Any bytes are weights to the kernels.
    """
    shape = packed_shape(rows, _K, weight_format)
    stretch = max(math.prod(packed_shape(rows, _K, name)) for name in (USUAL_FORMAT, SMALL_FORMAT))
    stretches = memory.nbytes // stretch
    weights = [
        memory[i * stretch : i * stretch + math.prod(shape)].view(shape) for i in range(stretches)
    ]
    scale = torch.ones(rows, _K // group_size) if group_size else torch.ones(1)
    if group_size:
        parts = weights[0], scale, rows, _K, weight_format, group_size
        scale = blocked_scales(PackedWeight.unchecked(*parts))
    x = torch.ones(1, _K)

    def run(call: int) -> object:
        weight = weights[call % stretches]
        return ops.linear(x, weight, scale, None, (rows, _K), activations)

    return run


def _seconds_of(run: Callable[[int], object]) -> float:
    """The shorter one of two calls."""
    samples = []
    for call in range(2):
        start = time.perf_counter()
        run(call)
        samples.append(time.perf_counter() - start)
    return min(samples)


def _memory(given: Callable[[], torch.Tensor] | None) -> torch.Tensor:
    """As much as a probe wants, all of its pages there."""
    wanted = min(max(3 * last_cache(), _MIN_BYTES), _MAX_BYTES)
    memory = None if given is None else given()
    if memory is None or memory.nbytes < wanted:
        memory = Arena(wanted).memory
    for piece in memory[:wanted].split(_N * _K // 4):  # a matrix
        piece.fill_(1)  # on all threads, as a load does it
    return memory[:wanted]


def _lower_quartile(samples: Sequence[float]) -> float:
    """Others only ever add to a sample, and the very shortest met a cache."""
    return sorted(samples)[(len(samples) - 1) // 4]


def last_cache() -> int:
    """Bytes of the largest cache."""
    return max(machine.cache_bytes().values(), default=_UNKNOWN_CACHE)


def _activations(group_size: int, activation_format: str) -> str:
    if not group_size:  # the model will refuse any other
        return "int8"
    return GROUP_ACTIVATION_FORMAT if activation_format == "auto" else activation_format
