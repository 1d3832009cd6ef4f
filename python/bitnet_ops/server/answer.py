"""Answer: a model's text, piece by piece, as thoughts, plain text and calls of tools.

What is returned does not depend on where the pieces are cut, and never contains a tag: text
that may still become one is held back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Literal

from bitnet_ops.generate.chat import END_OF_THOUGHT, THINK
from bitnet_ops.generate.run import TokenLogprobs
from bitnet_ops.server.calls import CallReader, overlap
from bitnet_ops.server.exchange import (
    CallArguments,
    CallBegin,
    Delta,
    End,
    Reasoning,
    Text,
    Tool,
)
from bitnet_ops.server.tools import ToolForm


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class AnswerText:
    """One answer, as deltas.

    White space between thoughts, text and calls is none of theirs. The arguments of a call that the
    end of the answer has cut off stay cut off: then they are no JSON, and End says "length".
    Models write calls in thoughts, too: as drafts, which are thoughts, or as they forget to close
    these. Calls are meant where the answer ends behind them, by itself, and the thoughts do not.

    Args:
        index: of the answer.
        opened: whether the prompt has opened the thoughts (see chat.opened_thought).
        thoughts: whether there may be any; not so where a text is continued as it is.
        form: how calls are written; None: there are none.
        tools: that may be called.
        stop: texts that end the answer; they are looked for in its plain text alone.
        new_id: makes the ids of calls.
    Attributes: `stopped`, the stop text that was found; `reasoning_tokens`, how many pieces were
    thoughts.
    """

    def __init__(
        self,
        index: int,
        *,
        opened: bool = False,
        thoughts: bool = True,
        form: ToolForm | None = None,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        self.index, self.reasoning_tokens = index, 0
        self.stopped: str | None = None
        self._form, self._tools, self._stop, self._new_id = form, tools, tuple(stop), new_id
        self._triggers = () if form is None else form.triggers
        self._openings = () if form is None else form.openings  # until there is some text
        self._state: Literal["start", "thought", "text", "call"] = "start" if thoughts else "text"
        if opened:
            self._state = "thought"
        self._held = ""  # what may become a tag or a stop text
        self._white = ""  # space that is returned only if text follows
        self._fresh = opened  # nothing of this part has come: space is left out
        self._reader: CallReader | None = None
        self._draft: CallReader | None = (
            None  # of the last call in thoughts; it begins what is held
        )
        self._drafted = self._behind = 0  # held characters that it has read; those before it
        self._trigger = ""  # of the call that is read
        self._calls = self._whole = 0  # that have begun, and whose arguments have come
        self._logprobs: list[TokenLogprobs] = []
        self._deltas: list[Delta] = []

    def push(self, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> list[Delta]:
        """The deltas that the text of the next token completes; it may be ""."""
        if self.stopped is not None:
            return []
        self._logprobs += logprobs
        self._held += text
        thought = self._state == "thought"
        self._read()
        self.reasoning_tokens += thought or self._state == "thought"
        return self._take()

    def end(self, reason: str, tokens: int = 0) -> list[Delta]:
        """What is still held back, and the End; `reason`: of the engine's, tokens: in all."""
        cut = reason in ("length", "context")
        if self.stopped is None:
            self._flush(cut)
        if self._logprobs and self._state != "call":
            self._deltas.append(Text(self.index, "", tuple(self._logprobs)))
        said: Literal["stop", "length", "tool_calls"] = "length" if cut else "stop"
        if self._whole and said == "stop" and self.stopped is None:
            said = "tool_calls"
        self._deltas.append(End(self.index, said, self.stopped, tokens, self.reasoning_tokens))
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # Reading: a step says whether it has come to another state ---------------------------------

    def _read(self) -> None:
        steps = {
            "start": self._start,
            "thought": self._think,
            "text": self._tell,
            "call": self._call,
        }
        while self.stopped is None and steps[self._state]():
            pass

    def _start(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._fresh, self._state = text[len(THINK) :], True, "thought"
            return True
        if THINK.startswith(text):
            return False
        self._state = "text"
        return True

    def _think(self) -> bool:
        at = self._held.find(END_OF_THOUGHT)
        if at >= 0:
            self._say(Reasoning, self._held[:at], spare=True)
            self._held = self._held[at + len(END_OF_THOUGHT) :]
            self._white, self._fresh, self._state, self._draft = "", True, "text", None
            return True
        while self._draft is not None or self._draft_begins():
            if self._may_be_last():
                return False
            self._say(Reasoning, self._held[: self._drafted], spare=True)
            self._held, self._draft = self._held[self._drafted :], None
        keep = max(overlap(self._held, word) for word in (END_OF_THOUGHT, *self._triggers))
        self._say(Reasoning, self._held[: len(self._held) - keep], spare=True)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _draft_begins(self) -> bool:
        """Whether a call begins in the thoughts; then it begins what is held."""
        found = [(at, t) for t in self._triggers if (at := self._held.find(t)) >= 0]
        if not found or self._form is None:
            return False
        at, trigger = min(found)
        self._say(Reasoning, self._held[:at], spare=True)
        self._held = self._held[at:]
        self._draft, self._drafted = self._form.reader(self._tools), len(trigger)
        self._behind = self._drafted
        return True

    def _may_be_last(self) -> bool:
        """Whether all that is held are calls, as far as they have come; else `_drafted` is none."""
        assert self._draft is not None and self._form is not None
        while True:
            if self._draft.state == "open":
                self._draft.push(self._held[self._drafted :])
                self._drafted = len(self._held) - len(self._draft.rest)
            if self._draft.state == "open":
                return True
            if self._draft.state == "failed":
                self._drafted = self._behind
                return False
            after = self._held[self._drafted :].lstrip()
            trigger = next((t for t in self._triggers if after.startswith(t)), None)
            if trigger is None:
                return not after or any(t.startswith(after) for t in self._triggers)
            self._draft = self._form.reader(self._tools)
            self._drafted = self._behind = len(self._held) - len(after) + len(trigger)

    def _tell(self) -> bool:
        if self._fresh:
            self._held = self._held.lstrip()
        at, found = self._next()
        text, self._held = self._held[:at], self._held[at:]
        self._say(Text, text, spare=self._form is not None)
        opening = found in self._openings
        if text.strip() or opening:
            self._openings = ()
        if found is None:
            return False
        if found in self._stop:
            self._say(Text, "", spare=False)
            self.stopped = found
            return False
        assert self._form is not None
        self._trigger = "" if opening else found
        self._held = self._held[len(self._trigger) :]
        self._reader, self._state = self._form.reader(self._tools), "call"
        return True

    def _next(self) -> tuple[int, str | None]:
        """Where the first stop text or trigger begins, or what may become one, and which it is."""
        text, words = self._held, (*self._stop, *self._triggers)
        for at in range(len(text)):
            openings = self._openings if not text[:at].strip() else ()
            here = [word for word in (*words, *openings) if word.startswith(text[at])]
            if found := [word for word in here if text.startswith(word, at)]:
                return at, min(found, key=len)
            if any(word.startswith(text[at:]) for word in here):
                return at, None
        return len(text), None

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        text, self._held = self._held, ""
        for part in reader.push(text):
            if part.kind == "name":
                self._white = ""
                self._logprobs.clear()
                id = self._new_id()
                self._deltas.append(CallBegin(self.index, self._calls, id, part.text))
                self._calls += 1
            else:
                self._deltas.append(CallArguments(self.index, self._calls - 1, part.text))
        if reader.state == "open":
            return False
        self._held, self._reader, self._state = reader.rest, None, "text"
        if reader.state == "done":
            self._whole += reader.whole
            self._fresh = True
        else:
            self._say(Text, self._trigger, spare=False)
        return True

    # Telling -----------------------------------------------------------------------------------

    def _say(self, kind: type[Text] | type[Reasoning], text: str, *, spare: bool) -> None:
        """Tell a text; `spare`: but for the space at its end."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        text = self._white + text
        said = text.rstrip() if spare else text
        self._white = text[len(said) :]
        if said:
            self._deltas.append(kind(self.index, said, tuple(self._logprobs)))
            self._logprobs.clear()

    def _flush(self, cut: bool) -> None:
        """At the end: what is held back is what it looks like, but for half a tag that was cut."""
        if self._state == "start":
            self._state = "text"
            self._read()
        elif self._draft is not None and self._draft.whole and not cut:
            self._white, self._fresh, self._state = "", True, "text"
            self._read()
        if self.stopped is not None:
            return
        if self._state == "call":
            reader = self._reader
            assert reader is not None
            self._whole += reader.whole
            if not reader.named and not cut:
                self._say(Text, self._trigger + reader.unread, spare=False)
            return
        half = (END_OF_THOUGHT, *self._triggers) if self._state == "thought" else self._triggers
        if cut and len(self._held) > 1 and any(tag.startswith(self._held) for tag in half):
            self._held = self._white = ""
        kind = Reasoning if self._state == "thought" else Text
        self._say(kind, self._held, spare=self._state == "thought")
        self._held = ""
