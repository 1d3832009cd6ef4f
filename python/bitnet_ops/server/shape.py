"""Shape: what the answers to an ask have to look like, on their way in and out.

Tools, formats and budgets of thought become the prompt's messages, a constraint for each answer,
and what reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bitnet_ops.generate.chat import END_OF_THOUGHT, THINK, opened_thought
from bitnet_ops.generate.constraint import Constraint, TextConstraint, Thoughts
from bitnet_ops.generate.grammar import Grammar, GrammarError, Grammars, schema_text
from bitnet_ops.generate.text import StreamDecoder
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.server.answer import AnswerText
from bitnet_ops.server.exchange import Ask, AskError
from bitnet_ops.server.placing import behind_results
from bitnet_ops.server.tools import form_of


class AnswerShape:
    """Of one ask.

    Compiling takes a millisecond for usual schemas, and half a second for the worst: for a thread
    beside the event loop.

    Args:
        ask: what is asked.
        tokenizer: of the model.
        grammars: gives the model's; called only where they are needed, for they take a second.
    Attributes: `messages` and `tools`, for the chat template.
    Raises AskError for a format or a tool that cannot be followed.
    """

    def __init__(self, ask: Ask, tokenizer: Tokenizer, grammars: Callable[[], Grammars]) -> None:
        self._ask, self._tokenizer, self._make_grammars = ask, tokenizer, grammars
        self._template = tokenizer.chat_template or ""
        self._called = ask.tools if ask.tool_choice.mode != "none" else ()
        self._form = form_of(self._template) if self._called else None
        self.messages: Sequence[Mapping[str, Any]] = ask.messages or ()
        self.tools: Sequence[Mapping[str, Any]] | None = None
        if ask.messages is not None:
            form = self._form or form_of(self._template)
            messages = ask.messages if form.native else behind_results(ask.messages)
            self.messages, self.tools = form.prompt(messages, self._called)
        if ask.continues and (ask.format.kind != "text" or ask.tool_choice.mode == "required"):
            raise AskError(
                "server: expected a last message of the user's where the answer has a format or a "
                "call that is required, got the answer's beginning, to which none is known",
                field="messages",
            )
        try:
            self._grammar = self._compiled()
        except GrammarError as error:
            raise AskError(str(error), field=str(error).partition(":")[0]) from None

    @property
    def _lazy(self) -> bool:
        """Whether the answer is free until it begins a call."""
        return (
            self._form is not None
            and self._ask.tool_choice.mode == "auto"
            and self._ask.format.kind == "text"
        )

    def _compiled(self) -> Grammar | None:
        ask, wanted = self._ask, self._ask.format
        schema = {"type": "object"} if wanted.kind == "json" else wanted.schema
        if self._form is not None:
            answer = None if wanted.kind == "text" else schema_text(schema, "format")
            return self._form.grammar(
                self._make_grammars(),
                self._called,
                ask.tool_choice,
                several=ask.parallel_tools,
                answer=answer,
            )
        if ask.tool_choice.mode == "required":
            raise GrammarError("tool_choice: expected tools for a call that is required, got none")
        return None if wanted.kind == "text" else self._make_grammars().schema(schema, "format")

    def constraint(self, prompt: str) -> Constraint | None:
        """The constraint of one answer; `prompt`: the text of the prompt."""
        inner: TextConstraint | None = None
        if self._grammar is not None and self._form is not None and self._lazy:
            several = self._ask.parallel_tools and self._form.several
            inner = self._grammar.lazy(self._form.triggers, self._form.openings, repeat=several)
        elif self._grammar is not None:
            inner = self._grammar.start()
        if self._ask.messages is None:
            return inner
        opened, budget = bool(opened_thought(prompt)), self._ask.thinking_budget
        thinks = opened or (
            THINK in self._template
            and not prompt.rstrip().endswith(END_OF_THOUGHT)
            and not self._ask.continues
        )
        if not thinks or (inner is None and budget is None):
            return inner
        texts = self._make_grammars().texts
        return Thoughts(texts, inner, opened=opened, budget=budget)

    def text(self, index: int, prompt: str) -> AnswerText:
        """What makes deltas of the text of answer `index`."""
        return AnswerText(
            index,
            opened=self._ask.messages is not None and bool(opened_thought(prompt)),
            thoughts=self._ask.messages is not None and not self._ask.continues,
            form=self._form,
            tools=self._called,
            stop=self._ask.stop,
        )

    def decoder(self) -> StreamDecoder:
        """What makes text of an answer's tokens; special tokens that make calls are shown."""
        if self._ask.messages is None:
            return StreamDecoder(self._tokenizer)
        names = (THINK, END_OF_THOUGHT, *(() if self._form is None else self._form.special))
        ids = [self._tokenizer.token_id(name) for name in names]
        return StreamDecoder(self._tokenizer, shown=frozenset(i for i in ids if i is not None))
