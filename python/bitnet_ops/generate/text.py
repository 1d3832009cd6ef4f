"""The text side of generation: keyword options, answers as text or a stream of text, stop texts.

The engine knows only tokens; stop texts are found here, in the decoded text.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from bitnet_ops.arguments import shown
from bitnet_ops.errors import counted
from bitnet_ops.generate.draft_choice import DEFAULT_SPECULATION, Speculation, read_speculation
from bitnet_ops.generate.draft_report import DraftCounts
from bitnet_ops.generate.request import Limits
from bitnet_ops.generate.run import Generation, Run, Timing, TokenLogprobs
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.tokenizer import Tokenizer

# Options -------------------------------------------------------------------------------------


class GenerateOptions(TypedDict, total=False):
    """Keywords of LanguageModel.generate, stream, generate_batch and chat; all may be left out.

    max_new_tokens: 128; temperature: 0 (greedy); top_k: 0 (all); top_p: 1 (all); min_p: 0 (all);
    repetition_penalty: 1 (none); seed: None (a fresh one); frequency_penalty, presence_penalty: 0
    (none); logit_bias: None, or token id -> what is added; logprobs: None, or for how many of the
    most probable tokens the logarithms of probabilities are wanted beside the chosen one's: they
    are in Generation.logprobs. They are sampling.SamplingParams'.
    stop: texts that end the answer and are left out of it; ignore_eos: go on past the end of text.
    speculation: "auto", as many guesses as make it faster on this machine, from what the text
    repeats and by the model's draft head, if it has one, verified some at once; "ngram" or "head",
    the same by one of these alone; "off" or None; or the most guesses of a step. Tokens are the
    same.
    adapter: None, or the name of a LoRA adapter that the model has loaded.
    json_schema: None, or a JSON schema as a dict, or a class that has one (a pydantic model): the
    text is JSON of it, unless max_new_tokens cuts it off. Needs the package llguidance.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    speculation: Speculation
    adapter: str | None
    json_schema: Mapping[str, Any] | type | None


OPTION_NAMES = tuple(GenerateOptions.__annotations__)
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Options:
    """The options of one call, checked: what the engine takes, and the stop texts."""

    params: SamplingParams
    limits: Limits
    stop: tuple[str, ...] = ()
    max_drafts: Speculation = DEFAULT_SPECULATION
    adapter: str | None = None
    json_schema: Mapping[str, Any] | None = None


def parse_options(call: str, options: Mapping[str, Any], stop_ids: frozenset[int]) -> Options:
    """The options of `call`, the method's name, checked; `stop_ids` end a text unless ignore_eos.

    Raises TypeError for an unknown name or a wrong kind of value, SamplingError or ValueError for
    one out of range.
    """
    for name in options:
        if name not in OPTION_NAMES:
            near = difflib.get_close_matches(name, OPTION_NAMES, n=1)
            remedy = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(
                f"{call}: expected options among {', '.join(OPTION_NAMES)}, got {name}{remedy}"
            )
    params = SamplingParams(**{name: options[name] for name in _SAMPLING if name in options})
    ignore_eos = options.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise TypeError(f"{call}: expected ignore_eos True or False, got {shown(ignore_eos)}")
    limits = Limits(
        options.get("max_new_tokens", Limits.max_new_tokens),
        frozenset() if ignore_eos else stop_ids,
    )
    speculation = options.get("speculation", DEFAULT_SPECULATION)
    read_speculation(speculation, f"{call}: expected speculation")
    adapter = options.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise TypeError(f"{call}: expected adapter as a name or None, got {shown(adapter)}")
    stop = _stop_texts(call, options.get("stop", ()))
    schema = options.get("json_schema")
    if callable(make := getattr(schema, "model_json_schema", None)):
        schema = make()
    if schema is not None and not isinstance(schema, Mapping):
        raise TypeError(
            f"{call}: expected json_schema as a dict or a pydantic model, got {shown(schema)}"
        )
    return Options(params, limits, stop, speculation, adapter, schema)


def _stop_texts(call: str, stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(s, str) for s in texts):
        raise TypeError(f"{call}: expected stop as a text or a list of texts, got {shown(stop)}")
    if not all(texts):
        raise ValueError(f"{call}: expected stop to be non-empty texts, got {shown(stop)}")
    return tuple(texts)


# Answers -------------------------------------------------------------------------------------


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
    each of these, if asked for), `drafts` (how many guesses were verified and were right:
    `drafts.drafted`, `drafts.accepted`, and the same of `drafts.ngram` and `drafts.head`), `timing`
    (of the whole batch) and `generation`, which also has the seed.
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

    @property
    def drafts(self) -> DraftCounts:
        return self.generation.drafts


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
        return f"TextStream({counted(len(self.generation.token_ids), 'token')}, {self.ending})"

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


# Tokens to text ------------------------------------------------------------------------------


class StreamDecoder:
    """Ids in, text out, one id at a time; never a part of a UTF-8 character.

    What `push` returned plus what `finish` returns is `decode` of all ids. Text is held back while
    it ends in U+FFFD, for that may be the beginning of a character whose other bytes are still to
    come. `shown`: special tokens whose names are part of the text although others are left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._skip, self._shown = tokenizer, skip_special_tokens, shown
        self._context: list[int] = []  # ids whose text is out; they decide about leading spaces
        self._pending: list[int] = []  # ids whose text is not

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._pending, self._skip)[len(before) :]

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" for a special token or a part of a character."""
        if token_id in self._shown:
            return self.finish() + self._tokenizer.id_to_token(token_id)
        self._pending.append(token_id)
        text = self._pending_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is still held back; an unfinished character comes out as U+FFFD."""
        text = self._pending_text() if self._pending else ""
        self._context, self._pending = [], []
        return text
