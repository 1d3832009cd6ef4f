"""Facts about the CPU, the memory and this process, read from /proc, /sys and the environment.

For `doctor` and the benchmarks. Every function answers None (or an empty list) where the operating
system does not tell. `root` stands for "/" and is another directory in tests.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import resource
from pathlib import Path

_ROOT = Path("/")
# hashed names as bundled by wheels (libgomp-a34b3233.so.1) included, libomptarget excluded
_OPENMP = re.compile(r"lib(gomp|omp|iomp5)\b")
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
    *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "MKL_NUM_THREADS"),
    *("BITNET_OPS_TUNING", "BITNET_OPS_MEMORY"),
)
# a limit of this size or more is how cgroup v1 spells "no limit"
_NO_LIMIT_BYTES = 1 << 60
_UNKNOWN_BYTES = 4 << 30  # of memory, where the system tells nothing


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _cpuinfo(root: Path, *names: str) -> str | None:
    """The first value of the first field of /proc/cpuinfo that is there; kernels name them so."""
    text = _text(root / "proc/cpuinfo") or ""
    for name in names:
        match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", text, re.MULTILINE)
        if match:
            return match[1].strip()
    return None


def cpu_model(root: Path = _ROOT) -> str:
    """The CPU's own name, with family and model where the name alone says little."""
    name = _cpuinfo(root, "model name", "Hardware", "CPU part") or platform.processor()
    family, model = _cpuinfo(root, "cpu family"), _cpuinfo(root, "model")
    numbers = f" (family {family}, model {model})" if family and model else ""
    return f"{name or platform.machine()}{numbers}"


def cpu_flags(root: Path = _ROOT) -> set[str]:
    """What the kernel lists as CPU flags; `hypervisor` among them means a virtual machine."""
    return set((_cpuinfo(root, "flags", "Features") or "").split())


def cache_bytes(root: Path = _ROOT) -> dict[str, int]:
    """Size of each data cache that CPU 0 sees: {"L1": ..., "L2": ..., "L3": ...}."""
    sizes = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_text(index / name) for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KM]?)", size or "")
        if level and match and kind in {"Data", "Unified"}:
            sizes[f"L{level}"] = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return sizes


torch_threads: int | None = None  # what torch chose by itself, where the command line took others


def _mask() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


_MASK_AT_START = _mask()  # the package imports this module before torch


def binding() -> list[str]:
    """The environment variables that tell OpenMP to bind its threads to CPUs."""
    given = {name: os.environ.get(name, "").lower() for name in _THREAD_VARIABLES}
    names = [] if given["OMP_PROC_BIND"] == "false" else ["OMP_PROC_BIND", "OMP_PLACES"]
    names += ["GOMP_CPU_AFFINITY"] if names else []
    names += [] if given["KMP_AFFINITY"].endswith(("none", "disabled")) else ["KMP_AFFINITY"]
    return [name for name in names if given[name]]


