"""Facts about the machine, read from files written by hand: control groups, caches, pages, maps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bitnet_ops import machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_names_family_and_flags(tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU\ncpu family\t: 25\nmodel\t\t: 1\n"
    text += "flags\t\t: fpu amx_tile\n"
    root = write(tmp_path, {"proc/cpuinfo": text + "\n" + text.replace("Some", "Other")})
    assert machine.cpu_model(root) == "Some CPU (family 25, model 1)"
    assert machine.cpu_flags(root) == {"fpu", "amx_tile"}


def test_cpu_of_an_arm_kernel(tmp_path: Path) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd0c\n"
    root = write(tmp_path, {"proc/cpuinfo": text})
    assert machine.cpu_model(root) == "0xd0c"
    assert "asimddp" in machine.cpu_flags(root)


def test_caches(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu0/cache/index"
    rows = [("1", "Data", "48K"), ("1", "Instruction", "64K"), ("2", "Unified", "1M")]
    files = {}
    for i, row in enumerate(rows):
        for name, value in zip(("level", "type", "size"), row, strict=True):
            files[f"{base}{i}/{name}"] = value + "\n"
    assert machine.cache_bytes(write(tmp_path, files)) == {"L1": 48 << 10, "L2": 1 << 20}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        # the parent's limit binds as well
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
            },
            2.0,
        ),
        # a container: the path names a directory of the host, our own group is the top
        ({"proc/self/cgroup": "0::/host/x\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/c\n0::/\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert machine.cpu_quota(write(tmp_path, files)) == quota


def test_available_cpus_are_whole_and_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: [0, 1, 2, 3])
    for quota, expected in ((None, 4), (0.5, 1), (1.5, 1), (2.0, 2), (16.0, 4)):
        monkeypatch.setattr(machine, "cpu_quota", lambda root, q=quota: q)
        assert machine.cpus_available() == expected


def test_default_threads_are_physical_cores_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {topology.format(i): f"{i % 4},{i % 4 + 4}\n" for i in range(8)})
    for mask, quota, expected in (
        (range(8), None, 4),
        (range(8), 3.0, 3),
        ([0, 4], None, 1),
        ([0, 1, 5], None, 2),
        (range(8), 0.5, 1),
    ):
        monkeypatch.setattr(machine, "affinity", lambda m=mask: list(m))
        monkeypatch.setattr(machine, "cpu_quota", lambda root, q=quota: q)
        assert machine.default_threads(root) == expected, (mask, quota)


def test_numa_nodes(tmp_path: Path) -> None:
    assert machine.numa_nodes(tmp_path) == 1
    nodes = "sys/devices/system/node/"
    names = ("node0/meminfo", "node1/meminfo", "possible")
    root = write(tmp_path, {nodes + name: "" for name in names})
    assert machine.numa_nodes(root) == 2


def test_effect_of_a_placement_depends_on_the_nodes(tmp_path: Path) -> None:
    first = "each page on the memory node of the thread that writes it first"
    assert machine.placement_effect("first_touch", tmp_path) == first
    one = machine.placement_effect("interleave", tmp_path)
    assert one == "interleave, without effect on one memory node"
    nodes = {f"sys/devices/system/node/node{i}/meminfo": "" for i in range(4)}
    root = write(tmp_path, nodes)
    assert machine.placement_effect("interleave", root) == "interleaved over 4 memory nodes"
    assert machine.placement_effect("first_touch", root) == first


@pytest.mark.parametrize(
    ("files", "available", "limit"),
    [
        ({"1:memory:/x": {"memory/x/memory.limit_in_bytes": 2**63 - 4096}}, 1 << 20, None),
        ({"0::/y": {"y/memory.max": "max"}}, 1 << 20, None),
        ({"0::/y": {"y/memory.max": 4096}}, 4096, 4096),
        ({"0::/y": {"y/memory.max": 4096, "y/memory.current": 5000}}, 0, 4096),
        # what files keep in memory is given up where it is needed
        (
            {
                "0::/y": {
                    "y/memory.max": 9000,
                    "y/memory.current": 8000,
                    "y/memory.stat": "anon 1000\nfile 7000\ninactive_file 4000\nactive_file 2500",
                }
            },
            7500,
            9000,
        ),
        (
            {
                "7:memory:/x": {
                    "memory/x/memory.limit_in_bytes": 9000,
                    "memory/x/memory.usage_in_bytes": 8000,
                    "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 5000",
                }
            },
            6000,
            9000,
        ),
        # the parent's limit binds as well
        ({"0::/a/b": {"a/b/memory.max": 8192, "a/memory.max": 4096}}, 4096, 4096),
    ],
)
def test_memory_and_its_limits(
    tmp_path: Path, files: dict[str, dict[str, Any]], available: int, limit: int | None
) -> None:
    meminfo = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n"
    ((group, values),) = files.items()
    named = {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in values.items()}
    root = write(tmp_path, {"proc/meminfo": meminfo, "proc/self/cgroup": f"{group}\n", **named})
    expected = {"total": 2 << 20, "available": available, "limit": limit}
    assert machine.memory_bytes(root) == expected
    minimum = min(2 << 20, limit or 2 << 20)
    assert machine.cache_budget(root) == min(minimum // 4, available // 2)


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_memory_within_the_limits_of_the_process(name: str) -> None:
    code = f"""
