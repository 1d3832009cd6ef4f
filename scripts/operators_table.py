#!/usr/bin/env python3
"""The table of README.md that lists the operators, by the groups of bitnet_ops.ops.

python scripts/operators_table.py [--write README.md]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bitnet_ops.ops import head, model, rowwise, sampling, ternary

BEGIN, END = "<!-- begin operators -->\n", "<!-- end -->"


def table() -> str:
    """A row a group: the first sentence of its docstring, and its operators."""
    rows = ["| operators of `torch.ops.bitnet` | |", "|---|---|"]
    for group in (ternary, rowwise, head, model, sampling):
        title = (group.__doc__ or "").split(".")[0].removeprefix("The ops ")
        rows.append(f"| {title} | {' '.join(f'`{name}`' for name in group.__all__)} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """`page` with the table between its marks renewed."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew its table")
    args = parser.parse_args()
    if args.write:
        args.write.write_text(with_table(args.write.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
