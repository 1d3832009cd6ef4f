"""What scripts/count_loops.py takes for a loop, for one turn of it, and for the work of a turn.

Object code is written out here, a few instructions at a time; nothing is built.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOT = r"vpdpbusd\b"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def body(text: str) -> list[tuple[int, str]]:
    """A line an instruction, numbered from 16 on; `@n` is the address of line n."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return [(16 + i, re.sub(r"@(\d+)", lambda m: f"{16 + int(m[1]):x}", line))
            for i, line in enumerate(lines)]  # fmt: skip


def turns(text: str) -> list[list[str]]:
    from object_loops import Function

    code = Function(body(text), re.compile(DOT))
    return [[code.text[i] for i in steps] for steps in code.loops()]


DOTS = "vpdpbusd %zmm1,%zmm2,%zmm3\nvpdpbusd %zmm1,%zmm2,%zmm4"


def test_a_turn_is_what_the_backward_branch_repeats(scripts: None) -> None:
    (found,) = turns(f"xor %eax,%eax\n{DOTS}\nadd $1,%rax\njne @1\nret")
    assert [line.split()[0] for line in found] == ["vpdpbusd", "vpdpbusd", "add", "jne"]


def test_an_outer_loop_is_none_and_one_dot_is_none(scripts: None) -> None:
    assert len(turns(f"{DOTS}\njne @0\nadd $1,%rbx\njne @0\nret")) == 1
    assert turns("vpdpbusd %zmm1,%zmm2,%zmm3\njne @0\nret") == []


def test_a_turn_passes_by_the_loops_that_multiply_nothing(scripts: None) -> None:
    edge = "jg @6\nmov %eax,(%rdi)\ninc %rdi\njne @1\nrep stos %rax,%es:(%rdi)\nnop"
    (found,) = turns(f"{edge}\n{DOTS}\njne @0\nret")
    assert [line.split()[0] for line in found] == ["jg", "vpdpbusd", "vpdpbusd", "jne"]


def test_a_turn_takes_the_work_that_stands_out_of_the_way(scripts: None) -> None:
    (found,) = turns(f"{DOTS}\nje @6\nadd $1,%rax\njne @0\nret\nvpand %ymm1,%ymm2,%ymm3\njmp @3")
    assert [line.split()[0] for line in found] == [
        "vpdpbusd", "vpdpbusd", "je", "vpand", "jmp", "add", "jne",
    ]  # fmt: skip


def test_a_call_is_what_it_calls(scripts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import object_loops

    listing = [("f()", body(f"{DOTS}\ncall 30 <g()>\njne @0 <f()>\nret")),
               ("g()", [(0x30, "vpaddd %ymm1,%ymm2,%ymm3"), (0x31, "ret")])]  # fmt: skip
    monkeypatch.setattr(object_loops, "functions", lambda path: listing)
    (turn,) = object_loops.Object(Path("none")).turns("f", DOT)
    assert turn.dots == 2
    assert turn.text == (*DOTS.splitlines(), "vpaddd %ymm1,%ymm2,%ymm3", "jne loop")


def test_the_work_of_dots(scripts: None) -> None:
    from count_loops import DOT as DOTS_BY_KIND
    from count_loops import dot_work
    from object_loops import Turn

    def work(kind: str, *text: str) -> int:
        return dot_work(Turn(text, len(text)), DOTS_BY_KIND[kind])

    assert work("bytes", *DOTS.splitlines(), "vpaddd %zmm1,%zmm2,%zmm3") == 2 * 64
    assert work("bytes", "{vex} vpdpbusd %ymm1,%ymm2,%ymm3") == 32
    assert work("words", "vpdpwssd %zmm1,%zmm2,%zmm3") == 32
    assert work("floats", "vfmadd231ps (%rax){1to16},%zmm1,%zmm2") == 16
    assert work("tiles", "tdpbsud %tmm7,%tmm4,%tmm1") == 16 * 16 * 64


def test_loads_of_dots_stand_apart_where_a_model_needs_it(scripts: None) -> None:
    from count_loops import with_loads_apart

    mask = "vpand (%rdi),%ymm0,%ymm1\n"
    apart = "vmovups 0x20(%rax,%rbx,1),%ymm2\n{vex} vpdpbusd %ymm2,%ymm1,%ymm3"
    text = mask + "{vex} vpdpbusd 0x20(%rax,%rbx,1),%ymm1,%ymm3"
    assert with_loads_apart(text) == mask + apart


def test_the_page_has_the_rows_of_the_script(scripts: None) -> None:
    import count_loops

    page = (ROOT / "docs" / "notes" / "counts.md").read_text(encoding="utf-8")
    tables = page.partition(count_loops.BEGIN)[2].partition(count_loops.END)[0]
    for isa, (loops, _) in count_loops.ISAS.items():
        table = tables.partition(f"### `{isa}`\n")[2].partition("###")[0]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
        wanted = [loop.what for loop in loops]
        assert [row for row in rows if row in wanted] == wanted, (
            f"{isa}: run scripts/count_loops.py --before 059cbe2 --write docs/notes/counts.md"
        )