import resource
from bitnet_ops import machine
resource.setrlimit(resource.{name}, (3 << 30, 3 << 30))
found = machine.memory_bytes()
assert found["limit"] <= 3 << 30 and 0 < found["available"] < 3 << 30, found
assert machine.cache_budget() <= 3 << 28
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_huge_page_setting(tmp_path: Path) -> None:
    assert machine.transparent_huge_pages(tmp_path) is None
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    assert machine.transparent_huge_pages(write(tmp_path, {path: "always [madvise] never\n"})) == (
        "madvise"
    )


def test_openmp_runtimes_in_maps(tmp_path: Path) -> None:
    mapping = "7f00-7f01 r-xp 00000000 00:00 1   {}\n"
    mapped = [
        "/a/torch/lib/libgomp.so.1",
        "/a/torch/lib/libgomp.so.1",
        "/b/libs/libgomp-a34b3233.so.1.0.0",
        "/usr/lib/libiomp5.so",
        "/usr/lib/libomp.so.5 (deleted)",
        "/usr/lib/libomptarget.so",
        "/usr/lib/libgomposer.so",
        "/with space/libomp.so",
    ]
    text = "".join(mapping.format(path) for path in mapped) + "7f02-7f03 rw-p 0 00:00 0 \n"
    found = machine.openmp_runtimes(write(tmp_path, {"proc/self/maps": text}))
    assert found == sorted({mapped[0], mapped[2], mapped[3], mapped[4], mapped[7]})


def test_thread_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "BITNET_OPS_")):
            monkeypatch.delenv(name)
    assert machine.thread_environment() == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.thread_environment() == {"OMP_NUM_THREADS": "3"}


def test_this_machine_has_answers() -> None:
    assert machine.cpu_model() and machine.affinity() and machine.cpus_available() >= 1
    assert machine.page_bytes() >= 4096
    memory = machine.memory_bytes()
    assert memory["total"] and memory["available"] and memory["total"] > memory["available"]


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no account of waiting"
)
def test_waiting_for_a_cpu_is_counted() -> None:
    before = machine.run_delay_ns()
    # more busy processes than CPUs: some of this process's threads have to wait
    worker = [sys.executable, "-c", "import time; t = time.time() + 1\nwhile time.time() < t: pass"]
    others = [subprocess.Popen(worker) for _ in range(2 * len(machine.affinity()))]
    end = time.monotonic() + 10
    while machine.run_delay_ns() == before and time.monotonic() < end:
        pass
    for other in others:
        other.wait()
    assert machine.run_delay_ns() > before
