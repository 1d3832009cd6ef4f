"""`python -m benchmarks.count_loops`: the inner loops of products, heads and attention, counted.

Prints the instructions of every loop in the object code, for 1024 multiply-adds (AMX: for a turn);
with --cycles also what llvm-mca (17 or newer, BITNET_LLVM_MCA or `llvm-mca` on the path) makes of
them. Kernel objects are those of the package's build, or of --objects, which may be a build for Arm
(scripts/test_neon makes build/aarch64). Fails for a loop that is not found. Standard library only;
needs objdump.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.object_loops import Object, Turn
from benchmarks.process import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from check_isa_symbols import (  # type: ignore[import-not-found]  # noqa: E402
    build_objects,
    isa_objects,
    package_tree,
    run,
)

DOT = {
    "bytes": r"(\{vex\} )?vpdpbusd\b",
    "words": r"(\{vex\} )?vpdpwssd\b",
    "floats": r"vfmadd\w+ps\b",
    "pairs": r"vdpbf16ps\b",
    "tiles": r"tdpb\w+\b",
    "arm": r"usmmla|sdot",
    # of tables of sums: an addition of a line, whose number is an index; a dot product beside it
    "lines": r"(\{vex\} )?vpdpbusd\b|v(paddw|movdqu\w*)\s.*,8\)",
}
VECTOR = re.compile(r"mm|\b[qdv]\d")  # a register of x86 or Arm
WORK = 1024  # multiply-adds that counts and cycles are given for


@dataclass(frozen=True)
class Loop:
    """A loop of one ISA: where it stands, and what part of its dots' multiply-adds is the work."""

    what: str
    where: str
    dot: str = "bytes"
    share: float = 1.0
    pick: str = "all"  # of the loops found: all, the first, the least for a dot


BOTH = r"StepsOfFour<\w+>, %d, true, false>"  # further tokens
BASE3, PLANES = 5 / 6, 1 / 2  # six dots for five rows; two dots for a number of 16 bits

ZMM = (
    Loop("`2bit`, 1 token", "tile_direct<TwoBit, 1>"),
    Loop("`2bit`, 4 tokens", "tile_direct<TwoBit, 4>"),
    Loop("`2bit`, from 5 tokens on", "tile_direct<TwoBit, 5>"),
    Loop("`1.6bit`, 1 token", "tile_direct<Base3, 1>", share=BASE3),
    Loop("`1.6bit`, 2 tokens", "tile_direct<Base3, 2>", share=BASE3),
    Loop("`1.6bit`, 3 tokens", "tile_direct<Base3, 3>", share=BASE3),
    Loop("`1.6bit`, 4 tokens", "tile_direct<Base3, 4>", share=BASE3),
    Loop("`1.6bit`, 4 tokens, AMD", "tile_direct<Base3Digits, 4>"),
    Loop("canonical, 1 token", "tile_to_out<true, 4, 1>"),
    Loop("canonical, 4 tokens", "tile_to_out<true, 4, 4>"),
    Loop("panel of `2bit` (6)", "add_panel<TwoBitPlain, 0, 4, 6>"),
    Loop("panel of `1.6bit` (4)", "add_panel<Base3Digits, 0, 5, 4>"),
    Loop("groups, `2bit`, 1 token", "tile_groups<TwoBit, 1, 1, unsigned short>"),
    Loop("groups, `2bit`, prompts (5)", "tile_groups<TwoBit, 5, 1, unsigned short>"),
    Loop("int8 head, 1 token", "head8_rows<4, 1, 2, Ahead<false>", share=PLANES),
    Loop("int8 head, 4 tokens", "head8_rows<2, 4, 1, Ahead<false>", share=PLANES, pick="least"),
    Loop("int4 head, 1 token", "head4_rows<1, 1, Ahead<false>", share=PLANES),
    Loop("int4 head, 4 tokens", "head4_rows<1, 4, Ahead<false>", share=PLANES),
    Loop("int8 scores, 4 queries", "dot_quads<4, 2>", share=PLANES),
    Loop("int8 values, 4 queries", "sum_quads<4, 2>", share=PLANES),
    Loop("bf16 scores, 4 queries", "score_pairs<4, 2>", dot="floats"),
    Loop("bf16 scores, 12 queries", "score_pairs<12, 1>", dot="floats"),
    Loop("bf16 scores, 4, by pairs", "unit_scores<PairUnit, 4, 2>", dot="pairs"),
    Loop("bf16 scores, 12, by pairs", "unit_scores<PairUnit, 12, 1>", dot="pairs"),
    Loop("bf16 values, 4, by pairs", "unit_weighs<PairUnit, 4, 2, PanelValues>", dot="pairs"),
    Loop("bf16 values, 12, by pairs", "unit_weighs<PairUnit, 12, 1, PanelValues>", dot="pairs"),
    Loop("bf16 values, 4 queries", "weigh_pairs<4, 2, PanelValues>", dot="floats"),
    Loop("bf16 values, 12 queries", "weigh_pairs<12, 1, PanelValues>", dot="floats"),
    Loop("tables, 16 tokens", "add_lines<NarrowTables, false>", dot="lines", pick="least"),
    Loop("tables, 16, and 2 multiplied", f"add_both<NarrowTables, {BOTH % 2}", dot="lines"),
    Loop("tables, 32 tokens", "add_lines<SumTables, false>", dot="lines", pick="least"),
    Loop("tables, 32, and 4 multiplied", f"add_both<SumTables, {BOTH % 4}", dot="lines"),
)  # fmt: skip

