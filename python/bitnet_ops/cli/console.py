"""What the commands convert, export and quantize show: a progress bar, then the report.

The bar is for people: on a terminal, and not beside JSON. It must not know what the work is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from bitnet_ops.untrusted import printable

if TYPE_CHECKING:
    from bitnet_ops.convert.report import Progress


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
        print(json.dumps(report.to_dict(), indent=1, ensure_ascii=False))
    else:
        lines = [*([f"wrote {wrote}"] if wrote else []), *report.lines()]
        print("\n".join(map(printable, lines)))
    return 0


@contextmanager
def progress_bar(*, enabled: bool) -> Iterator[Progress | None]:
    """A bar on stderr while the block runs, as a function that advances it; None if not enabled."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading headers", total=None)

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield advance
