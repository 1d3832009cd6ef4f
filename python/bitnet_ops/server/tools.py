"""Tools: the forms in which models write calls, what they are told of tools, and the grammars.

Which form a model knows stands in its chat template. A model whose template knows no tools is told
of them in words, and writes calls in the form that most others were trained with. calls.py reads
what is written in these forms.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_ops.generate.grammar import MAX_CHARACTERS, Grammar, GrammarError, Grammars
from bitnet_ops.generate.schema_rules import (
    SchemaError,
    SchemaRules,
    arguments_of,
    as_object,
    kinds_of,
    quoted,
)
from bitnet_ops.server.calls import CallReader, JsonCall, XmlCall, value_of
from bitnet_ops.server.exchange import Tool, ToolChoice
from bitnet_ops.untrusted import is_deeper, printable

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[\w.:/-]{1,256}")
_BEGIN, _END = "<tool_call>", "</tool_call>"
_SPACE = r"SPACE: /( |\n[ \t]{0,8})/"
_DEEPEST = 64  # of a schema
_MAX_APART = 256  # tools that are tried one by one, where all together are too much

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolForm:
    """A way to write calls.

    Attributes:
        native: whether the chat template itself tells the model of tools.
        triggers: texts behind which a call stands, wherever they come.
        openings: beginnings of a call that count at the beginning of an answer alone.
        special: names of special tokens that belong to calls.
        several: whether an answer may have more than one.
        key: of the arguments, in JSON.
    """

    native: bool = True
    triggers: tuple[str, ...] = (_BEGIN,)
    openings: tuple[str, ...] = ()
    special: tuple[str, ...] = (_BEGIN, _END)
    several: bool = True
    key: str = "arguments"

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Reads what comes behind a trigger, or from an opening on."""
        return JsonCall(_END)

    def prompt(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, Any]:
        """The messages and tools for the template, so that the model knows the tools."""
        described = [{"type": "function", "function": _described(tool)} for tool in tools]
        if self.native:
            return messages, described or None
        return _in_words(messages, tools), None

    # Grammars ------------------------------------------------------------------------------------

    def grammar(
        self,
        grammars: Grammars,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        several: bool = True,
        answer: str | None = None,
    ) -> Grammar:
        """Of one call behind a trigger; of the whole answer where calls are required.

        It may hold less than the tools' schemas, which the log then says, and forbids nothing that
        they allow. `answer`: the text of a JSON schema for answers without calls: of the whole
        answer too. Raises GrammarError, which names the tool, for what is no schema.
        """
        chosen = [(i, t) for i, t in enumerate(tools) if choice.name in (None, t.name)]
        _check(tools, chosen, choice)
        start = "start: call"
        if choice.mode == "required" or answer is not None:
            first = f"{self._first(grammars)} call"
            more = several and self.several and choice.name is None
            start = f"start: {first} (SPACE? {first})*" if more else f"start: {first}"
        if choice.mode != "required" and answer is not None:
            start += f" | answer\nanswer: %json {answer}"

        def text(start: str, calls: Callable[[SchemaRules], str]) -> str:
            rules = SchemaRules(grammars.holds)
            call = self._around(grammars, f"{self._head} ({calls(rules)})")
            return "\n".join([start, f"call: {call}", *rules.lines, _SPACE])

        def each(loose: Collection[int]) -> Callable[[SchemaRules], str]:
            return lambda rules: " | ".join(
                self._call_of(rules, i, tool, i in loose) for i, tool in chosen
            )

        def names_alone(rules: SchemaRules) -> str:
            _remark(f"{chosen[0][1].name} and {len(chosen) - 1} others", "they are too many")
            names = " | ".join(quoted(self._name(tool.name)) for _, tool in chosen)
            return self._call(rules, rules.rule(names, terminal=True), {"type": "object"})

        whole, soft = text(start, each(())), answer is None
        try:
            return grammars.lark(whole, "tools", soft=soft)
        except GrammarError:
            if len(chosen) <= _MAX_APART:
                one = lambda i, t: lambda rules: self._call_of(rules, i, t, False)  # noqa: E731
                loose = [i for i, t in chosen if not grammars.holds(text("start: call", one(i, t)))]
                with contextlib.suppress(GrammarError):
                    return grammars.lark(text(start, each(loose)), "tools", soft=soft)
            return grammars.lark(text(start, names_alone), "tools", soft=soft)

    def _call_of(self, rules: SchemaRules, i: int, tool: Tool, loose: bool) -> str:
        """The body of a call of one tool, as a part of a rule."""
        field = f"tools[{i}].function.parameters"
        parameters = {"type": "object"} if loose else _checked(tool.parameters, field)
        rules.left_out.clear()
        try:
            call = self._call(rules, quoted(self._name(tool.name)), parameters)
        except SchemaError as error:
            raise GrammarError(
                f"{field}: expected a JSON schema that can be followed, got: "
                f"{printable(str(error))}"
            ) from None
        if loose or rules.left_out:
            _remark(tool.name, "all of it" if loose else ", ".join(rules.left_out))
        return call

    def _first(self, grammars: Grammars) -> str:
        """What a call begins with where the model has no choice."""
        return grammars.literal(self.triggers[0])

    def _around(self, grammars: Grammars, call: str) -> str:
        return f"SPACE? ({call}) SPACE? {grammars.literal(_END)}"

    @property
    def _head(self) -> str:
        """How all calls begin, before the name."""
        return r""""{" SPACE? "\"name\"" COLON"""

    def _name(self, name: str) -> str:
        return quoted(name)

    def _call(self, rules: SchemaRules, name: str, parameters: Mapping[str, Any]) -> str:
        arguments = rules.value(as_object(parameters), parameters) or "any"
        return f'{name} COMMA {quoted(quoted(self.key))} COLON {arguments} SPACE? "}}"'


