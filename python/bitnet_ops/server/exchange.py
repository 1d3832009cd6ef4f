"""What a client asks for and what it is told, in the server's own terms.

Every dialect (OpenAI, Anthropic, Ollama) is a translation into a `Ask` and back from its `Delta`s;
nothing behind this module knows a dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.pictures import PictureMarks
from bitnet_ops.generate.run import TokenLogprobs

# What is asked -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolChoice:
    """mode: "auto", "none" or "required"; `name`: with "required", the only tool allowed."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class Format:
    """What form the answer has to have. json: any JSON object; schema: one of this JSON schema."""

    kind: Literal["text", "json", "schema"] = "text"
    schema: Any = None


@dataclass(frozen=True)
class Ask:
    """One request for answers.

    Args:
        model: its name, as in the list of models; "" is the first one.
        messages: a conversation in OpenAI's form ("role", "content", "tool_calls",
            "tool_call_id", "reasoning_content"), arguments of tool calls parsed; or None and
        prompt: a text or token ids to continue.
        pictures: those whose marks stand in messages.
        suffix: what comes behind the text to be filled in, of models that know how.
        sampling: what was stated, by the names of SamplingParams; the rest is the model's own.
        max_tokens: of each answer; None: as many as the server allows and the context holds.
        stop: texts that end an answer.
        n: how many answers.
        echo: the prompt's own tokens come first, with their logprobs if these are asked for.
        thinking, effort, thinking_budget: whether to think, how much by the template's own words,
            and for how many tokens at most; None: as the model does.
        template_options: other variables of the chat template.
        continues: the answer goes on from the last message, which is the model's own.
        background: nobody waits for it, and its prompt is not worth keeping.
    """

    model: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    pictures: PictureMarks | None = None
    suffix: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tools: bool = True
    format: Format = Format()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    echo: bool = False
    thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    background: bool = False


def remark(what: str) -> str:
    """What the model is told in the place of something."""
    return f"[{what}: left out, since it is not read here]"


# What is returned --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of answer `index`; `logprobs`, of the tokens since the piece before, if asked for."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thoughts before answer `index`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Answer `index` begins to call a tool; `call` numbers its calls from 0."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of a call; the pieces of a call together are a JSON object."""

    index: int
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Answer `index` is over. `reason`: "stop", "length" or "tool_calls".

    stop: the stop text that ended it, if one did. tokens: how many were generated, stop ids and
    thoughts included; reasoning_tokens: of the thoughts.
    """

    index: int
    reason: Literal["stop", "length", "tool_calls"]
    stop: str | None = None
    tokens: int = 0
    reasoning_tokens: int = 0


Delta = Text | Reasoning | CallBegin | CallArguments | End


# What goes wrong ---------------------------------------------------------------------------------


class AskError(BitNetError, ValueError):
    """A request that cannot be answered. `status`: of HTTP; `field`: the field that is wrong."""

    def __init__(
        self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.field = status, field
        self.code = code or "invalid_request"
