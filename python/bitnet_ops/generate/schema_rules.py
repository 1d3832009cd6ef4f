"""Rules in llguidance's form of Lark for JSON schemas, as calls of tools need them.

llguidance reads JSON schemas itself: it holds more of them and forbids more, for it takes
properties in the order of the schema alone, and no schema with a keyword that it cannot hold. Here
objects take their properties in any order, and what cannot be held is left out: all that a schema
allows may be written. Texts and numbers are llguidance's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from bitnet_ops.errors import BitNetError

JSON_OPTIONS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
_BITS = 64  # that a rule remembers: which properties have come
_MAX_ITEMS = 10_000  # a bound of an array above it is left out
_MAX_BRANCHES, _DEEPEST, _DEEPEST_VALUE = 64, 16, 64
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_TEXT = ("pattern", "format", "maxLength", "minLength")
_FORMATS = ("date", "uuid", "ipv4")  # writers of schemas mean several things by the others
_NUMBER = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_HELD = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", *_TEXT, *_NUMBER),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "patternProperties"),
}
# Schemas with one of these may say in another place which properties there are.
_ELSEWHERE = {"patternProperties", "if", "then", "else", "dependentSchemas", "dependencies"}
_LEFT_OUT = _ELSEWHERE | {
    *("not", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "unevaluatedItems", "$dynamicRef"),
}
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\(["\\bfnrt\/]|u[0-9a-fA-F]{4}))*"/'


class SchemaError(BitNetError, ValueError):
    """What was given is no schema."""


class LeftOut(dict[str, None]):
    """Names of keywords that are not held; `steps`: how many schemas may still be looked at.

    A schema of a kilobyte can stand for a million; what is beyond the steps is not held.
    """

    def __init__(self, steps: int = 1000) -> None:
        super().__init__()
        self.steps = steps


def resolved(schema: Any, root: Any) -> Any:
    """The schema that a reference within `root` names; with another reference it stays as it is.

    Raises SchemaError for a reference to nothing or to itself.
    """
    for _ in range(_DEEPEST):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str) or not re.match("#(/|$)", ref):
            return schema
        found: Any = root
        for step in ref.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise SchemaError(f"a reference to {ref[:80]}, which is not there")
        schema = found
    raise SchemaError("references that lead to themselves")


def branches(
    schema: Any, root: Any, left_out: LeftOut | None = None, depth: int = 0
) -> list[dict[str, Any]]:
    """Schemas one of which each value of `schema` satisfies, without references and applicators.

    left_out: gets the keywords that are not held. Raises SchemaError.
    """
    left_out = LeftOut() if left_out is None else left_out
    left_out.steps -= 1
    if isinstance(schema, bool):
        return [{}] if schema else []
    if not isinstance(schema, Mapping):
        raise SchemaError(f"a {type(schema).__name__} for a schema")
    if depth > _DEEPEST or left_out.steps < 0:
        left_out["schemas that lead to too many others"] = None
        return [{}]
    found = [{key: schema[key] for key in schema.keys() & _HELD}]
    missing = sorted(schema.keys() & _LEFT_OUT)
    groups: list[list[Any]] = []
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        given = schema.get(key, [])
        if key == "$ref" and given:
            given = resolved(schema, root)
            if given is schema:
                missing.append("$ref")  # to another document
                given = []
        if not isinstance(given, list | Mapping | bool):
            raise SchemaError(f"a {type(given).__name__} for {key}")
        if key in ("anyOf", "oneOf"):
            groups += [_listed(given)] * bool(given)
        else:
            groups += [[one] for one in _listed(given)]
    opened = not _ELSEWHERE.isdisjoint(missing) or "$ref" in missing
    for group in groups:
        options = [b for one in group for b in branches(one, root, left_out, depth + 1)]
        if len(found) * len(options) > _MAX_BRANCHES:
            missing.append("anyOf")
            opened = True
        else:
            found = [c for a in found for b in options if (c := _both(a, b, left_out)) is not None]
    left_out.update(dict.fromkeys(missing))
    if opened:
        found = [{"additionalProperties": True, **one} for one in found]
    if schema.get("nullable") is True and "type" in schema:
        found.append({"type": "null"})
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _both(a: dict[str, Any], b: dict[str, Any], left_out: LeftOut) -> dict[str, Any] | None:
    """What satisfies both, and perhaps more; None: nothing does."""
    found = {**b, **a}
    for key in a.keys() & b.keys():
        x, y = a[key], b[key]
        if x == y and type(x) is type(y):
            continue
        if key == "type":
            kinds = kinds_of(a), kinds_of(b)
            shared = [
                k for k in kinds[0] if k in kinds[1] or k == "integer" and "number" in kinds[1]
            ]
            shared += ["integer"] * ("integer" in kinds[1] and "number" in kinds[0])
            if not shared:
                return None
            found[key] = shared
        elif key == "required" and isinstance(x, list) and isinstance(y, list):
            found[key] = [*x, *y]
        elif key == "properties" and isinstance(x, Mapping) and isinstance(y, Mapping):
            found[key] = {
                name: {"allOf": [x[name], y[name]]} if name in x and name in y else one
                for name, one in {**x, **y}.items()
            }
        elif key == "items" and not isinstance(x, list) and not isinstance(y, list):
            found[key] = {"allOf": [x, y]}
        elif key == "enum" and isinstance(x, list) and isinstance(y, list):
            found[key] = [one for one in x if one in y]
        else:
            left_out[key] = None
    named = [one for one in (a, b) if "properties" in one or "additionalProperties" in one]
    if len(named) == 2:
        closed = not any(map(_others, named))
        found.pop("additionalProperties", None)
        found["additionalProperties"] = not closed
    return found


def _others(schema: Mapping[str, Any]) -> Any:
    """The schema of properties that an object's schema does not name."""
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and patterns:
        return {"anyOf": [*patterns.values(), schema.get("additionalProperties", True)]}
    return schema.get("additionalProperties", "properties" not in schema)


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names; without any all of them. Raises SchemaError."""
    kinds = _listed(schema.get("type", list(_TYPES)))
    for kind in kinds:
        if kind not in (*_TYPES, "integer"):
            raise SchemaError(f"Invalid type: {str(kind)[:80]}")
    return kinds


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema names; None: it does not. Raises SchemaError."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return None
    if not isinstance(values, list):
        raise SchemaError(f"a {type(values).__name__} for enum")
    kinds = set(kinds_of(schema))
    kinds |= {"integer"} if "number" in kinds else set()
    return [one for one in values if not kinds.isdisjoint(types_of(one))]


def types_of(value: Any) -> tuple[str, ...]:
    """The types of a value of JSON."""
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean",)
    if isinstance(value, int | float):
        return ("integer", "number") if value == value // 1 else ("number",)
    return (
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",
    )


def quoted(text: str) -> str:
    """`text` as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Any) -> str:
    """What llguidance makes of a schema, without blanks but behind , and :."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


class SchemaRules:
    """Rules for the values of schemas; equal schemas have one.

    holds: whether llguidance can follow a grammar in Lark.
    Attributes: `lines`, the rules; `left_out`, keywords that were not held since it was emptied.
    Methods raise SchemaError.
    """

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self.lines = ["COMMA: /, ?/", "COLON: /: ?/", f"any: {json_rule({})}", f"STRING: {_STRING}"]
        self.left_out = LeftOut(200_000)
        self._depth = 0
        self._names: dict[Any, str | None] = {}
        self._roots: dict[int, Any] = {}  # kept, for their ids are parts of keys

    def rule(self, body: str, options: str = "", terminal: bool = False) -> str:
        """The name of a rule or terminal of this body."""
        name = self._names.get((body, options))
        if name is None:
            name = self._names[body, options] = f"{'R' if terminal else 'r'}{len(self._names)}"
            self.lines.append(f"{name}{options}: {body}")
        return name

    def value(self, schema: Any, root: Any) -> str | None:
        """The name of a rule for JSON of a schema within `root`; None: nothing satisfies it."""
        text = json.dumps(schema)
        key = text, id(root) if '"$ref"' in text else 0
        if self._depth > _DEEPEST_VALUE:
            self.left_out["schemas that lead to too many others"] = None
            return "any"
        if key not in self._names:
            self._roots[id(root)] = root
            self._depth += 1
            name = self._names[key] = f"r{len(self._names)}"  # its body may lead back to it
            bodies = [
                body
                for one in branches(schema, root, self.left_out)
                for body in self._bodies(one, root)
            ]
            if "any" in bodies:
                bodies = ["any"]
            self.lines.append(f"{name}: {' | '.join(dict.fromkeys(bodies)) or 'any'}")
            if not bodies:
                self._names[key] = None
            self._depth -= 1
        return self._names[key]

    def _bodies(self, schema: Mapping[str, Any], root: Any) -> list[str]:
        """Of a schema without applicators."""
        values = values_of(schema)
        if values is not None:
            return [self.constant(value) for value in values]
        if not schema or schema == {"additionalProperties": True}:
            return ["any"]
        bodies: list[str | None] = []
        for kind in kinds_of(schema):
            if kind == "object":
                bodies.append(self.object(schema, root))
            elif kind == "array":
                bodies.append(self._array(schema, root))
            elif kind in ("boolean", "null"):
                bodies.append('"null"' if kind == "null" else '("true" | "false")')
            else:
                keys = _TEXT if kind == "string" else _NUMBER
                bodies.append(
                    self._leaf({"type": kind}, {k: schema[k] for k in keys if k in schema})
                )
        return [body for body in bodies if body is not None]

    def _leaf(self, kind: dict[str, Any], keywords: dict[str, Any]) -> str:
        """A text or number: keywords are left out, one after the other, until it can be held."""
        if keywords.get("format", "date") not in _FORMATS:
            del keywords["format"]
        if _odd(keywords.get("pattern")):
            del keywords["pattern"]
            self.left_out["pattern"] = None
        while keywords and not self._holds(f"start: {json_rule({**kind, **keywords})}"):
            key = next(iter(keywords))
            del keywords[key]
            self.left_out[key] = None
        return self.rule(json_rule({**kind, **keywords}))

    def constant(self, value: Any) -> str:
        if isinstance(value, list):
            items = " COMMA ".join(map(self.constant, value))
            return self.rule(f'"[" {items} "]"')
        if isinstance(value, Mapping):
            return self.object(
                {
                    "properties": {k: {"const": v} for k, v in value.items()},
                    "required": list(value),
                },
                {},
            )
        return self.rule(json_rule({"const": value}))

    def _array(self, schema: Mapping[str, Any], root: Any) -> str:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        if not isinstance(first, list):
            raise SchemaError(f"a {type(first).__name__} for prefixItems")
        minimum, maximum = (_count(schema, key) for key in ("minItems", "maxItems"))
        minimum = minimum or 0
        if max(minimum, maximum or 0) > _MAX_ITEMS:
            self.left_out["maxItems"] = None
            minimum, maximum = min(minimum, _MAX_ITEMS), None
        item = self.value(items, root)
        tail, n = "", len(first)
        if item is not None and (maximum is None or maximum > n):
            low, high = max(minimum - n, 0), "" if maximum is None else maximum - n
            tail = f"(COMMA {item}){{{low},{high}}}"
            if not n:  # the first one has no comma before it
                low, high = max(low - 1, 0), "" if maximum is None else maximum - 1
                tail = f"{item} (COMMA {item}){{{low},{high}}}"
                tail = tail if minimum else f"({tail})?"
        for i, one in reversed(list(enumerate(first))):
            part = f"{'COMMA ' if i else ''}{self.value(one, root) or 'any'} {tail}"
            tail = part if i < minimum else f"({part})?"
        return self.rule(f'"[" {tail} "]"')

    def object(self, schema: Mapping[str, Any], root: Any) -> str:
        named, required, others = members(schema)
        keys = {name: quoted(quoted(name)) for name in named}
        parts = {
            name: f"{keys[name]} COLON {value}"
            for name, one in named.items()
            if (value := self.value(one, root)) is not None
        }
        other = None
        if (value := self.value(others, root)) is not None:
            taken = f" & ~({' | '.join(keys.values())})" if keys else ""
            other = f"{self.rule(f'STRING{taken}', terminal=True)} COLON {value}"
        return self.rule('"{" ' + self.any_order(parts, required, other, " COMMA ", '"}"'))

    def any_order(
        self,
        parts: Mapping[str, str],
        required: Collection[str],
        other: str | None,
        between: str,
        end: str,
    ) -> str:
        """`parts` in any order, each at most once, with `between`, and then `end`.

        required: names of those that have to come. other: comes as often as it likes. A rule
        remembers 64 of them: those beyond may come again, and none of them has to come.
        """
        if not parts and other is None:
            return end
        if any(name not in parts for name in required):
            self.left_out["required"] = None  # else nothing would be allowed
        names = sorted(parts, key=lambda name: name not in required)
        needed = min(sum(name in required for name in names), _BITS)
        n = len(self._names)
        self._names["order", n] = more = f"m{n}"
        lines = []
        for i, name in enumerate(names):
            once = f"e{n}::set_bit({i}) %if bit_clear({i})" if i < _BITS else f"e{n}::_"
            lines.append(f"{parts[name]} {once}")
        if other is not None:
            lines.append(f"{other} e{n}::_")
        finite = other is None and len(names) <= _BITS
        self.lines += [
            f"{more}::_: " + "\n  | ".join(lines),
            f"e{n}::_: {end}" + (f" %if is_ones([0:{needed}])" if needed else ""),
            f"  | {between}{more}::_" + (f" %if not(is_ones([0:{len(names)}]))" * finite),
        ]
        return f"{more}::0" if needed else f"({end} | {more}::0)"

    def text(self, schema: Mapping[str, Any], end: str) -> str | None:
        """The name of a rule for a text of this schema as it is, up to `end`; None: it is any."""
        terms = []
        if schema.get("format") in _FORMATS:
            self.left_out["format"] = None
        if "pattern" in schema:
            pattern = None if _odd(schema["pattern"]) else _searched(schema["pattern"])
            terms += [f"/{pattern}/"] if pattern is not None else []
            if pattern is None:
                self.left_out["pattern"] = None
        minimum, maximum = (_count(schema, key) for key in ("minLength", "maxLength"))
        if minimum or maximum is not None:
            terms.append(f"/(?s:.{{{minimum or 0},{'' if maximum is None else maximum}}})/")
        if not terms:
            return None
        closing = re.escape(end).replace("/", "\\/").replace("\\\n", "\\n")
        terms += ["/(?s:.*)/", f"~/(?s:.*){closing}(?s:.*)/"]
        body = f"({' & '.join(terms)}) {quoted(end)}"
        if not self._holds(f"start: t\nt[lazy]: T\nT: {body}"):
            self.left_out["pattern"] = None
            return None
        return self.rule(self.rule(body, terminal=True), "[lazy]")


def members(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], Any]:
    """What an object's schema says: properties, names of required ones, the schema of others."""
    named, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(named, Mapping):
        raise SchemaError(f"a {type(named).__name__} for properties by their names")
    required = [one for one in _listed(required) if isinstance(one, str)]
    others = _others(schema)
    return {**named, **{n: others or True for n in required if n not in named}}, required, others


