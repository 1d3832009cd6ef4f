"""A run as text: a stream of pieces, the whole at its end, stop texts left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bitnet_ops.generate.generation import Generation, Timing, TokenLogprobs
from bitnet_ops.generate.run import Run
from bitnet_ops.generate.tokenizer import StreamDecoder, Tokenizer


class _Ended:
    """Why a text ended, from its `generation`."""

    if TYPE_CHECKING:

        @property
        def generation(self) -> Generation: ...

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.generation.stop_reason

    @property
    def ending(self) -> str:
        return self.generation.ending


class Completion(str, _Ended):
    """The text of an answer: a plain str that also knows how it came about.

    Attributes: `finish_reason` ("stop", "length" or "context"), `stop_reason` (the stop text, or
    the id that ended the text, else None), `ending` (both in words), `token_ids`, `logprobs` (of
    each of these, if asked for), `timing` (of the whole batch) and `generation`, which also has the
    seed.
    """

    generation: Generation
    timing: Timing

    def __new__(cls, text: str, generation: Generation, timing: Timing) -> Completion:
        completion = super().__new__(cls, text)
        completion.generation, completion.timing = generation, timing
        return completion

    def __getnewargs__(self) -> tuple[Any, ...]:  # what copy and pickle call __new__ with
        return str(self), self.generation, self.timing

    @property
    def token_ids(self) -> list[int]:
        return self.generation.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.generation.logprobs


class TextStream(_Ended):
    """Pieces of text as a run produces them, whole characters only.

    Attributes, up to date at any time: `generation` (token ids, seed and what follows), `timing`,
    `finish_reason` ("stop", "length" or "context"; "" before the end), `stop_reason`, `ending`.
    `read` runs it to its end, `close` ends it where it is.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._run, self._text = run, StopText(tokenizer, stop)
        self._iterator = _pieces(run, self._text)  # must not hold self: see Run.__del__

    @property
    def generation(self) -> Generation:
        return self._run.generations[0]

    @property
    def timing(self) -> Timing:
        return self._run.timing

    def __repr__(self) -> str:
        return f"TextStream({len(self.generation.token_ids)} tokens, {self.ending})"

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def read(self) -> Completion:
        """What has not been iterated over yet, as one Completion."""
        return Completion("".join(self._iterator), self.generation, self.timing)

    def close(self) -> None:
        """End it where it is; so does dropping it."""
        self._run.close()


def _pieces(run: Run, text: StopText) -> Iterator[str]:
    for row, token in run:
        if piece := text.push(token):
            yield piece
        if text.stopped is not None:
            run.cancel(row, "stop", text.stopped)
    if piece := text.finish():
        yield piece


class StopText:
    """Text of one row up to the first stop text, which never shows, not even in part."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._decoder, self._stop = StreamDecoder(tokenizer), stop
        self._held = ""
        self.stopped: str | None = None  # the stop text that was found

    def push(self, token: int) -> str:
        return self._release(self._decoder.push(token), end=False)

    def finish(self) -> str:
        return "" if self.stopped is not None else self._release(self._decoder.finish(), end=True)

    def _release(self, piece: str, end: bool) -> str:
        text = self._held + piece
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            at, self.stopped = min(found)
            return text[:at]
        keep = 0 if end else max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