YMM = (
    Loop("`2bit`, 1 token", "tile_direct<TwoBit, 1>"),
    Loop("`2bit`, 3 tokens", "tile_direct<TwoBit, 3>"),
    Loop("`2bit`, 4 tokens", "tile_direct<TwoBit, 4>"),
    Loop("`2bit`, from 6 tokens on (5 -> 6)", "tile_direct<TwoBit, 6>"),
    Loop("`1.6bit`, 1 token", "tile_direct<Base3, 1>", share=BASE3),
    Loop("`1.6bit`, 2 tokens", "tile_direct<Base3, 2>", share=BASE3),
    Loop("`1.6bit`, 3 tokens", "tile_direct<Base3, 3>", share=BASE3),
    Loop("canonical, 1 token", "tile_to_out<true, 4, 1>"),
    Loop("canonical, 4 tokens", "tile_to_out<true, 2, 4>"),
    Loop("panel of `1.6bit` (4)", "add_panel<Base3Digits, 0, 3, 4>"),
    Loop("groups, `2bit`, 1 token", "tile_groups<TwoBit, 1, 1, unsigned short>"),
    Loop("int8 head, 1 token", "head8_rows<1, 1, 4, Ahead<false>", share=PLANES),
    Loop("int8 head, 2 tokens", "head8_rows<2, 2, 1, Ahead<false>", share=PLANES, pick="least"),
    Loop("int4 head, 1 token", "head4_rows<1, 1, Ahead<false>", share=PLANES),
    Loop("int4 head, 2 tokens", "head4_rows<1, 2, Ahead<false>", share=PLANES),
    Loop("int8 scores, 4 queries", "dot_quads<4, 1>", dot="words"),
    Loop("int8 values, 4 queries", "sum_quads<4, 1>", dot="words"),
    Loop("bf16 scores, 4 queries", "score_pairs<4, 1>", dot="floats"),
    Loop("bf16 scores, 6 queries", "score_pairs<6, 1>", dot="floats"),
    Loop("bf16 values, 4 queries", "weigh_pairs<4, 1, PanelValues>", dot="floats"),
    Loop("bf16 values, 6 queries", "weigh_pairs<6, 1, PanelValues>", dot="floats"),
    Loop("tables, 16 tokens", "add_lines<SumTables, false>", dot="lines", pick="least"),
)  # fmt: skip