def affinity() -> list[int]:
    """The CPUs this process may run on.

    Where OpenMP binds threads, importing torch pins the main one to the first CPU: then those from
    before.
    """
    return list(_MASK_AT_START) if binding() else _mask()


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """The cgroup directories of this process for a controller, its own first, then its parents."""
    base, found = root / "sys/fs/cgroup", []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top = base
        elif controller in controllers.split(","):
            top = base / controller
        else:
            continue
        own = top / path.lstrip("/")
        # inside a container the path may name a directory of the host; the top is then our own
        found += [p for p in (own, *own.parents) if p == top or top in p.parents]
    return found


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the control group grants (docker --cpus), None without a limit."""
    quotas = []
    for directory in _cgroup_directories(root, "cpu"):
        v2 = (_text(directory / "cpu.max") or "").split()
        v1 = [_text(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = v2 if len(v2) == 2 else v1
        if quota and period and quota not in {"max", "-1"}:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cpus_available(root: Path = _ROOT) -> int:
    """How many threads can run at the same time: the affinity mask, cut by the quota."""
    quota = cpu_quota(root)
    return max(1, min(len(affinity()), int(quota) if quota is not None else len(affinity())))


def one_of_each_core_first(cpus: list[int], root: Path = _ROOT) -> list[int]:
    """The CPUs in an order in which siblings of a physical core come after one of each core."""
    first: list[int] = []
    siblings: list[int] = []
    seen: set[str] = set()
    for cpu in cpus:
        core = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = core or str(cpu)
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    return first + siblings


def physical_cores(root: Path = _ROOT) -> int:
    """Physical cores with a CPU in the affinity mask."""
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({_text(root / path.format(cpu)) or str(cpu) for cpu in affinity()})


def default_threads(root: Path = _ROOT) -> int:
    """The threads of our own processes: one a physical core of the affinity mask, by the quota."""
    return max(1, min(physical_cores(root), cpus_available(root)))


def wanted_threads(root: Path = _ROOT) -> int | None:
    """How many threads a process of our own takes: OMP_NUM_THREADS, or the default.

    None where MKL_NUM_THREADS decides, as torch has it. torch's own number may be less: it is what
    MKL finds by binding its thread, which fails where a sandbox refuses sched_setaffinity.
    """
    if "MKL_NUM_THREADS" in os.environ:
        return None
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    count = int(first) if first.isdecimal() and int(first) > 0 else default_threads(root)
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    return min(count, int(limit)) if limit.isdecimal() and int(limit) > 0 else count


def numa_nodes(root: Path = _ROOT) -> int:
    """Nodes with memory of their own; 1 where the system tells of none."""
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))


def placement_effect(placement: str, root: Path = _ROOT) -> str:
    """What BITNET_OPS_MEMORY does here, "first_touch" or "interleave", in words."""
    nodes = numa_nodes(root)
    if placement != "interleave":
        return "each page on the memory node of the thread that writes it first"
    if nodes == 1:
        return "interleave, without effect on one memory node"
    return f"interleaved over {nodes} memory nodes"


def memory_bytes(root: Path = _ROOT) -> dict[str, int | None]:
    """{"total", "available", "limit"}: of the machine, for this process now, and its lowest limit.

    "limit" is the least of the control groups' and of `ulimit -v` and `-d`, None without any.
    "available" is what the machine and all of them leave; files that are kept in memory count as
    free, for the system gives them up.
    """
    text = _text(root / "proc/meminfo") or ""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB", text, re.MULTILINE))
    kib = {name: int(value) << 10 for name, value in found.items()}
    limited = [*_group_limits(root), *_process_limits(root)]
    left = [max(0, limit - used) for limit, used in limited]
    left += [kib["MemAvailable"]] if "MemAvailable" in kib else []
    return {
        "total": kib.get("MemTotal"),
        "available": min(left, default=None),
        "limit": min((limit for limit, _ in limited), default=None),
    }


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be given up) of each control group with a limit."""
    found = []
    for directory in _cgroup_directories(root, "memory"):
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            value, used = _text(directory / limit), _text(directory / usage) or "0"
            if value and value.isdigit() and int(value) < _NO_LIMIT_BYTES:
                stat = _text(directory / "memory.stat") or ""
                # version 1 counts a group's children under names with total_
                names = "total_(?:in)?active_file" if "total_" in stat else "(?:in)?active_file"
                files = re.findall(rf"^{names} (\d+)$", stat, re.MULTILINE)
                found.append((int(value), int(used) - sum(map(int, files))))
    return found


def _process_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use) of address space and of data (`ulimit -v`, `-d`), where limited."""
    pages = (_text(root / "proc/self/statm") or "0 0 0 0 0 0").split()
    names = (resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])
    limits = ((resource.getrlimit(name)[0], int(used) * page_bytes()) for name, used in names)
    return [(soft, used) for soft, used in limits if soft != resource.RLIM_INFINITY]


def cache_budget(root: Path = _ROOT) -> int:
    """Bytes that a cache of keys and values may take where nobody says.

    A quarter of the machine's memory, or of a container's or process' limit, and never more than
    half of what is available now: weights are loaded by then, and work goes on beside it.
    """
    memory = memory_bytes(root)
    bounds = [memory["total"], memory["limit"]]
    minimum = min((value for value in bounds if value is not None), default=_UNKNOWN_BYTES)
    available = minimum if memory["available"] is None else memory["available"]
    return min(minimum // 4, available // 2)


def transparent_huge_pages(root: Path = _ROOT) -> str | None:
    """The kernel's setting: "always", "madvise" or "never"."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def page_bytes() -> int:
    """Size of an ordinary page."""
    return os.sysconf("SC_PAGE_SIZE")


def load_average() -> list[float] | None:
    """Runnable processes over the last 1, 5 and 15 minutes."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


def run_delay_ns() -> int:
    """Nanoseconds that the threads of this process stood ready and waited for a CPU, ever since.

    Rises when other processes take the CPUs. 0 where the kernel keeps no such account.
    """
    total = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/schedstat", "rb", buffering=0) as file:
                total += int(file.read(64).split()[1])
    except (OSError, IndexError):  # no accounting, or a thread ended meanwhile
        return 0
    return total


def openmp_runtimes(root: Path = _ROOT) -> list[str] | None:
    """Paths of the OpenMP runtimes mapped into this process; more than one is trouble.

    None where the system does not say.
    """
    if (maps := _text(root / "proc/self/maps")) is None:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line}
    return sorted(path for path in paths if _OPENMP.match(Path(path).name))


def set_tuning(key: str, value: str) -> None:
    """Set a key of BITNET_OPS_TUNING for this process, unless a person has; before it is read.

    The variable of its own that the key replaces counts as well.
    """
    parts = [part for part in os.environ.get("BITNET_OPS_TUNING", "").split(",") if part]
    if f"BITNET_OPS_{key.upper()}" in os.environ or any(p.startswith(f"{key}=") for p in parts):
        return
    os.environ["BITNET_OPS_TUNING"] = ",".join([*parts, f"{key}={value}"])


def thread_environment() -> dict[str, str]:
    """The environment variables that govern OpenMP threads, as far as they are set."""
    return {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
