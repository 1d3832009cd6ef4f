"""What lasts is said, where no bar can move: by lines on stderr that name the innermost work."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bitnet_ops.cli.terminal import progress_line
from bitnet_ops.convert import progress
from bitnet_ops.dummy.model import write


def until(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr has once `words` are there."""
    seen, end = "", time.monotonic() + 60
    while words not in seen and time.monotonic() < end:
        time.sleep(0.01)
        seen += capsys.readouterr().err
    assert words in seen
    return seen


def test_long_work_is_named_and_short_work_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with progress_line() as line, progress.progress_bar("converting x") as advance:
        line("loading the model")
        advance(1, 3, "a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    monkeypatch.setattr(progress, "_RAREST_S", 0.01)
    with progress_line() as line:
        line("loading the model")
        until("0 s: loading the model\n", capsys)
        with progress.progress_bar("converting x") as advance:
            advance(41, 210, "model.\x1bnorm")
            until("0 s: converting x: 41 of 210, model.\\x1bnorm\n", capsys)
        until("loading", capsys)
    with progress.progress_bar("beside JSON", enabled=False) as advance:
        assert advance is None
    assert not progress._works and not [t for t in threading.enumerate() if "progress" in t.name]

    seen: list[tuple[int, int, str]] = []
    write("tiny", tmp_path / "m", progress=lambda *step: seen.append(step))
    assert [step[0] for step in seen] == list(range(seen[0][1]))