UNIT = "MatrixUnit, "
AMX = (
    Loop("`2bit`, up to 16 tokens", f"tile_1xn<{UNIT}TwoBit>", dot="tiles"),
    Loop("`2bit`, fields 0, 1", f"segment_2x2<{UNIT}TwoBit, 0>", dot="tiles", pick="first"),
    Loop("`2bit`, field 2, raw", f"segment_2x2<{UNIT}TwoBit, 1>", dot="tiles", pick="first"),
    Loop("`1.6bit`, up to 16 tokens", f"tile_1xn<{UNIT}Base3>", dot="tiles", share=BASE3),
    *(
        Loop(f"`1.6bit`, {q}", f"segment_2x2<{UNIT}Base3, {i}>", "tiles", BASE3, "first")
        for i, q in enumerate(("q, 3 q", "9 q, 27 q", "81 q, 243 q"))
    ),
    Loop(
        "groups, `2bit`, 16 tokens",
        f"tiles_groups_matrix<{UNIT}TwoBit, 1, unsigned short>",
        dot="tiles",
    ),
    Loop(
        "groups, `1.6bit`, 16 tokens",
        f"tiles_groups_matrix<{UNIT}Base3, 1, unsigned short>",
        dot="tiles",
        share=BASE3,
    ),
    Loop("int8 head, 16 tokens", "head8_unit<MatrixUnit>", dot="tiles", share=PLANES, pick="first"),
    Loop("int4 head, 16 tokens", "matrix_head4<MatrixUnit>", dot="tiles", share=PLANES),
)  # fmt: skip


ARM_DOTS = (
    Loop("`2bit`, 1 token", "tile_direct<TwoBit, 1>", dot="arm"),
    Loop("`2bit`, 2 tokens", "tile_direct<TwoBit, 2>", dot="arm"),
    Loop("`2bit`, 4 tokens", "tile_direct<TwoBit, 4>", dot="arm"),
    Loop("`2bit`, from 5 tokens on", "tile_direct<TwoBit, 5>", dot="arm"),
    Loop("`1.6bit`, 1 token", "tile_direct<Base3, 1>", dot="arm", share=BASE3),
    Loop("`1.6bit`, 2 tokens", "tile_direct<Base3, 2>", dot="arm", share=BASE3),
    Loop("`1.6bit`, from 4 tokens on", "tile_direct<Base3, 4>", dot="arm", share=BASE3),
    Loop("canonical, 2 tokens", "tile_to_out<true, 2, 2>", dot="arm"),
    Loop("canonical, from 4 tokens on", "tile_to_out<true, 2, 4>", dot="arm"),
)
PAIRS = (
    Loop("`2bit`, 2 tokens", "tile_direct<TokenPairs::TwoBit, 2>", dot="arm"),
    Loop("`2bit`, 4 tokens", "tile_direct<TokenPairs::TwoBit, 4>", dot="arm"),
    Loop("`2bit`, 5 tokens", "tile_direct<TokenPairs::TwoBit, 5>", dot="arm", share=5 / 6),
    Loop("`2bit`, from 6 tokens on", "tile_direct<TokenPairs::TwoBit, 6>", dot="arm"),
    Loop("panel of `2bit` (6)", "add_panel<TokenPairs::TwoBitPlain, 0, 4, 6>", dot="arm"),
    Loop("`1.6bit`, 2 tokens", "tile_direct<TokenPairs::Base3, 2>", dot="arm", share=BASE3),
    Loop("`1.6bit`, 4 tokens", "tile_direct<TokenPairs::Base3, 4>", dot="arm", share=BASE3),
    Loop("panel of `1.6bit` (4)", "add_panel<TokenPairs::Base3Digits, 0, 5, 4>", dot="arm"),
)


@dataclass(frozen=True)
class Cpu:
    """A CPU as llvm-mca knows it, and what its model is wrong about, said in other instructions."""

    name: str
    options: tuple[str, ...]
    replace: tuple[tuple[str, str], ...] = ()
    dot_cycles: float = 0.5  # of a dot product of the ISA's width that waits for nothing
    loads_apart: bool = False  # of dots: in the model a sum waits for the operand's load, too
    triple: str = "x86_64"


