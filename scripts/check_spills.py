#!/usr/bin/env python3
"""Proves by objdump that the integer kernels keep their accumulators in registers.

An innermost loop with two or more dot products of bytes or 16-bit numbers may store no vector to
the stack, save for the few listed: a spilled accumulator halves the speed and no test of results
would see it. It depends on the compiler, so it is checked where the project is tested (CI). Builds
the kernel objects when needed. Standard library only; exit status 1 and one line
per violation.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from check_isa_symbols import build_objects, isa_objects, package_tree, run

# Functions whose name matches, and what a dot product is in them.
CHECKED = {
    re.compile(r"tile|tile_direct|add_panel|head8_rows|head_int8|head4_rows"): re.compile(
        r"(\{vex\} )?(vpdpbusd|vpmaddubsw)\b"
    ),
    re.compile(r"int8_rows|dot_rows|sum_strip"): re.compile(r"(\{vex\} )?(vpdpwssd|vpmaddwd)\b"),
}
STACK_STORE = re.compile(r"vmov\S+\s+%[yz]mm\d+,[^%]*\(%r[sb]p")
# Stack stores that are accepted in one loop of a function whose name holds the text, and why.
ACCEPTED = {
    "Base3Digits": 1,  # five digits and their remainders in 16 registers
    # the canonical 4 x 4 tile of AVX512 (docs/log.md); in place its dots spill as often
    "tile_to_out<true, 4, 4>": 4,
    "tile_to_out<false, 4, 4>": 2,
    # six operands, the tokens and 24 sums are more than 32 registers; on 256 bits 6 and 16
    "Base3, 4": 2,
    "Base3, 2": 2,
    # int4: two planes of two tokens, or of two tiles, and their sums; of 253, 266 and 212
    # instructions for 64 dots
    "head4_rows<1, 2": 31,
    "head4_rows<2, 1": 17,
}
Instruction = tuple[int, str]


def objdump(path: Path) -> str:
    """The tool that knows the object's instructions."""
    with path.open("rb") as file:
        on_arm = int.from_bytes(file.read(20)[18:], "little") == 183  # e_machine
    return "aarch64-linux-gnu-objdump" if on_arm and platform.machine() != "aarch64" else "objdump"


def functions(path: Path) -> Iterator[tuple[str, list[Instruction]]]:
    """(name, instructions) of every function in the object, names without namespaces."""
    name, body = "", []
    for line in run(objdump(path), "-dC", "--no-show-raw-insn", path).splitlines():
        if start := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            yield name, body
            name, body = re.sub(r"bitnet::\w+::\(anonymous namespace\)::", "", start[1]), []
        elif row := re.match(r"\s+([0-9a-f]+):\s+(.*)", line):
            body.append((int(row[1], 16), row[2]))
    yield name, body


def innermost_loops(body: list[Instruction]) -> Iterator[list[str]]:
    """The instructions of every backward branch's range that holds no other such range.

    A jump without a condition is no loop: code out of the way returns by it.
    """
    at = {address: i for i, (address, _) in enumerate(body)}
    jumps = [
        (at[target], i)
        for i, (address, text) in enumerate(body)
        if (jump := re.match(r"j(?!mp)\w+\s+([0-9a-f]+)", text))
        and (target := int(jump[1], 16)) <= address
        and target in at
    ]
    for first, last in jumps:
        if not any((first, last) != (f, t) and first <= f and t <= last for f, t in jumps):
            yield [text for _, text in body[first : last + 1]]


def violations(path: Path, isa: str) -> list[str]:
    problems, loops = [], 0
    for name, body in functions(path):
        dot = next((dots for text, dots in CHECKED.items() if text.search(name)), None)
        if dot is None:
            continue
        allowed = max([n for text, n in ACCEPTED.items() if text in name], default=0)
        for loop in innermost_loops(body):
            if sum(bool(dot.match(text)) for text in loop) < 2:
                continue
            loops += 1
            stores = sum(bool(STACK_STORE.match(text)) for text in loop)
            if stores > allowed:
                problems.append(
                    f"{isa}: {name}: expected at most {allowed} vector stores to the stack in a "
                    f"loop of dot products, got {stores}; see ternary/direct.inl on registers"
                )
    if not loops:
        problems.append(f"{isa}: expected loops of dot products in {path}, found none")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=package_tree())
    build = parser.parse_args().build
    build_objects(build)
    problems = [
        problem
        for isa, path in isa_objects(build).items()
        if isa != "scalar" and "elf64-x86-64" in run("objdump", "-f", path)
        for problem in violations(path, isa)
    ]
    print("\n".join(problems), file=sys.stderr)
    print(f"check_spills: {len(problems)} violation(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
