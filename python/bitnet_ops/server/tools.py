"""Tools: the forms in which models write calls, what they are told of tools, and the grammars.

Which form a model knows stands in its chat template. A model whose template knows no tools is told
of them in words, and writes calls in the form that most others were trained with. calls.py reads
what is written in these forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_ops.generate.grammar import Grammar, GrammarError, Grammars, schema_text
from bitnet_ops.server.calls import CallReader, JsonCall, XmlCall, value_of
from bitnet_ops.server.exchange import Tool, ToolChoice

_NAME = re.compile(r"[\w.:/-]{1,128}")
_BEGIN, _END = "<tool_call>", "</tool_call>"
_NAMED = r'''"{" SPACE? "\"name\""'''  # how a call in JSON begins
_SPACE = r"SPACE: /( |\n[ \t]{0,8})/"
# Schemas with one of these may say in another place which properties there are.
_ELSEWHERE = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")

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
    """

    native: bool = True
    triggers: tuple[str, ...] = (_BEGIN,)
    openings: tuple[str, ...] = ()
    special: tuple[str, ...] = (_BEGIN, _END)
    several: bool = True

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

        `answer`: the text of a JSON schema for answers without calls: of the whole answer too.
        Raises GrammarError, which names the tool.
        """
        chosen = [(i, t) for i, t in enumerate(tools) if choice.name in (None, t.name)]
        _check(tools, chosen, choice)
        rules = [self._rules(grammars, i, tool) for i, tool in chosen]
        calls = " | ".join(f"call_{i}" for i, _ in chosen)
        lines = [f"call: {self._around(grammars, f'({calls})')}", *rules, _SPACE]
        if choice.mode == "required" or answer is not None:
            first = f"{self._first(grammars)} call"
            more = several and self.several and choice.name is None
            whole = f"{first} (SPACE? {first})*" if more else first
            if answer is not None and choice.mode != "required":
                whole = f"({whole}) | answer"
                lines.append(f"answer: %json {answer}")
            lines.insert(0, f"start: {whole}")
        else:
            lines.insert(0, "start: call")
        try:
            return grammars.lark("\n".join(lines), "tools")
        except GrammarError:
            for i, tool in chosen:  # which one it is
                field = f"tools[{i}].function.parameters"
                grammars.schema(_arguments(tool, field), field, lenient=True)
            raise

    def _first(self, grammars: Grammars) -> str:
        """What a call begins with where the model has no choice."""
        return grammars.literal(self.triggers[0])

    def _around(self, grammars: Grammars, call: str) -> str:
        return f"SPACE? {call} SPACE? {grammars.literal(_END)}"

    def _rules(self, grammars: Grammars, i: int, tool: Tool) -> str:
        return _json_rules(i, tool, "arguments")


class LlamaForm(ToolForm):
    """A JSON object, alone or behind <|python_tag|>."""

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return JsonCall("")

    def _first(self, grammars: Grammars) -> str:
        return ""

    def _around(self, grammars: Grammars, call: str) -> str:
        return call

    def _rules(self, grammars: Grammars, i: int, tool: Tool) -> str:
        begin = " | ".join(map(_quoted, self.openings))  # what a reader takes for a call
        return _json_rules(i, tool, "parameters", f"({begin})")


class XmlForm(ToolForm):
    """<function=NAME> with a <parameter=NAME> for each argument: texts raw, other values JSON."""

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return XmlCall(_END, {tool.name: tool.parameters for tool in tools})

    def _around(self, grammars: Grammars, call: str) -> str:
        return f"SPACE? {call} SPACE? {grammars.literal(_END)}"

    def _rules(self, grammars: Grammars, i: int, tool: Tool) -> str:
        field = f"tools[{i}].function.parameters"
        schema = _arguments(tool, field)
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        lines, parts = [], []
        for j, (name, one) in enumerate(properties.items()):
            if not re.fullmatch(r"[^\n<>]+", name):
                raise GrammarError(
                    f"{field}: expected names without <, > and line ends, got {name[:80]!r}"
                )
            value = value_of(one, schema)
            begin, end = _quoted(f"<parameter={name}>\n"), _quoted("\n</parameter>\n")
            if value.choices:
                choices = " | ".join(map(_quoted, value.choices))
                lines.append(f"value_{i}_{j}: ({choices}) {end}")
            elif value.kind == "json":
                inner = {**_defined(schema), **one} if isinstance(one, Mapping) else one
                text = schema_text(inner, field, lenient=True)
                lines += [f"json_{i}_{j}: %json {text}", f"value_{i}_{j}: json_{i}_{j} {end}"]
            else:
                lines.append(f"text_{i}_{j}[lazy]: /(.|\\n)*<\\/parameter>/")
                lines.append(f'value_{i}_{j}: text_{i}_{j} "\\n"')
            lines.append(f"parameter_{i}_{j}: {begin} value_{i}_{j}")
            parts.append(f"parameter_{i}_{j}{'' if name in required else '?'}")
        begin = _quoted(f"<function={tool.name}>\n")
        return "\n".join([f'call_{i}: {begin} {" ".join(parts)} "</function>"', *lines])


HERMES, XML, IN_WORDS = ToolForm(), XmlForm(), ToolForm(native=False)
LLAMA = LlamaForm(
    triggers=("<|python_tag|>",),
    openings=('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{\n    "name"'),
    special=("<|python_tag|>",),
    several=False,
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


def _arguments(tool: Tool, field: str) -> dict[str, Any]:
    """The schema of a tool's arguments: of an object without other properties than it names."""
    if not isinstance(tool.parameters, Mapping):
        raise GrammarError(f"{field}: expected a JSON schema, got {tool.parameters!r:.80}")
    schema = dict(tool.parameters)
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarError(f"{field}: expected the schema of an object, got {kind!r:.80}")
    schema["type"] = "object"
    if not any(key in schema for key in _ELSEWHERE):
        schema["additionalProperties"] = False
        schema.setdefault("properties", {})
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(n, str) for n in properties):
        raise GrammarError(f"{field}: expected properties by their names, got {properties!r:.80}")
    return schema


def _json_rules(i: int, tool: Tool, key: str, begin: str = _NAMED) -> str:
    field = f"tools[{i}].function.parameters"
    text = schema_text(_arguments(tool, field), field, lenient=True)
    return (
        f'call_{i}: {begin} SPACE? ":" SPACE? {_quoted(_quoted(tool.name))} SPACE? "," SPACE? '
        f'{_quoted(_quoted(key))} SPACE? ":" SPACE? arguments_{i} SPACE? "}}"\n'
        f"arguments_{i}: %json {text}"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _defined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references within the schema of a property may name."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


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
