"""What the commands convert, export and quantize show: a progress bar, then the report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from bitnet_ops.cli.streams import json_text
from bitnet_ops.convert.progress import progress_bar
from bitnet_ops.untrusted import printable


class Report(Protocol):
    """What a command's work gives back."""

    def to_dict(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


def show(work: Callable[..., Report], *, as_json: bool, wrote: str | None = None) -> int:
    """Call `work(progress=...)`, the bar to advance or None, and print its report; returns 0.

    `wrote`: the destination, where the lines of the report do not name it.
    """
    with progress_bar(enabled=sys.stderr.isatty() and not as_json) as progress:
        report = work(progress=progress)
    if as_json:
        print(json_text(report.to_dict(), indent=1))
    else:
        lines = [*([f"wrote {wrote}"] if wrote else []), *report.lines()]
        print("\n".join(map(printable, lines)))
    return 0
