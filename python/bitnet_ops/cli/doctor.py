"""`bitnet-ops doctor`: what this machine offers, what the package uses of it, and why.

`collect` gathers facts, `find_problems` judges them, `render` prints both on one screen. It changes
nothing outside its process, and measures nothing but what the first prompt would (`bitnet-ops
bench` measures).
`--check-amx` holds the CPU's tile products against the model that every other instruction set
follows, and does nothing else. `--products MODEL` prints which product each matrix of a model takes
and into what its work is cut.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from bitnet_ops import _runtime, machine
from bitnet_ops.cli.arguments import add_json
from bitnet_ops.cli.terminal import print_result
from bitnet_ops.cli.vllm import CPU_BUILD, gpu_build
from bitnet_ops.errors import BitNetError, counted

SCHEMA_VERSION = 2
_GIB = 1 << 30
# the 2B-4T model needs 0.5 GiB of ternary weights and 0.65 GiB of bfloat16 embeddings
_COMFORTABLE_BYTES = int(1.5 * _GIB)
_COLUMNS = 100
_LABEL = 10
# of each kind of operand and instruction: some ten million outputs in a few seconds
_AMX_PRODUCTS = 2000
_STEP_TOKENS = (1, 4, 16, 64, 512)  # whose products are shown
_PAIRS = "vdpbf16ps"  # attention over bfloat16 caches uses it where it adds as its model

Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = (
        "Show the CPU, the chosen kernels and the reason, threads, OpenMP runtimes, torch and "
        "memory. Exit status 1 when something is broken, 0 with or without warnings."
    )
    add_json(parser)
    parser.add_argument(
        "--check-amx",
        action="store_true",
        help="only compare AMX's products with their model over random operands; exit status 1 "
        "when one differs or there is no AMX to ask",
    )
    parser.add_argument(
        "--products",
        metavar="MODEL",
        help="only print which product the matrices of a converted model take here, by the tokens "
        "of a step",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when the package cannot work as the environment is set, else 0."""
    if args.check_amx:
        return _check_amx(args.json)
    if args.products is not None:
        return _print_products(args.products, args.json)
    facts = collect()
    print_result(facts, render(facts), as_json=args.json)
    return 1 if any(problem["severity"] == "error" for problem in facts["problems"]) else 0


def _check_amx(as_json: bool) -> int:
    """Ask the CPU's AMX; 0 when it answered as the model does, else 1, also where there is none."""
    rows = _runtime.check_amx(_AMX_PRODUCTS)
    # vdpbf16ps is left alone where it differs: no reason to worry, nor does it stand for AMX
    asked = [row for row in rows if row["available"] and row["instruction"] != _PAIRS]
    good = bool(asked) and not any(row["different"] for row in asked)
    lines = [_line("cpu", machine.cpu_model())]
    lines += [_line("amx", f"{row['instruction']}: {_amx_answer(row)}") for row in rows]
    if not asked:
        lines.append(_line("", "nothing was checked: this CPU, or the system, offers no AMX"))
    elif not good:
        lines.append(_line("", "results on this CPU are not those of others: set BITNET_OPS_ISA="))
        lines.append(_line("", "avx512_vnni, and please report the lines above"))
    found = {"cpu": machine.cpu_model(), "good": good, "checks": rows}
    print_result(found, lines, as_json=as_json)
    return 0 if good else 1


def _amx_answer(row: Facts) -> str:
    if not row["available"]:
        return "not here, not checked"
    if row["different"]:
        rest = "it is not used here" if row["instruction"] == _PAIRS else row["first_difference"]
        return f"{row['different']} of {row['outputs']} outputs differ; {rest}"
    return f"{row['outputs']} outputs, all as in the model"


