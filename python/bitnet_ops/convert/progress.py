"""The progress bar of a conversion: for people, on a terminal and not beside JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bitnet_ops.untrusted import printable

# What a long piece of work calls as it goes: tensors done, of how many, the one that comes.
Progress = Callable[[int, int, str], None]


@contextmanager
def progress_bar(*, enabled: bool) -> Iterator[Progress | None]:
    """A bar on stderr while the block runs, as a function that advances it; None if not enabled."""
    if not enabled:
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}", markup=False),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading headers", total=None)

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=printable(name))

        yield advance
