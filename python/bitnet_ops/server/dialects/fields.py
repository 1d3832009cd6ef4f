"""Fields that dialects share: their types and bounds, and what they mean as an Ask."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler

from bitnet_ops.server.exchange import AskError, Format, Tool, ToolChoice

MAX_MESSAGES, MAX_STOPS, MAX_TOOLS = 10_000, 16, 1024
_MAX_NAME = 256
_MAX_SCHEMA_BYTES, _MAX_SCHEMA_DEPTH = 256 << 10, 64


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """A request's JSON object; fields that are not known are ignored.

    Of what is wrong in a list or an object the first is told: an error for each of a million
    elements would take gigabytes.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _fail_fast(schema)
        return schema


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(gt=0, le=100)]
Word = Annotated[str, Field(max_length=64)]
StopText = Annotated[str, Field(max_length=1000)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None


class Sampling(Body):
    """Options of sampling that most dialects spell alike; None: not stated."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None

    def sampling(self) -> dict[str, Any]:
        """By the names of SamplingParams; in these, top_p 0 is the most probable token alone."""
        found = {name: getattr(self, name) for name in Sampling.model_fields}
        stated = {name: value for name, value in found.items() if value is not None}
        if "top_k" in stated:
            stated["top_k"] = max(0, stated["top_k"])  # -1 keeps all, too
        if stated.get("top_p") == 0:
            del stated["top_p"]
            stated["top_k"] = 1
        if "seed" in stated:
            if stated["seed"] == -1:  # llama.cpp's "any"
                del stated["seed"]
            else:
                stated["seed"] %= 2**63
        return stated


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)


def tools_of(entries: Iterable[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Tools in OpenAI's form; kinds that run elsewhere (web_search, ...) are left out."""
    found: dict[str, Tool] = {}
    for entry in entries or ():
        function = entry.get("function", entry)
        if entry.get("type", "function") != "function" or not isinstance(function, Mapping):
            continue
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            got = f"one of {len(name)}" if isinstance(name, str) and name else "none"
            raise AskError(
                f"server: expected a name of 1 to {_MAX_NAME} letters for every tool, got {got}",
                field="tools",
            )
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise AskError(
                f"server: expected parameters of tool {name} as a JSON schema, got "
                f"{type(parameters).__name__}",
                field="tools",
            )
        check_schema(parameters, "tools")
        found[name] = Tool(name, str(function.get("description") or ""), parameters)
    return tuple(found.values())


def tool_choice_of(choice: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """ "auto", "none", "required" (or "any"), or the form that names a function."""
    if choice in (None, "auto"):
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice in ("required", "any"):
        name = None
    elif isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind in ("auto", "none"):
            return ToolChoice(kind)
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if kind in ("any", "required", "allowed_tools"):
            name = None
    else:
        raise AskError(
            'server: expected tool_choice as "auto", "none", "required" or a function\'s name, got '
            f"{str(choice)[:80]!r}",
            field="tool_choice",
        )
    if not tools or (name is not None and name not in {tool.name for tool in tools}):
        raise AskError(
            f"server: expected tool_choice among the tools that are given, got "
            f"{'no tools' if not tools else repr(str(name)[:80])}",
            field="tool_choice",
        )
    return ToolChoice("required", name)


def format_of(value: Any) -> Format:
    """response_format, or the `format` of /v1/responses' text."""
    if value is None:
        return Format()
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return Format()
    if kind == "json_object":
        return Format("json")
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping | bool):
            check_schema(schema, "response_format")
            return Format("schema", schema)
    raise AskError(
        "server: expected response_format of type text, json_object or json_schema (with "
        f"json_schema.schema), got {str(value)[:80]}",
        field="response_format",
    )


def check_schema(schema: Any, field: str) -> None:
    """Raise AskError for one that is larger or deeper than any person's."""
    depth, level = 0, [schema]
    while level:
        depth += 1
        if depth > _MAX_SCHEMA_DEPTH:
            raise AskError(
                f"server: expected a JSON schema of at most {_MAX_SCHEMA_DEPTH} levels, got more",
                field=field,
            )
        level = [
            inner
            for value in level
            for inner in (
                value.values()
                if isinstance(value, Mapping)
                else value
                if isinstance(value, list)
                else ()
            )
        ]
    if len(json.dumps(schema)) > _MAX_SCHEMA_BYTES:
        raise AskError(
            f"server: expected a JSON schema below {_MAX_SCHEMA_BYTES >> 10} KiB, got more",
            field=field,
        )


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call that the model wrote; None where its end is missing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class ThinkingOptions(Body):
    """`reasoning` of OpenRouter, `thinking` of Anthropic, DeepSeek and Zhipu."""

    type: Word | None = None
    enabled: bool | None = None
    effort: Word | None = None
    max_tokens: Count | None = None
    budget_tokens: Count | None = None


class ThinkingFields(Body):
    """Every name under which clients ask for thoughts: Ollama's is `think`, Alibaba's are
    `enable_thinking` and `thinking_budget`."""

    reasoning_effort: Word | None = None
    enable_thinking: bool | None = None
    think: bool | Word | None = None
    thinking: bool | Word | ThinkingOptions | None = None
    reasoning: bool | Word | ThinkingOptions | None = None
    thinking_budget: Count | None = None

    def thoughts(self, options: dict[str, Any]) -> dict[str, Any]:
        """`thinking`, `effort` and `thinking_budget` of an Ask; the first that says it counts.

        options: of the chat template; switches that are no template's alone are taken out.
        """
        switches: list[bool | None] = []
        for name in ("enable_thinking", "thinking"):
            if isinstance(options.get(name), bool):
                switches.append(options.pop(name))
        switches.append(self.enable_thinking)
        efforts, budgets = [self.reasoning_effort], [self.thinking_budget]
        for value in (self.think, self.thinking, self.reasoning):
            if isinstance(value, bool):
                switches.append(value)
            elif isinstance(value, str):
                efforts.append(value)
            elif value is not None:
                switches += [
                    {"enabled": True, "disabled": False}.get(value.type or ""),
                    value.enabled,
                ]
                efforts.append(value.effort)
                budgets += [value.budget_tokens, value.max_tokens]
        on, effort = _first(switches), _first(efforts)
        if on is None and effort is not None:
            on = effort != "none"
        return {"thinking": on, "effort": effort, "thinking_budget": _first(budgets)}


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