def _print_products(model: str, as_json: bool) -> int:
    """Which product each shape of a model's matrices takes, in both layouts for CPUs; 0."""
    import torch

    from bitnet_ops.conversions import resolve
    from bitnet_ops.formats import sglbitnt
    from bitnet_ops.loading.weight_choice import Matrices

    file = resolve(model, convert=False).file
    reader = sglbitnt.Reader(file, check_codes=False)
    matrices = Matrices.of_tensors(reader.tensors.values())
    threads, grouped = torch.get_num_threads(), matrices.group_size != 0
    rows: list[Facts] = []
    for layout in ("2bit", "1.6bit"):
        for n, k in sorted(set(matrices.shapes)):
            plans = [
                {"tokens": t, **_runtime.product_plan(layout, n, k, t, threads, grouped)}
                for t in _STEP_TOKENS
            ]
            rows.append({"layout": layout, "rows": n, "columns": k, "plans": plans})
    times: list[Facts] = [
        {"layout": layout, "tokens": t, "seconds": _runtime.product_times(layout, t, grouped)}
        for layout in ("2bit", "1.6bit")
        for t in _STEP_TOKENS
    ]
    found = {
        "model": str(file),
        "isa": _runtime.isa(),
        "threads": threads,
        "chosen": _runtime.tuning()["products"],
        "products": rows,
        "times": times,
    }
    lines = [
        _line("model", str(file)),
        _line(
            "products", f"of {found['isa']} on {counted(threads, 'thread')}, by tokens of a step;"
        ),
        _line("", "blocks of tokens x parts of K x parts of rows, where they are several"),
    ]
    for row in rows:
        said = ", ".join(f"{plan['tokens']}: {_plan_text(plan)}" for plan in row["plans"])
        lines.append(_line(row["layout"], f"{row['rows']} x {row['columns']}   {said}"))
    if any(time["seconds"] for time in times):
        lines.append(_line("measured", "1024 x 1024 on one thread, now, microseconds"))
    for time in times:
        said = ", ".join(f"{name} {1e6 * s:.0f}" for name, s in time["seconds"].items())
        if said:
            lines.append(_line(time["layout"], f"{time['tokens']}: {said}"))
    print_result(found, lines, as_json=as_json)
    return 0


def _plan_text(plan: Facts) -> str:
    cuts = [plan[name] for name in ("token_blocks", "k_parts", "row_parts")]
    cut = "" if max(cuts) == 1 else f" ({' x '.join(map(str, cuts))})"
    return f"{plan['algorithm']}{cut}"


def collect() -> Facts:
    """Every fact, and the problems found in them, as JSON-ready values."""
    import torch

    from bitnet_ops.integrations import sglang, vllm
    from bitnet_ops.loading.weight_choice import named_format

    build, isa, features = _runtime.build_info(), _isa(), _runtime.cpu_features()
    tuning, tuning_error = _or_error(_runtime.tuning)
    lanes, _ = _or_error(_runtime.tile_lanes)  # what is wrong with the ISA is said by `_isa`
    named, named_error = _or_error(named_format)
    placement, placement_error = _or_error(_runtime.memory_placement)
    facts: Facts = {
        "schema": "bitnet_ops.cli.doctor",
        "schema_version": SCHEMA_VERSION,
        "package": {
            "version": metadata.version("bitnet-ops"),
            "location": str(Path(machine.__file__).parent),
            "python": platform.python_version(),
            "build": build,
        },
        "torch": {
            "version": torch.__version__,
            "location": str(Path(torch.__file__).parent),
            "abi_floor": build["torch_abi_floor"],
        },
        "cpu": {
            "model": machine.cpu_model(),
            "architecture": platform.machine(),
            "virtual": "hypervisor" in machine.cpu_flags(),
            "cache_bytes": machine.cache_bytes(),
            "features": features,
        },
        "isa": isa,
        "amx": _amx(features, isa["BITNET_OPS_ISA"]),
        "tuning": {"tile_lanes": lanes, **(tuning or {}), "error": tuning_error},
        "threads": {
            "torch": torch.get_num_threads(),
            "torch_alone": machine.torch_threads,
            "default": machine.default_threads(),
            "binding": _binding(machine.openmp_runtimes()),
            "logical_cpus": os.cpu_count(),
            "affinity": machine.affinity(),
            "cgroup_quota": machine.cpu_quota(),
            "available": machine.cpus_available(),
            "physical_cores": machine.physical_cores(),
            "numa_nodes": machine.numa_nodes(),
            "environment": machine.thread_environment(),
        },
        "openmp_runtimes": machine.openmp_runtimes(),
        "memory": machine.memory_bytes(),
        "pages": {
            "page_bytes": machine.page_bytes(),
            "transparent_huge_pages": machine.transparent_huge_pages(),
            "placement": placement,
            "placement_error": placement_error,
        },
        "load_average": machine.load_average(),
        "weight_format": {"named": named, "error": named_error},
        "sglang": sglang.status(),
        "vllm": {**vllm.status(), "gpu_build": gpu_build() is not None},
    }
    facts["problems"] = find_problems(facts)
    return facts