# The model of sapphirerapids has one port for multiplications of 512 bits, the CPU two, as Ice
# Lake, in whose model only those of floats have one. Zen 4 starts a vpdpbusd of 512 bits every
# cycle, not every second one: as a multiply-add of floats, which has its ports and latency.
# A vdpbf16ps of Zen 4 is as fast (measured), on Intel it is taken for a multiply-add.
SAPPHIRE_RAPIDS = Cpu(
    "Sapphire Rapids",
    ("-mcpu=icelake-server",),
    ((r"(?:vfmadd\w+|vdpbf16)ps(.*%zmm)", r"vpdpbusd\1"),),
)
ZEN_4 = Cpu("Zen 4", ("-mcpu=znver4",), ((r"vpdpbusd|vpdpwssd|vdpbf16ps", "vfmadd231ps"),), 1.0)
ALDER_LAKE = Cpu("Alder Lake", ("-mcpu=alderlake",), loads_apart=True)
# Of AMX: a tile load is 16 loads, a store 16 stores; the products have a unit of their own. What is
# left has no multiplication of 512 bits.
TILES = (
    (r"tileload\w+.*", "\n".join(["vmovups (%rsi),%zmm31"] * 16)),
    (r"tilestored.*", "\n".join(["vmovups %zmm31,(%rsi)"] * 16)),
    (r"(tdpb|tilezero|tilerelease).*", ""),
)
BESIDE_TILES = Cpu("Sapphire Rapids", ("-mcpu=sapphirerapids",), TILES)
TILE_CYCLES, TILE_WORK = 16, 16 * 16 * 64  # of a product of two tiles

NEOVERSE = tuple(
    Cpu(f"Neoverse {core}", (f"-mcpu=neoverse-{core.lower()}",), dot_cycles=0.25, triple="aarch64")
    for core in ("V1", "V2")
)

ISAS = {
    "avx512_vnni": (ZMM, (SAPPHIRE_RAPIDS, ZEN_4)),
    "avx_vnni": (YMM, (ALDER_LAKE,)),
    "amx_int8": (AMX, (BESIDE_TILES,)),
    "neon_dotprod": (ARM_DOTS, NEOVERSE),
    "neon_i8mm": (PAIRS, NEOVERSE),
}


@dataclass(frozen=True)
class Count:
    """One loop, for WORK multiply-adds."""

    turn: float  # multiply-adds of a turn, all passes of it
    instructions: float
    vector: float  # those on vector registers
    dots: float
    cycles: tuple[float, ...] = ()  # by llvm-mca, for each CPU


def dot_work(turn: Turn, pattern: str) -> int:
    """Multiply-adds of the dot products of a turn."""
    lanes = {"bytes": 4, "words": 2, "floats": 1, "pairs": 2}
    kind = next(kind for kind, dot in DOT.items() if dot == pattern)
    dots = [text for text in turn.text if re.match(pattern, text)]
    if kind == "tiles":
        return TILE_WORK * len(dots)
    if kind == "arm":
        return sum(32 if text.startswith("usmmla") else 16 for text in dots)
    if kind == "lines":  # four inputs of every token, 16 bits each
        return sum((64 if "%zmm" in text else 32) * (1 if "dpbusd" in text else 2) for text in dots)
    return sum((16 if "%zmm" in text else 8) * lanes[kind] for text in dots)


def with_loads_apart(text: str) -> str:
    """Dots of 256 bits whose operand is in memory, as a load and a dot."""
    free = [f"%ymm{i}" for i in range(16) if not re.search(rf"%ymm{i}\b", text)]
    register = (free or ["%ymm15"])[0]
    return re.sub(
        r"^((?:\{vex\} )?(?:vpdp|vfmadd)\w+\s+)([^%,]*\([^)]*\))(,.*)$",
        rf"vmovups \2,{register}\n\1{register}\3",
        text,
        flags=re.MULTILINE,
    )


