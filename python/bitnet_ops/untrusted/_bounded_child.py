"""The child process of bounded.py: a script of its own, which never imports the package.

It renders chat templates. Frames of JSON, 8 bytes of length before each, come on stdin and go to
stdout; the first one says where modules lie and how much memory there is.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any

_MAX_TEXT = 16 << 20  # characters of an answer; a context of a million tokens has a quarter
_MAX_MESSAGE = 500


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    start = _read(requests)
    if start is None:
        return
    sys.path[:] = start["path"]
    # A server renders one template again and again, and to compile it takes most of the time.
    parse = functools.lru_cache(maxsize=4)(_environment().from_string)
    _limit(start["memory_bytes"])
    _write(answers, {"value": "ready"})
    while (request := _read(requests)) is not None:
        _write(answers, _answer(parse, request))


def _limit(memory_bytes: int) -> None:
    """No file grows, no core is dumped, and memory has an end, counted from here."""
    for name, value in (("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        resource.setrlimit(getattr(resource, name), (value, value))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    except (OSError, ValueError):
        pass  # no /proc, and there the limit has no effect either: time and output remain


def _read(stream: Any) -> Any:
    head = stream.read(8)
    return json.loads(stream.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def _write(stream: Any, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode("ascii")
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _answer(parse: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The template's text, or its kind of error; past its time the process is killed."""
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    try:
        return {"value": _render(parse(request["template"]), request["variables"])}
    except _TooLong:
        return {"error": "TooLong", "message": "", "line": None, "classes": []}
    except MemoryError:
        return {"error": "MemoryError", "message": "", "line": None, "classes": []}
    except BaseException as error:
        classes = [c.__name__ for c in type(error).__mro__]
        message = str(getattr(error, "message", None) or error)[:_MAX_MESSAGE]
        line = getattr(error, "lineno", None)
        return {"error": classes[0], "message": message, "line": line, "classes": classes}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _TooLong(Exception):
    """An answer beyond every use."""


def _environment() -> Any:
    """Templates see what transformers gives them: its environment, filters and functions."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}...{% endgeneration %}` marks answers for training; here: its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_body")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _render(template: Any, variables: dict[str, Any]) -> str:
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > _MAX_TEXT:
            raise _TooLong
        pieces.append(piece)
    return "".join(pieces)


if __name__ == "__main__":
    main()