class LlamaForm(ToolForm):
    """A JSON object, alone or behind <|python_tag|>."""

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return JsonCall("")

    def _first(self, grammars: Grammars) -> str:
        return ""

    def _around(self, grammars: Grammars, call: str) -> str:
        return call

    @property
    def _head(self) -> str:
        return f"({' | '.join(map(quoted, self.openings))}) COLON"  # what a reader takes for a call


class XmlForm(ToolForm):
    """<function=NAME> with a <parameter=NAME> for each argument: texts raw, other values JSON."""

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return XmlCall(_END, {tool.name: tool.parameters for tool in tools})

    _head = ""

    def _name(self, name: str) -> str:
        return f"<function={name}>\n"

    def _call(self, rules: SchemaRules, name: str, parameters: Mapping[str, Any]) -> str:
        named, required, others = arguments_of(parameters, rules.left_out)
        parts = dict[str, str]()
        for one, schema in named.items():
            if not re.fullmatch(r"[^\n<>]+", one):
                rules.left_out[f"the name {one[:80]!r}"] = None  # it has no place in a tag
            elif value := self._value(rules, schema, parameters):
                parts[one] = f"{quoted(f'<parameter={one}>{chr(10)}')} {value}"
        other = None
        if value := self._value(rules, others, parameters):
            taken = f" & ~({' | '.join(map(quoted, named))})" if named else ""
            key = rules.rule(rf"/[^\n<>]+/{taken}", terminal=True)
            other = f'"<parameter=" {key} {quoted(">" + chr(10))} {value}'
        inner = rules.any_order(parts, required, other, "", '"</function>"')
        return f"{name} {inner}"

    @staticmethod
    def _value(rules: SchemaRules, schema: Any, root: Mapping[str, Any]) -> str | None:
        """A value and its closing tag; None: the schema allows none."""
        value, end = value_of(schema, root, rules.left_out), "\n</parameter>"
        if not value.kinds:
            return None
        choices = [quoted(text) for text in value.choices if "</parameter>" not in text]
        texts = [one for one in value.rest if "string" in kinds_of(one)]
        if texts or len(choices) < len(value.choices):
            held = rules.text(texts[0], end) if value.kind == "raw" and not choices else None
            text = held or rules.rule(r"/(.|\n)*<\/parameter>/", "[lazy]")
            return f"{text} {quoted(chr(10))}"
        inner = [one for schema in value.rest if (one := rules.value(schema, root)) is not None]
        return f"({' | '.join([*choices, *inner])}) {quoted(f'{end}{chr(10)}')}"