def _or_error(ask: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `ask` returns, or why it cannot: an environment variable that says nothing known."""
    try:
        return ask(), None
    except (RuntimeError, BitNetError) as failure:
        return None, str(failure)


def _isa() -> Facts:
    """The ISA in use, or why there is none, and one row an ISA of this build, best first."""
    forced = os.environ.get("BITNET_OPS_ISA") or None
    selected, error = _or_error(_runtime.isa)
    rows = [dict(row) for row in _runtime.kernel_table()]
    for row in rows:
        row["selected"] = row["isa"] == selected
        row["reason"] = _reason(row, _runtime.available_isas()[0], forced)
    return {"selected": selected, "BITNET_OPS_ISA": forced, "error": error, "table": rows}


def _reason(row: dict[str, Any], best: str, forced: str | None) -> str:
    if not row["available"]:
        return f"CPU or system lacks {', '.join(row['missing'])}"
    if row["selected"]:
        by_hand = forced == row["isa"]
        return "chosen by BITNET_OPS_ISA" if by_hand else "the best that this CPU can execute"
    return "the best here, but not chosen" if row["isa"] == best else "available, slower"


def _amx(features: dict[str, bool], forced: str | None) -> Facts:
    """Whether the CPU has AMX, and the system's answer: Linux grants tiles to who asks for them.

    permission: None (no AMX), "granted", "rejected", or "not asked for" where BITNET_OPS_ISA names
    kernels that need none.
    """
    has = bool(features.get("amx_tile"))
    on_cpu = has or "amx_tile" in machine.cpu_flags()
    without = "not asked for" if forced and not forced.startswith("amx") else "rejected"
    return {"on_cpu": on_cpu, "permission": ("granted" if has else without) if on_cpu else None}


# Problems -----------------------------------------------------------------------------------------

Problem = tuple[str, str, str]  # severity ("error" or "warning"), problem, remedy


def find_problems(facts: Facts) -> list[dict[str, str]]:
    """What is wrong in `facts`: {"severity", "problem", "remedy"} each."""
    found = [
        *_isa_problems(facts["isa"], facts["amx"]),
        *_thread_problems(facts["threads"]),
        *_openmp_problems(facts["openmp_runtimes"]),
        *_memory_problems(facts["memory"], facts["pages"], facts["threads"]["numa_nodes"]),
        *_plugin_problems("sglang", facts["sglang"], "SGLANG_PLUGINS"),
        *_plugin_problems("vllm", facts["vllm"], "VLLM_PLUGINS"),
        *_build_problems(facts["vllm"]),
    ]
    if error := facts["tuning"]["error"]:
        found += [("error", error, f"unset {error.partition(':')[0]}, or set it as it says")]
    if error := facts["weight_format"]["error"]:
        remedy = "unset BITNET_OPS_WEIGHT_FORMAT: a measurement decides then"
        found += [("error", error, remedy)]
    return [dict(zip(("severity", "problem", "remedy"), row, strict=True)) for row in found]


def _isa_problems(isa: Facts, amx: Facts) -> list[Problem]:
    found = []
    best = next(row["isa"] for row in isa["table"] if row["available"])
    if isa["error"]:
        found.append(("error", isa["error"], "unset BITNET_OPS_ISA, or name one of those"))
    elif isa["selected"] != best:
        problem = f"{isa['selected']} is in use although {best} is available"
        found.append(("warning", problem, "unset BITNET_OPS_ISA unless you are testing"))
    elif best == "scalar":
        problem = "no SIMD kernels for this CPU: everything runs in plain C++, slowly"
        found.append(("warning", problem, "use a CPU with AVX2, or an Arm CPU with dotprod"))
    if amx["permission"] == "rejected":
        problem = "the CPU has AMX, the operating system rejects its tile state"
        found.append(("warning", problem, "use Linux 5.16 or newer; allow arch_prctl in seccomp"))
    return found


def _binding(runtimes: list[str] | None) -> list[str]:
    """The variables that bind threads here; KMP_AFFINITY is Intel's library's alone."""
    intel = any("iomp" in path for path in runtimes or ())
    return [name for name in machine.binding() if intel or name != "KMP_AFFINITY"]


def _thread_problems(threads: Facts) -> list[Problem]:
    used, available, alone = threads["torch"], threads["available"], threads["torch_alone"]
    maximum, found = threads["default"], list[Problem]()
    if names := " and ".join(threads["binding"]):
        problem = f"{names}: OpenMP binds threads, which pins the main one when torch is imported"
        remedy = f"unset {names}; use taskset or numactl on the process"
        found.append(("warning", problem, remedy))
    if used > available:
        problem = f"torch uses {counted(used, 'thread')}, {available} can run at the same time"
        found.append(("warning", problem, f"set OMP_NUM_THREADS={available}"))
    elif used < maximum:
        problem = (
            f"torch uses {used} of {counted(maximum, 'thread')} that can run on cores of their own"
        )
        remedy = "raise or unset OMP_NUM_THREADS and MKL_NUM_THREADS"
        found.append(("warning", problem, remedy))
    elif alone is not None and alone < maximum:
        problem = (
            f"torch takes {alone} of {maximum} threads by itself, as where a sandbox or service "
        )
        problem += "refuses sched_setaffinity; commands take all"
        remedy = f"in programs of your own call torch.set_num_threads({maximum})"
        found.append(("warning", problem, remedy))
    return found


def _openmp_problems(runtimes: list[str] | None) -> list[Problem]:
    if runtimes is None:
        return []
    if len(runtimes) > 1:
        names = ", ".join(path.rpartition("/")[2] for path in runtimes)  # the paths stand above
        problem = f"{len(runtimes)} OpenMP runtimes in one process: {names}"
        remedy = "keep torch's; find the package or LD_PRELOAD that brings in the other"
        return [("warning", problem, remedy)]
    if not runtimes:
        problem = "no OpenMP runtime is mapped: torch runs on one thread or on a pool of its own"
        return [("warning", problem, "use a torch wheel from pytorch.org")]
    return []


def _memory_problems(memory: Facts, pages: Facts, nodes: int) -> list[Problem]:
    found = []
    room = [value for value in (memory["available"], memory["limit"]) if value is not None]
    if room and min(room) < _COMFORTABLE_BYTES:
        problem = f"{min(room) / _GIB:.1f} GiB of memory: too little for a model of 2 billion"
        found.append(("warning", problem, "free memory, or raise the container's limit"))
    if pages["transparent_huge_pages"] == "never":
        problem = "transparent huge pages are off: reading weights is up to a quarter slower"
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        found.append(("warning", problem, remedy))
    if pages["placement_error"]:
        remedy = "unset BITNET_OPS_MEMORY, or name one of them"
        found.append(("error", pages["placement_error"], remedy))
    elif nodes > 1 and pages["placement"] != "interleave":
        problem = f"{nodes} memory nodes: each weight lies on the one that loaded it"
        remedy = "set BITNET_OPS_MEMORY=interleave, or run a process a node (numactl -N 0 -m 0)"
        found.append(("warning", problem, remedy))
    return found


def _plugin_problems(engine: str, status: Facts, variable: str) -> list[Problem]:
    if not status["installed"] or status["active"]:
        return []
    problem = f"{engine} {status['version']} is installed and will not load our plug-in"
    if not status["entry_point"]:
        return [("warning", problem, "install bitnet-ops with pip into the same environment")]
    remedy = f"add bitnet to {variable}={status[variable]}, or unset it"
    return [("warning", problem, remedy)]


def _build_problems(vllm: Facts) -> list[Problem]:
    if not vllm["gpu_build"]:
        return []
    problem = f"vllm {vllm['version']} was built for GPUs and cannot serve on this CPU"
    return [("warning", problem, CPU_BUILD)]


# Text ---------------------------------------------------------------------------------------------


def render(facts: Facts) -> list[str]:
    """The report as lines of plain text, one screen of 100 columns; a path alone may be longer."""
    rows = [*_machine_rows(facts), *_isa_rows(facts["isa"])]
    rows += [("products", _products_text(facts["tuning"])), *_process_rows(facts)]
    rows += [(engine, _plugin_text(facts[engine])) for engine in ("sglang", "vllm")]
    lines = [*(_line(label, text) for label, text in rows), ""]
    for problem in facts["problems"]:
        lines += [f"{problem['severity'].upper()}: {problem['problem']}"]
        lines += [f"  remedy: {problem['remedy']}"]
    lines += [] if facts["problems"] else ["No problems found."]
    return [piece for line in lines for piece in _wrapped(line)]


def _line(label: str, text: object) -> str:
    return f"{label:<{_LABEL}}{text}"


def _wrapped(line: str) -> list[str]:
    """The line in pieces of 100 columns, cut at blanks; what goes on is indented as its text is."""
    if line[_LABEL:].startswith("/"):
        return [line]  # a path stands beside its label, whole, however long it is
    indent = _LABEL
    if line.startswith(("ERROR", "WARNING")):
        indent = 2
    elif line[:2] == "  " and not line[:_LABEL].isspace():  # a remedy
        indent = 4
    return textwrap.wrap(
        line,
        _COLUMNS,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _machine_rows(facts: Facts) -> list[tuple[str, str]]:
    package, cpu, torch = facts["package"], facts["cpu"], facts["torch"]
    built = package["build"]
    caches = ", ".join(f"{name} {_size(size)}" for name, size in cpu["cache_bytes"].items())
    features = " ".join(name for name, has in cpu["features"].items() if has)
    return [
        ("package", f"bitnet-ops {package['version']}, Python {package['python']}"),
        ("", package["location"]),
        ("build", f"compiler {built['compiler']}, {built['architecture']}"),
        ("torch", f"{torch['version']}; stable ABI, floor {torch['abi_floor']}"),
        ("", torch["location"]),
        ("cpu", cpu["model"] + (", virtual machine" if cpu["virtual"] else "")),
        ("caches", caches or "unknown"),
        ("features", features or "none"),
        ("amx", _amx_text(facts["amx"]["permission"], facts["isa"])),
    ]


def _amx_text(permission: str | None, isa: Facts) -> str:
    if permission is None:
        return "not on this CPU"
    if permission != "granted":
        return f"on this CPU; permission {permission}"
    using = [row for row in isa["table"] if row["isa"].startswith("amx")]
    in_use = [row["isa"] for row in using if row["selected"]]
    if in_use:
        return f"permission granted; in use: {in_use[0]}"
    if any(row["available"] for row in using):
        return f"permission granted; not in use: {isa['selected'] or 'no ISA'} is chosen"
    return "permission granted; no kernels for what this CPU has of it"


def _isa_rows(isa: Facts) -> list[tuple[str, str]]:
    wanted = f"={isa['BITNET_OPS_ISA']}" if isa["BITNET_OPS_ISA"] else " not set"
    rows = [("isa", f"{isa['selected'] or 'none'} (BITNET_OPS_ISA{wanted})")]
    for row in isa["table"]:
        mark = "*" if row["selected"] else "+" if row["available"] else "-"
        rows.append(("", f"{mark} {row['isa']:<13}{row['reason']}"))
    return rows


def _products_text(tuning: Facts) -> str:
    """Where the choice among the algorithms of a product comes from."""
    if tuning["error"]:
        return "unknown"
    texts = {
        "known": "chosen as known of this make of CPU",
        "measured": "measured at their first use",
        "usual": "as usual for the instruction set",
    }
    forced = f"; {tuning['product']} where it can be" if tuning["product"] else ""
    return texts[tuning["products"]] + forced + ("" if tuning["sum_tables"] else "; without tables")


def _process_rows(facts: Facts) -> list[tuple[str, str]]:
    threads, memory, pages = facts["threads"], facts["memory"], facts["pages"]
    quota, load = threads["cgroup_quota"], facts["load_average"]
    environment = " ".join(f"{k}={v}" for k, v in threads["environment"].items())
    found: list[str] | None = facts["openmp_runtimes"]
    none = "unknown" if found is None else "none found among the libraries of this process"
    runtimes = found or [none]
    limit = _size(memory["limit"]) if memory["limit"] else "none"
    return [
        (
            "threads",
            f"torch {threads['torch']}; CPUs {threads['logical_cpus']}, in the affinity mask "
            f"{len(threads['affinity'])} on {counted(threads['physical_cores'], 'core')}, quota "
            f"{'none' if quota is None else f'{quota:g}'}; "
            f"load {'unknown' if load is None else load[0]}",
        ),
        ("", environment or "no OMP_* variable set"),
        *(("openmp" if i == 0 else "", path) for i, path in enumerate(runtimes)),
        (
            "memory",
            f"{_size(memory['available'])} available of {_size(memory['total'])}, limit {limit}",
        ),
        (
            "pages",
            f"{_size(pages['page_bytes'])}; transparent huge pages: "
            f"{pages['transparent_huge_pages'] or 'unknown'}",
        ),
        ("", machine.placement_effect(pages["placement"] or "first_touch")),
    ]


def _plugin_text(status: Facts) -> str:
    tested = f"tested with {', '.join(status['tested'])}"
    if not status["installed"]:
        ready = "registered" if status["entry_point"] else "not registered"
        return f"not installed; plug-in {ready}, {tested}"
    known = "" if status["version_tested"] else ", not with this version"
    active = "active" if status["active"] else "NOT active"
    gpu = ", built for GPUs" if status.get("gpu_build") else ""
    return f"{status['version']}{gpu}, plug-in {active}, {tested}{known}"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m bitnet_ops.cli.doctor")
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
