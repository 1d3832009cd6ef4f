#!/usr/bin/env python3
"""Prints what the converter says to every bad checkpoint of tests/helpers/rejection_rows.py.

    python scripts/rejections_table.py

One line each: the row's name and the message, as `bitnet-ops convert` shows it.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from bitnet_ops.convert import ConvertError, convert  # noqa: E402
from rejection_rows import EVERY, ROWS, Draft  # noqa: E402


def message(row, folder):
    """The one line that the row's checkpoint is rejected with; written below `folder`."""
    _, _, family, _, change = row
    draft = Draft(folder / "source", EVERY[family])
    change(draft)
    draft.write()
    try:
        convert(folder / "source", folder / "out")
    except ConvertError as error:
        return str(error)
    raise AssertionError(f"{row[0]} was converted")


def main():
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{row[0]}: {message(row, Path(folder))}")
    print(f"{len(ROWS)} checkpoints rejected, {len({row[1] for row in ROWS})} codes")


if __name__ == "__main__":
    main()