HERMES, XML, IN_WORDS = ToolForm(), XmlForm(), ToolForm(native=False)
LLAMA = LlamaForm(
    triggers=("<|python_tag|>",),
    openings=('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{\n    "name"'),
    special=("<|python_tag|>",),
    several=False,
    key="parameters",
)


def form_of(template: str | None) -> ToolForm:
    """The form in which a model of this chat template writes calls."""
    text = template or ""
    if not re.search(r"\btools\b", text):
        return IN_WORDS
    if _BEGIN in text:
        return XML if "<function=" in text else HERMES
    return LLAMA if re.search(r"""["']parameters\\?["']\s*:""", text) else IN_WORDS


# Schemas -----------------------------------------------------------------------------------------


def _check(tools: Sequence[Tool], chosen: Sequence[Any], choice: ToolChoice) -> None:
    for i, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise GrammarError(
                f"tools[{i}].function.name: expected letters, digits and _ . : / -, at most 128, "
                f"got {tool.name[:80]!r}"
            )
    if len({tool.name for tool in tools}) < len(tools):
        raise GrammarError("tools: expected names that differ, got one twice")
    if not chosen:
        raise GrammarError(
            "tool_choice: expected the name of one of the tools, got "
            f"{(choice.name or '')[:80]!r}; there are {len(tools)}"
        )


def _checked(parameters: Any, field: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments; raises GrammarError for one that is too large or wrong."""
    if not isinstance(parameters, Mapping):
        raise GrammarError(f"{field}: expected a JSON schema, got {parameters!r:.80}")
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarError(f"{field}: expected the schema of an object, got {kind!r:.80}")
    if is_deeper(parameters, _DEEPEST) or len(json.dumps(parameters)) > MAX_CHARACTERS:
        raise GrammarError(
            f"{field}: expected a schema at most {_DEEPEST} deep and {MAX_CHARACTERS >> 10} KiB "
            "large, got a larger one"
        )
    return parameters


@functools.lru_cache(maxsize=1024)
def _remark(name: str, what: str) -> None:
    """Say once what the grammar does not hold of a tool's schema."""
    _LOG.warning(
        "tool %s: its calls are not checked for all that its schema says: %s",
        printable(name),
        printable(what),
    )


# In words ----------------------------------------------------------------------------------------


def _described(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }


_WORDS = """You can call these functions. Each line describes one, its arguments as a JSON schema:
<tools>
{tools}
</tools>
Where a function helps, call it by a JSON object between two tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
What it returns comes in the next message, between <tool_response> and </tool_response>. Where no
function helps, answer in plain words."""


def _in_words(messages: Messages, tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """A conversation for a template that knows no tools: all of it in messages' texts."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message.get("role") == "tool":
            result = f"<tool_response>\n{_plain(content)}\n</tool_response>"
            if found and found[-1].get("results"):
                result = f"{found[-1]['content']}\n{result}"
                found.pop()
            found.append({"role": "user", "content": result, "results": True})
        elif calls := message.get("tool_calls"):
            texts = [_plain(content)] if content else []
            for call in calls:
                function = call.get("function", call)
                call = {"name": function.get("name"), "arguments": function.get("arguments")}
                texts.append(f"{_BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{_END}")
            rest = {k: v for k, v in message.items() if k != "tool_calls"}
            found.append({**rest, "content": "\n".join(texts)})
        else:
            found.append(message)
    if tools:
        lines = [json.dumps(_described(tool), ensure_ascii=False) for tool in tools]
        words = _WORDS.format(tools="\n".join(lines))
        if found and found[0].get("role") == "system":
            said = _plain(found[0].get("content") or "")
            found[0] = {**found[0], "content": f"{said}\n\n{words}"}
        else:
            found.insert(0, {"role": "system", "content": words})
    return [{k: v for k, v in message.items() if k != "results"} for message in found]


def _plain(content: Any) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
