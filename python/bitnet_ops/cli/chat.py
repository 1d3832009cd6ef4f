"""`bitnet-ops chat [MODEL]`: converse at the terminal, through the model's own chat template.

A model without a template was not trained for conversation and is rejected; --plain continues each
message as text instead.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bitnet_ops.cli.arguments import UsageError, did_you_mean
from bitnet_ops.cli.generate import (
    MODEL_HELP,
    add_model_arguments,
    add_sampling_arguments,
    add_template_arguments,
    check_draft,
    check_template_options,
    figures,
    generation_note,
    keep_draft_remark,
    makers_sampling,
    note_draft_head,
    open_model,
    print_logprobs,
    sampling_options,
    template_options,
    use_of,
    why_it_ended,
)
from bitnet_ops.cli.pictures import (
    about,
    add_image,
    add_picture_arguments,
    check_picture_arguments,
    from_json,
    image_limits,
    pictures_of,
    read_picture,
    read_pictures,
    require_tower,
    text_of,
    to_json,
    told,
)
from bitnet_ops.cli.serve import name_of
from bitnet_ops.cli.terminal import TextError, checked, print_error, print_text, say
from bitnet_ops.errors import BitNetError, counted
from bitnet_ops.generate.chat import END_OF_THOUGHT, THINK
from bitnet_ops.untrusted import read_json_object

if TYPE_CHECKING:
    from bitnet_ops.generate.pictures import Picture
    from bitnet_ops.language_model import LanguageModel, TextStream
    from bitnet_ops.vision.decode import ImageLimits

_DEMO_SEED = 0  # a conversation with the embedded demo can be had again
HELP = '''\
/help    show this
/reset   forget the conversation
/regen   answer the last message once more
/image   FILE: show this picture with the next message; alone: none of those that wait
/history show the conversation
/system  TEXT: go on with this system message; alone: with none
/save    FILE: write the conversation, as JSON that /v1/chat/completions reads
/load    FILE: go on with a conversation that was saved
/exit    end it; so do Ctrl-D, and Ctrl-C twice
//...    send a message that begins with a slash
A line that ends in \\ goes on in the next; """ begins and ends a message of several lines.
Ctrl-C stops an answer; at the prompt it clears the line.'''


class Command(enum.Enum):
    HELP = "/help"
    RESET = "/reset"
    REGEN = "/regen"
    IMAGE = "/image"
    HISTORY = "/history"
    SYSTEM = "/system"
    SAVE = "/save"
    LOAD = "/load"
    EXIT = "/exit"


_ALIASES = {
    "/?": Command.HELP,
    "/clear": Command.RESET,
    "/quit": Command.EXIT,
    "/bye": Command.EXIT,
}
_WORDS = {**{command.value: command for command in Command}, **_ALIASES}
_NEED_FILE, _TAKE_TEXT = {Command.SAVE, Command.LOAD}, {Command.SYSTEM, Command.IMAGE}
_FILES = {Command.SAVE, Command.LOAD, Command.IMAGE}  # of which Tab completes the names
Entry = str | tuple[Command, str] | TextError  # a message; a command and what stands behind it
_ROLES = ("system", "user", "assistant")
_QUOTES = '"""'
_MAX_SAVED = 1 << 30  # bytes of a file that /load reads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bitnet-ops chat [MODEL] [options]"
    parser.description = (
        "Converse with a model through its own chat template; /help lists what can be typed."
    )
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: the embedded demo)",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help="the model, by name")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no template: continue each message (for models not made to converse)",
    )
    add_template_arguments(parser)
    parser.add_argument(
        "--stats", action="store_true", help="figures after every answer, on stderr"
    )
    add_model_arguments(parser)
    add_sampling_arguments(
        parser,
        max_new_tokens=256,
        default="generation_config.json's, or greedy; the demo: seed 0",
    )
    add_image(add_picture_arguments(parser), "a picture to show with the first message; repeatable")


def check(args: argparse.Namespace) -> None:
    """Reject what contradicts itself; MODEL and --model become one."""
    if args.plain and args.system is not None:
        raise UsageError("chat: expected --system only with a chat template, got --plain as well")
    check_template_options(args, used=not args.plain, remedy="leave --plain out")
    if args.model is not None and args.positional_model is not None:
        raise UsageError(f"chat: expected one model, got -m {args.model} and more; leave one out")
    args.model = args.positional_model if args.model is None else args.model
    if args.system is not None:
        checked(args.system, "--system")
    check_draft(args)
    check_picture_arguments(args)


def run(args: argparse.Namespace) -> int:
    """0 at the end of the conversation; in a script 1 if a turn failed, 130 after Ctrl-C."""
    options, demo = sampling_options(args), args.model is None
    if demo and args.seed is None:
        options["seed"] = _DEMO_SEED
    pictures = read_pictures(args)
    lm = open_model(args.model, args, use=use_of(args))
    keep_draft_remark()
    options.update(makers_sampling(lm, args))
    if demo:
        say("the embedded demo model continues Biblical English; it is no assistant")
    if not args.plain:
        # a model without a template ends here, and an option that its template rejects
        hello = [{"role": "user", "content": ""}]
        lm.tokenizer.render_chat(hello, chat_template_kwargs=template_options(args))
    generation_note(lm, args, used=True)
    turns = _Plain(lm, options) if args.plain else _Chat(lm, options, args)
    for picture in pictures:
        turns.show(picture)
    source, failed = Input(), False
    say("/help lists the commands; Ctrl-D ends the conversation")
    try:
        for entry in source:
            try:
                failed |= not _take(turns, entry, args)
            except KeyboardInterrupt:  # between the last piece and the prompt, at a terminal
                if not source.interactive:
                    raise
    except KeyboardInterrupt:  # in a script
        return 130
    return int(failed and not source.interactive)


# What is typed ------------------------------------------------------------------------------------


class Input:
    """Iterates over messages (str), commands, and TextErrors for what is neither, up to the end.

    Attribute `interactive`: whether somebody types. If so, Ctrl-C clears the line and twice ends;
    if not, it is a KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        with contextlib.suppress(AttributeError):  # a stream of text has no bytes to be wrong
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # line editing and history for input(), and Tab

                readline.set_completer_delims("")  # the whole line: names may hold spaces
                readline.set_completer(complete)
                readline.parse_and_bind("tab: complete")

    def __iter__(self) -> Iterator[Entry]:
        interrupts = 0
        while True:
            try:
                entry = self._entry()
            except EOFError:
                self._end_line()
                return
            except KeyboardInterrupt:
                self._end_line()
                if not self.interactive:
                    raise
                interrupts += 1
                if interrupts == 2:
                    return
                say("(Ctrl-C again, or Ctrl-D, ends the conversation)")
                continue
            interrupts = 0
            if isinstance(entry, tuple) and entry[0] is Command.EXIT:
                return
            if entry != "":
                yield entry

    def _end_line(self) -> None:
        if self.interactive:
            say("")

    def _line(self, prompt: str) -> str:
        return input(prompt if self.interactive else "")

    def _entry(self) -> Entry:
        try:
            text = self._text()
            if text.startswith("/") and not text.startswith("//"):
                return _command(text)
            return checked(text.removeprefix("/"), "chat")
        except TextError as error:
            return error

    def _text(self) -> str:
        """A line, or the lines that go together, without the space around them."""
        lines = [self._line("> ")]
        quoted = lines[0].lstrip().startswith(_QUOTES)
        if quoted:
            lines[0] = lines[0].lstrip().removeprefix(_QUOTES)
        with contextlib.suppress(EOFError):  # the end of input ends a message, too
            while not lines[-1].rstrip().endswith(_QUOTES) if quoted else lines[-1].endswith("\\"):
                if not quoted:
                    lines[-1] = lines[-1][:-1]
                lines.append(self._line(". "))
        if quoted:
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip()


def _command(text: str) -> tuple[Command, str]:
    word, rest = [*text.split(maxsplit=1), ""][:2]
    if (command := _WORDS.get(word)) is None:
        guess = did_you_mean(word, _WORDS) or "; /help lists them"
        raise TextError(
            f"chat: expected a command, got {word}{guess} (//... sends a message that begins "
            "with /)"
        )
    if command in _NEED_FILE and not rest:
        raise TextError(f"chat: expected {word} FILE, got no file")
    if rest and command not in _NEED_FILE | _TAKE_TEXT:
        raise TextError(f"chat: expected {word} alone, got {text} (//... sends it as a message)")
    return command, checked(rest, "chat")


def complete(line: str, number: int) -> str | None:
    """What Tab makes of a line, by number: commands, and files behind those that take one."""
    word, space, begun = line.partition(" ")
    if not space:
        found = [name for name in _WORDS if word.startswith("/") and name.startswith(word)]
        return found[number] if number < len(found) else None
    if _WORDS.get(word) not in _FILES:
        return None
    place = Path(begun).expanduser()
    folder, name = (place, "") if begun.endswith("/") or not begun else (place.parent, place.name)
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return None
    hidden = name.startswith(".")
    shown = [e for e in entries if e.name.startswith(name) and (hidden or e.name[0] != ".")]
    if number >= len(shown):
        return None
    head = begun[: len(begun) - len(name)]
    return f"{word} {head}{shown[number].name}{'/' if shown[number].is_dir() else ''}"


# What is answered ---------------------------------------------------------------------------------


class _Plain:
    """Each message is a text of its own, to be continued."""

    def __init__(self, lm: LanguageModel, options: dict[str, Any]) -> None:
        self.lm, self.options = lm, options
        self.stream: TextStream | None = None  # the newest answer
        self.waiting: list[Picture] = []  # pictures that the next message shows

    opening = ""  # of the newest answer, where its prompt has written it
    head_noted = False  # that the model's draft head is mostly wrong

    def reset(self) -> None:
        """Nothing is remembered between messages but the pictures of the next one."""
        self.waiting = []

    def show(self, picture: Picture) -> None:
        """Let the next message have `picture`. Raises ImageError where the model reads none."""
        require_tower(self.lm)
        said = told(about(self.lm, picture))
        self.waiting.append(picture)
        say(f"with the next message: {said}")

    def say(self, text: str) -> Iterator[str]:
        images = [self.lm.image(picture) for picture in self.waiting]
        self.stream = self.lm.stream(["", *images, text] if images else text, **self.options)
        self.waiting = []
        return iter(self.stream)


class _Chat(_Plain):
    """Turns of one conversation."""

    def __init__(
        self, lm: LanguageModel, options: dict[str, Any], args: argparse.Namespace
    ) -> None:
        super().__init__(lm, options)
        self._system, self._template_options = args.system, template_options(args)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.conversation = self.lm.chat(
            system=self._system, chat_template_kwargs=self._template_options, **self.options
        )

    def say(self, text: str) -> Iterator[str]:
        pieces = self._told(self.conversation.say(text, self.waiting))
        self.waiting = []
        return pieces

    def again(self) -> Iterator[str]:
        return self._told(self.conversation.regenerate())

    def go_on_with(self, system: str | None) -> None:
        self._system = system  # for /reset, too
        self.conversation.set_system(system)

    def _told(self, pieces: Iterator[str]) -> Iterator[str]:
        self.stream, self.opening = self.conversation.last, self.conversation.opening
        if self.conversation.dropped:
            context = self.lm.config.max_position_embeddings
            dropped = counted(self.conversation.dropped, "message")
            say(f"note: the context of {context} tokens is full; forgotten: the oldest {dropped}")
        return pieces


def _take(turns: _Plain, entry: Entry, args: argparse.Namespace) -> bool:
    """Do what an entry says; whether that went well."""
    if isinstance(entry, str):
        return _answer(turns, partial(turns.say, entry), args.stats)
    try:
        if isinstance(entry, TextError):
            raise entry
        return _obey(turns, *entry, args)
    except (BitNetError, ValueError) as error:
        print_error(error)
        return False


def _obey(turns: _Plain, command: Command, rest: str, args: argparse.Namespace) -> bool:
    if command is Command.HELP:
        for line in HELP.splitlines():
            say(line)
    elif command is Command.RESET:
        turns.reset()
    elif command is Command.IMAGE:
        _show(turns, rest, args)
    elif not isinstance(turns, _Chat):
        raise TextError(f"chat: expected {command.value} only with a chat template, got --plain")
    elif command is Command.REGEN:
        return _answer(turns, turns.again, args.stats)
    elif command is Command.SYSTEM:
        turns.go_on_with(rest or None)
    elif command is Command.HISTORY:
        for message in turns.conversation.messages:
            for line in f"{message['role']}: {text_of(message['content'])}".splitlines():
                say(line)
    elif command is Command.SAVE:
        saved = [{**m, "content": to_json(m["content"])} for m in turns.conversation.messages]
        _save(rest, {"model": name_of(args.model), "messages": saved})
    else:
        messages, pictures = _read(rest, image_limits(args))
        if pictures:
            require_tower(turns.lm)
        turns.conversation.messages[:] = messages
        also = f", {counted(pictures, 'picture')}" if pictures else ""
        say(f"read {counted(len(messages), 'message')}{also}")
    return True


def _show(turns: _Plain, file: str, args: argparse.Namespace) -> None:
    """Let the next message have the picture of a file; without one: none."""
    if file:
        require_tower(turns.lm)
        turns.show(read_picture(file, image_limits(args)))
        return
    say(f"left out: {counted(len(turns.waiting), 'picture')}")
    turns.waiting = []


def _save(file: str, body: dict[str, Any]) -> None:
    """Write a conversation into a new file, or in the place of an earlier one."""
    from bitnet_ops.formats.destination import file_kind, new_file

    earlier = file_kind("an earlier conversation", lambda head: b'"messages": [' in head)
    with new_file(Path(file).expanduser(), earlier, replace=True) as made:
        made.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    say(f"wrote {file}")


def _read(file: str, limits: ImageLimits) -> tuple[list[Mapping[str, Any]], int]:
    """The messages of a conversation that was saved, and how many pictures they have."""
    try:
        found = read_json_object(Path(file).expanduser(), limit=_MAX_SAVED)
    except BitNetError as error:
        raise TextError(f"chat: {error}") from None
    messages = found.get("messages")
    if not isinstance(messages, list):
        raise _no_messages(file)
    read = list[Mapping[str, Any]]()
    for i, m in enumerate(messages):
        content = None
        if isinstance(m, dict) and m.get("role") in _ROLES:
            where = f"{file}: messages[{i}]"
            content = from_json(m.get("content"), m["role"] == "user", limits, where)
        if content is None:
            raise _no_messages(file)
        read.append({"role": m["role"], "content": content})
    return read, sum(len(pictures_of(m["content"])) for m in read)


def _no_messages(file: str) -> TextError:
    return TextError(f"chat: expected messages with a role and a text in {file}, got others")


def _thoughts_apart(opening: str, pieces: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """An answer by pieces, each with whether it belongs to the thoughts that it begins with."""
    held, begins, thinking = opening, True, False
    for piece in pieces:
        held += piece
        if begins:
            begin = held.lstrip()
            if len(begin) < len(THINK) and THINK.startswith(begin):
                continue
            begins, thinking = False, begin.startswith(THINK)
        if thinking:
            thought, end, rest = held.partition(END_OF_THOUGHT)
            if not end:  # the end of the tag may come with the next piece
                lengths = range(1, len(END_OF_THOUGHT))
                begun = [n for n in lengths if held.endswith(END_OF_THOUGHT[:n])]
                at = len(held) - max(begun, default=0)
                yield held[:at], True
                held = held[at:]
                continue
            yield thought + end, True
            thinking, held = False, rest
        yield held, False
        held = ""
    yield held, thinking


def _answer(turns: _Plain, ask: Callable[[], Iterator[str]], stats: bool) -> bool:
    """Print the answer that `ask` begins; whether there was one.

    An error ends the turn, not the conversation.
    Ctrl-C stops the answer, which is kept as far as it came.
    """
    shown = False
    try:
        pieces = cast(Generator[str, None, None], ask())
        with contextlib.closing(pieces):
            for piece, thought in _thoughts_apart(turns.opening, pieces):
                print_text(piece, dim=thought)
                shown = True
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except ValueError as error:
        if shown:
            print_text("", end="\n")
        print_error(error)
        return False
    print_text("", end="\n")
    if (stream := turns.stream) is not None:
        print_logprobs(turns.lm, stream)
        ended = why_it_ended(turns.lm, stream, turns.options)
        if stats:
            say(f"{figures(stream)} | {ended}")
        elif stream.generation.finish_reason in ("length", "context"):
            say(f"({ended})")
        turns.head_noted = turns.head_noted or note_draft_head(turns.lm)
    return True
