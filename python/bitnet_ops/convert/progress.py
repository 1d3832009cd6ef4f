"""What lasts is told on stderr: by a bar on a terminal, elsewhere by a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bitnet_ops.untrusted import printable

# What a long piece of work calls as it goes: tensors done, of how many, the one that comes.
Progress = Callable[[int, int, str], None]


_SILENT_S, _RAREST_S = 20.0, 60.0  # until the first line; between lines, at most
_works: list[Callable[[], str]] = []  # what is being done now, the innermost at the end


@contextmanager
def told_when_slow(text: Callable[[], str]) -> Iterator[None]:
    """While the block runs, say on stderr what `text` gives: after twenty seconds, then rarer."""
    _works.append(text)
    if len(_works) > 1:  # a thread tells already, and takes the innermost work
        try:
            yield
        finally:
            _works.remove(text)
        return
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = _SILENT_S
        while not ended.wait(wait) and sys.stderr is not None:
            line = f"{time.monotonic() - began:.0f} s: {printable(_works[-1]())}\n"
            sys.stderr.write(line)
            sys.stderr.flush()
            wait = min(2 * wait, _RAREST_S)

    teller = threading.Thread(target=tell, name="bitnet-ops progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        _works.remove(text)


@contextmanager
def progress_bar(what: str = "", *, enabled: bool = True) -> Iterator[Progress | None]:
    """A bar on stderr while the block runs, as a function that advances it; None if not enabled.

    Where stderr is no terminal: lines with `what` is done, once that takes long.
    """
    if not enabled or sys.stderr is None:
        yield None
        return
    if not sys.stderr.isatty():
        reached = "begun"

        def note(done: int, total: int, name: str) -> None:
            nonlocal reached
            reached = f"{done} of {total}, {name}"

        with told_when_slow(lambda: f"{what}: {reached}"):
            yield note
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
