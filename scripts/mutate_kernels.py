#!/usr/bin/env python3
"""Do the tests hold the kernels? Changes one operator, constant, comparison or operand order of an
algorithm (csrc/kernels/{ternary,attention,head,rows,delta}) at a time, in a copy of the source, and
runs the C++ tests and then `pytest -m quick` until one fails.

    scripts/mutate_kernels.py FOLDER [--count 200] [--seed 1]   draws mutants
    scripts/mutate_kernels.py FOLDER ID...                      these again

FOLDER holds the copy and its build trees, and makes a second call quicker. An algorithm is in every
instruction set, and tests compare those: a mutant must be in all that are linked. First it is in
plain C++ alone, then beside the widest instruction set (AMX, its tiles emulated), which
instantiates nearly everything; what is left beside AVX2, whose sums of 16 bits have loops of their
own, and under the sanitizers, which see accesses that change no result. None is optimised, which
changes no bit. What does not compile, or leaves the objects as they were (not instantiated, or the
same code), is no mutant: another is drawn. Lines about time alone are left out. Needs the project
set up (scripts/_setup.sh) and an x86 CPU with AVX-512 VNNI.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("BITNET_VENV", ROOT / ".venv")) / "bin" / "python"
FOLDERS = ("ternary", "attention", "head", "rows", "delta")
OPTIONS = "-G Ninja -DBITNET_KERNELS_ONLY=ON -DBITNET_BUILD_TESTS=ON"
TREES = {
    "scalar": "-DBITNET_ISAS=scalar",
    "widest": "-DBITNET_ISAS='scalar;amx_int8' -DBITNET_EMULATED_MACHINE=amx_int8 "
    "-DBITNET_NATIVE_ISA=avx512_vnni",
    "narrow": "-DBITNET_ISAS='scalar;avx2' -DBITNET_SANITIZE=address,undefined",
}
# Filters of bitnet_tests, the slowest last.
SUITES = """kernels_convert. kernels_accuracy. kernels_head. kernels_int8_attention.
    kernels_bf16_attention. kernels_rows.planted pair_unit. selection. dispatch. product_sweep.
    kernels_tiles. kernels_gemm. group_product. engine_product. kernels_rows. program.
    attention_plan.""".split()
SECONDS = "300"  # of a suite; a mutant that takes longer does not end

# Matters of time: no test holds them, nor should it.
TIME_ONLY = re.compile(
    r"prefetch|[aA]head|kPanelFrom|kWideFrom|kTokenBlock|kHeadRowChunk|kBlockMinRows|kFromTokens"
    r"|from_memory|first_group|walk|unroll|likely|hint|\bask"
)
LARGER = re.compile(r"^\s*(alignas\S+ )?\w+ \w+(\[[^]]+\])+( = \{\})?;")
NO_CODE = re.compile(r"^\s*(#|//|template|static_assert|requires|using|concept)|operator\(\)")

# Between two spaces stands an operator: clang-format writes templates and pointers without.
INFIX = """+:- -:+ *:+ /:* %:/ <:<= <:> <=:< >:>= >:< >=:> ==:!= !=:== &&:|| ||:&& &:| |:& <<:>>
    >>:<< +=:-= -=:+= &=:|="""
CALLS = """add:sub sub:add mul:add mul:div div:mul max:min min:max add_sum:sub_sum sub_sum:add_sum
    max_abs_bits:max"""
# Operands that do not commute; add and mul of floats differ in the payload of a NaN alone.
SWAPPED = dict.fromkeys(
    "sub div max min less_mask where_greater sub_sum store_step".split(), (0, 1)
)
SWAPPED["fma"] = (1, 2)


def instead_of(old: str, table: str) -> list[str]:
    return [pair[len(old) + 1 :] for pair in table.split() if pair.startswith(f"{old}:")]


class Mutant(NamedTuple):
    file: str  # below csrc/kernels
    line: int
    column: int
    old: str
    new: str

    @property
    def id(self) -> str:
        return "{}:{}:{}:{}=>{}".format(*self).replace(" ", "")


def operands(code: str, start: int) -> list[str]:
    """Those of the call whose parenthesis opens at `start`; none if it goes on in another line."""
    depth, begin, found = 0, start + 1, []
    for i in range(start, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0 or (depth == 1 and code[i] == ","):
            found.append(code[begin:i].strip())
            begin = i + 1
        if depth == 0:
            return found
    return []


def mutants_of(file: str, number: int, line: str) -> list[Mutant]:
    code = line.split("//")[0].rstrip()
    if NO_CODE.search(code) or TIME_ONLY.search(code):
        return []
    found = []
    for m in re.finditer(r"(?<= )(\S{1,2})(?= )", code):
        found += [(m.start(), m[1], new) for new in instead_of(m[1], INFIX)]
    for m in re.finditer(r"(?<![\w.])(\d+)(?![\w.'])", code):
        found += [(m.start(), m[1], str(n)) for n in (int(m[1]) + 1, int(m[1]) - 1) if n > 0]
    for m in re.finditer(r"(?<![\w.])(\d+\.\d*(e[-+]?\d+)?f?)(?!\w)", code):
        zero = float(m[1].rstrip("f")) == 0
        found.append((m.start(), m[1], "1.0f" if zero else f"({m[1]} * 2)"))
    for m in re.finditer(r"\b(true|false)\b", code):
        found.append((m.start(), m[1], "true" if m[1] == "false" else "false"))
    for m in re.finditer(r"(?<![\w:.])(\w+)\(", code):
        found += [(m.start(), m[1], new) for new in instead_of(m[1], CALLS)]
        values = operands(code, m.end() - 1)
        whole = f"{m[1]}({', '.join(values)})"
        if m[1] in SWAPPED and len(values) > 1:
            a, b = SWAPPED[m[1]]
            other = [*values]
            other[a], other[b] = values[b], values[a]
            found.append((m.start(), whole, f"{m[1]}({', '.join(other)})"))
        if m[1] == "fma" and len(values) == 3:  # two roundings
            found.append((m.start(), whole, "add(mul({}, {}), {})".format(*values)))
    return [Mutant(file, number, *mutation) for mutation in found]


class Laboratory:
    """The copy of the source, its build trees, and the objects without a mutant."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kernels = folder, folder / "source" / "csrc" / "kernels"
        self.environment = os.environ | {"BITNET_TEST_QUICK": "1"}
        self.environment["PATH"] = f"{PYTHON.parent}:{os.environ['PATH']}"
        (folder / "source").mkdir(parents=True, exist_ok=True)
        files = "git ls-files -co --exclude-standard -z csrc cmake benchmarks '*.txt' '*.toml'"
        self.shell(f"{files} | xargs -0 cp -p --parents -t {folder}/source", ROOT)
        self.commands: dict[str, list[str]] = {}
        self.original: dict[str, list[bytes]] = {}
        for tree, options in TREES.items():
            self.shell(f"cmake -S source -B {tree} {OPTIONS} {options}", folder)
            self.shell(f"ninja -C {tree} bitnet_tests bitnet_kernels", folder)
            listed = self.shell("ninja -t commands bitnet_tests bitnet_kernels", folder / tree)
            commands = re.sub(r"-MD .*?\.d ", "", re.sub("-O[13]", "-O0", listed)).splitlines()
            self.commands[tree] = [command for command in commands if "/isa.cpp" in command]
            self.original[tree] = self.build(tree) or sys.exit("the source does not compile")
            if failed := self.failure(tree, "rows"):
                sys.exit(f"{tree}: a test fails without a mutant: {failed}")

    def shell(self, command: str, folder: Path) -> str:
        run = subprocess.run(
            command, shell=True, cwd=folder, env=self.environment, capture_output=True, text=True
        )
        return run.stdout if run.returncode == 0 else sys.exit(f"{command}\n{run.stderr}")

    def build(self, tree: str) -> list[bytes]:
        """The objects of the tree's instruction sets, linked; none if one does not compile."""
        objects = []
        for command in self.commands[tree]:
            run = subprocess.run(command, shell=True, cwd=self.folder / tree, capture_output=True)
            if run.returncode != 0:
                return []
            if command.endswith("/isa.cpp"):
                target = command.split(" -o ")[1].split()[0]
                objects.append((self.folder / tree / target).read_bytes())
        return objects

    def failure(self, tree: str, folder: str) -> str:
        """The first failed check, those of the mutant's folder first; "" if all tests pass."""
        for suite in sorted(SUITES, key=lambda suite: folder not in suite or "plan" in suite):
            command = ["timeout", "-k1", SECONDS, str(self.folder / tree / "bitnet_tests"), suite]
            process = subprocess.Popen(
                command,
                env=self.environment,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            assert process.stderr
            failed = next((line for line in process.stderr if line.startswith("FAILED")), "")
            if failed:
                process.terminate()
            if process.wait() != 0:
                return f"{suite} {failed.strip()[:100] or 'ends with a signal, or not at all'}"
        return ""

    def python_failure(self) -> str:
        library = str(self.folder / "widest" / "libbitnet_kernels.so")
        command = [str(PYTHON), *"-m pytest -q -x -m quick -n 2".split()]
        environment = os.environ | {"LD_PRELOAD": library}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        found = re.search(r"^(FAILED|ERROR).*", run.stdout, re.MULTILINE)
        return (found[0] if found else run.stdout[-200:]) if run.returncode else ""

    def verdict(self, mutant: Mutant, line: str) -> str:
        if mutant.new.isdigit() and int(mutant.new) > int(mutant.old) and LARGER.match(line):
            return "none: a larger array"
        changed = False
        for tree in TREES:
            objects = self.build(tree)
            if not objects:
                return "none: does not compile"
            if objects != self.original[tree]:
                changed = True
                if failed := self.failure(tree, mutant.file.split("/")[0]):
                    return f"caught by C++ ({tree}): {failed}"
        if not changed:
            return "none: the same objects"
        failed = self.python_failure()
        return f"caught by Python: {failed}" if failed else "SURVIVES"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    laboratory = Laboratory(arguments.folder.resolve())
    lines: dict[str, list[str]] = {}
    drawn: list[Mutant] = []
    for path in sorted(path for name in FOLDERS for path in (laboratory.kernels / name).iterdir()):
        if path.suffix in (".inl", ".h"):
            file = str(path.relative_to(laboratory.kernels))
            lines[file] = path.read_text().split("\n")
            for number, line in enumerate(lines[file], 1):
                drawn += mutants_of(file, number, line)
    print(f"{len(drawn)} possible mutants", flush=True)
    random.Random(arguments.seed).shuffle(drawn)
    chosen = [m for m in drawn if m.id in arguments.ids] if arguments.ids else drawn
    counts: dict[str, int] = {}
    for mutant in chosen:
        path, text = laboratory.kernels / mutant.file, "\n".join(lines[mutant.file])
        line = lines[mutant.file][mutant.line - 1]
        start = sum(len(before) + 1 for before in lines[mutant.file][: mutant.line - 1])
        at, began = start + mutant.column, time.monotonic()
        try:
            path.write_text(text[:at] + mutant.new + text[at + len(mutant.old) :])
            verdict = laboratory.verdict(mutant, line)
        finally:
            path.write_text(text)
        kind = verdict.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        seconds = time.monotonic() - began
        print(f"{seconds:5.1f} s  {mutant.id}  {verdict}\n    {line.strip()}", flush=True)
        if sum(counts.values()) - counts.get("none", 0) >= arguments.count:
            break
    for kind, count in sorted(counts.items()):
        print(f"{kind}: {count}")


if __name__ == "__main__":
    main()