def mca_cycles(turn: Turn, cpu: Cpu, tool: str) -> float:
    """Cycles of a turn in the long run."""
    turns, text = 100, "\n".join(turn.text)
    for wrong, right in cpu.replace:
        text = re.sub(wrong, right, text)
    if cpu.loads_apart:
        text = with_loads_apart(text)
    if any("vfmadd" in right for _, right in cpu.replace):
        text = text.replace("{vex} ", "")
    done = subprocess.run(
        [tool, f"-mtriple={cpu.triple}", *cpu.options, f"-iterations={turns}"],
        input=text, capture_output=True, text=True,
    )  # fmt: skip
    found = re.search(r"^Total Cycles:\s+(\d+)", done.stdout, flags=re.MULTILINE)
    if done.returncode or not found:
        raise SystemExit(f"count_loops: {tool} on {cpu.name}: {done.stderr.strip()[:300]}")
    return int(found[1]) / turns


def picked(turns: list[Turn], pick: str) -> list[Turn]:
    """The loops that a row speaks of: passes over the same work, or one of several."""
    if pick == "least":
        return [min(turns, key=lambda turn: len(turn.text) / turn.dots)] if turns else []
    if pick == "first":
        return turns[:1]
    return turns


def count(objects: Object, loop: Loop, cpus: tuple[Cpu, ...], tool: str | None) -> Count:
    """The loop in an object."""
    dot = DOT[loop.dot]
    turns = picked(objects.turns(loop.where, dot), loop.pick)
    if not turns:
        raise SystemExit(f"count_loops: expected a loop in {loop.where}, found none")
    work = loop.share * sum(dot_work(turn, dot) for turn in turns)
    texts = [text for turn in turns for text in turn.text]
    each = WORK / work
    cycles = tuple(sum(mca_cycles(t, cpu, tool) for t in turns) * each for cpu in cpus if tool)
    return Count(
        work / len(turns),
        len(texts) * each,
        sum(bool(VECTOR.search(text)) for text in texts) * each,
        sum(turn.dots for turn in turns) * each,
        cycles,
    )


def lines(isa: str, path: Path, tool: str | None) -> Iterator[str]:
    """A line for every loop of an ISA."""
    loops, cpus = ISAS[isa]
    objects = Object(path)
    for loop in loops:
        found = count(objects, loop, cpus, tool)
        # of the matrix unit for a turn, of the others for WORK multiply-adds
        scale = found.turn / WORK if isa == "amx_int8" else 1.0
        text = f"{isa:12} {loop.what:34} {scale * found.instructions:6.1f} instructions"
        text += f", {scale * found.vector:6.1f} on vectors, {scale * found.dots:6.1f} dots"
        for cpu, cycles in zip(cpus, found.cycles, strict=False):
            if isa == "amx_int8":  # the unit's own cycles, and those of everything beside it
                unit = found.dots * TILE_CYCLES
                text += f"; {scale * cycles:.1f} cycles beside {scale * unit:.1f} of the unit"
            elif loop.dot == "lines":
                text += f"; {cpu.name} {cycles:.1f} cycles"
            else:
                share = found.dots * cpu.dot_cycles / cycles
                text += f"; {cpu.name} {cycles:.1f} cycles, {share:.2f} of its dots"
        yield text


def mca() -> str:
    """llvm-mca, new enough to know these CPUs."""
    tool = os.environ.get("BITNET_LLVM_MCA", "llvm-mca")
    try:
        text = run(tool, "--version")
    except FileNotFoundError:
        text = ""
    version = re.search(r"version (\d+)", text)
    if not version or int(version[1]) < 17:
        got = version[1] if version else "none"
        raise SystemExit(
            f"count_loops: expected llvm-mca 17 or newer, got {got}; install one (Debian: llvm-19) "
            "and name it in BITNET_LLVM_MCA"
        )
    return tool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.count_loops", description=__doc__)
    parser.add_argument(
        "--objects", type=Path, help="folder of a build (default: that of the package)"
    )
    parser.add_argument("--cycles", action="store_true", help="ask llvm-mca, too")
    arguments = parser.parse_args()
    if not arguments.objects:
        build_objects(package_tree())
    found = isa_objects(arguments.objects or package_tree())
    tool = mca() if arguments.cycles else None
    on_arm = "neon_dotprod" in found  # a build for one architecture
    for isa in ISAS:
        if isa.startswith("neon") != on_arm:
            continue
        for line in lines(isa, found[isa], tool):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