def arguments_of(
    parameters: Mapping[str, Any], left_out: LeftOut | None = None
) -> tuple[dict[str, Any], list[str], Any]:
    """What all branches of a tool's parameters say together (see `members`)."""
    named: dict[str, Any] = {}
    required: list[str] | None = None
    others: Any = False
    for one in branches(as_object(parameters), parameters, left_out):
        more, needed, rest = members(one)
        for name, schema in more.items():
            same = name not in named or named[name] == schema
            named[name] = schema if same else {"anyOf": [named[name], schema]}
        required = [name for name in needed if required is None or name in required]
        others = others or rest
    return named, required or [], others


def as_object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a tool as the schema of an object; those that say nothing are none."""
    if not parameters:
        return {"type": "object", "properties": {}}
    return {**parameters, "type": "object", "nullable": False}


def closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than those that it names.

    Not those that say otherwise, and not where an object's properties are named in several places.
    """
    return _close(schema) if not _mixed(schema) else schema


_MAPS = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems")


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from schema[key].values()
    for key in _SCHEMAS:
        yield from _listed(schema.get(key))


def _mixed(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    several = schema.get("allOf", ())
    beside = "properties" in schema and not schema.keys().isdisjoint(("anyOf", "oneOf", "$ref"))
    if beside or len(several) > 1 or (several and "properties" in schema):
        return True
    return any(map(_mixed, _inner(schema)))


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _close(one) if key in _SCHEMAS else one for key, one in schema.items()}
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            found[key] = {name: _close(one) for name, one in schema[key].items()}
    if "properties" in schema and _ELSEWHERE.isdisjoint(schema):
        found.setdefault("additionalProperties", False)
    return found


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _odd(pattern: Any) -> bool:
    """Whether llguidance would read the pattern otherwise: its classes have operators."""
    odd = r"\[\^?\]?(?:\\.|[^\]\\])*?(?:\[|&&|--|~~)"
    return isinstance(pattern, str) and re.search(odd, re.sub(r"\\.", "x", pattern)) is not None


def _searched(pattern: Any) -> str | None:
    """A pattern, which is looked for in a text, as one of all the text; None: that is not known."""
    if not isinstance(pattern, str):
        return None
    classes = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9a-zA-Z_]", "W": "[^0-9a-zA-Z_]"}
    found, depth, inside = [""], 0, False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        inside = part == "[" or (inside and part != "]")
        if not inside:
            depth += (part == "(") - (part == ")")
        if part == "|" and not depth and not inside:
            found.append("")
        else:
            part = {"/": "\\/", "\n": "\\n"}.get(part, part)
            found[-1] += classes.get(part[1:], part) if part.startswith("\\") else part
    whole = []
    for one in found:
        begin, end = one.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", one))
        body = one[begin : len(one) - end]
        if re.search(r"[\^$]", re.sub(r"\\.|\[\^?(\\.|[^\]\\])*\]", "", body)):
            return None
        whole.append(f"{'' if begin else '(?s:.*)'}(?:{body}){'' if end else '(?s:.*)'}")
    return "|".join(whole)
