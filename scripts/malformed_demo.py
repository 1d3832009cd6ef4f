#!/usr/bin/env python3
"""Print what the model reader says to every malformed file of the tests' table.

Usage: scripts/malformed_demo.py [substring of the case's name]. Exits 1 if a file is not rejected
with its code.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from bitnet_ops.formats.sglbitnt import Reader, SglbitntError  # noqa: E402
from sglbitnt2_malformed import MALFORMED2  # noqa: E402
from sglbitnt_malformed import MALFORMED  # noqa: E402


def verdict(data: bytes, path: Path) -> SglbitntError | None:
    """The error of reading `data`, or None if it is read."""
    path.write_bytes(data)
    try:
        Reader(path)
    except SglbitntError as error:
        return error
    return None


def main(wanted: str = "") -> int:
    table = MALFORMED | MALFORMED2
    rejected, cases = 0, {name: row for name, row in table.items() if wanted in name}
    with tempfile.TemporaryDirectory() as folder:
        for name, (data, code) in cases.items():
            path = Path(folder) / "model.bin"
            error = verdict(data, path)
            print(f"{name}: {str(error).removeprefix(f'{folder}/') if error else 'ACCEPTED'}")
            rejected += error is not None and error.code == code
    print(f"{rejected} of {len(cases)} malformed files rejected, each with the code of its rule")
    return 0 if rejected == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
