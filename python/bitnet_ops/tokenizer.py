"""Text to token ids and back: tokenizer.json, chat templates, streaming detokenisation.

The Hugging Face `tokenizers` library does the work; a chat template, which comes from a checkpoint
and is therefore not trusted, runs in jinja2's immutable sandbox. Templates see what transformers
gives them. This module must not know models or engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class TokenizerError(ValueError):
    """A tokenizer that is missing or broken, or an id it does not have."""


class ChatTemplateError(ValueError):
    """A model without a chat template, or a template that refuses or breaks."""


class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its model.

    Args:
        backend: the `tokenizers.Tokenizer`.
        config: the parsed tokenizer_config.json (special tokens, chat_template); may be empty.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        self._backend = backend
        config = config or {}
        self.special_tokens = _special_tokens(config)
        self.chat_template = _default_template(config.get("chat_template"))

    @classmethod
    def from_dir(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja.

        Raises TokenizerError naming the file that is missing or broken.
        """
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(
                f"tokenizer: expected the file {path}, got none; copy tokenizer.json of the "
                "original checkpoint there, or give token ids instead of text"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"tokenizer: expected {path} to be readable, got: {error}"
            ) from None
        config = _read_json(folder / CONFIG_FILE)
        template = folder / TEMPLATE_FILE
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        return cls(backend, config)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in the text are read as such.

        `add_special_tokens` lets the tokenizer add those it was trained with, such as `<s>`.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            raise TokenizerError(f"tokenizer: expected text (str), got: {error}") from None

    def encode_from(self, text: str, start: int) -> list[int] | None:
        """The ids that `text` has from the character `start` on, without special tokens added.

        They are cut as the whole text is cut; None where a token lies across `start`, or behind it
        is none.
        """
        found = self._backend.encode(text, add_special_tokens=False)
        for i, (begin, _) in enumerate(found.offsets):
            if begin >= start:
                across = i > 0 and found.offsets[i - 1][1] > start
                return None if across else list(found.ids[i:])
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        An id above the vocabulary has no text (models may have more rows than the tokenizer).
        """
        try:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (TypeError, OverflowError) as error:
            raise TokenizerError(
                f"tokenizer: expected token ids at least 0, got: {error}"
            ) from None

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary entry of an id. Raises TokenizerError if there is none."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise TokenizerError(
                f"tokenizer: expected a token id from 0 to {self.vocab_size - 1}, got {token_id}; "
                "the tokenizer belongs to another model"
            )
        return str(token)

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None if there is none."""
        return self._backend.token_to_id(token)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, by the model's own template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], at least one.
            add_generation_prompt: end with what opens the assistant's answer.
        Raises ChatTemplateError if the model has no template, or the template fails or refuses.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "chat: expected a model with a chat template, got one without (no chat_template in "
                f"{CONFIG_FILE}, no {TEMPLATE_FILE}); it was not made for conversation: use plain "
                "continuation (generate, or chat --plain)"
            )
        _check_messages(messages)
        return _render(
            self.chat_template,
            messages=[dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens,
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of `render_chat(...)`; the template itself writes the special tokens."""
        text = self.render_chat(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


# Streaming -----------------------------------------------------------------------------------


class StreamDecoder:
    """Ids in, text out, one id at a time; never a part of a UTF-8 character.

    What `push` returned plus what `finish` returns is `decode` of all ids. Text is held back while
    it ends in U+FFFD, for that may be the beginning of a character whose other bytes are still to
    come.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []  # ids whose text is out; they decide about leading spaces
        self._pending: list[int] = []  # ids whose text is not

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._pending, self._skip)[len(before) :]

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" for a special token or a part of a character."""
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


# tokenizer_config.json -----------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"tokenizer: expected {path} to be JSON, got: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(
            f"tokenizer: expected {path} to hold an object, got {type(value).__name__}"
        )
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as strings; a token may be stored as an object with `content`."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
    found = {}
    for name in names:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _default_template(value: object) -> str | None:
    """The template, or the one named "default" of a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}
        if isinstance(named.get("default"), str):
            return str(named["default"])
    raise TokenizerError(
        "tokenizer: expected chat_template to be text, or a list with one named 'default', got "
        f"{str(value)[:80]}"
    )


# Chat templates ------------------------------------------------------------------------------


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise ChatTemplateError(
            "chat: expected messages as a list of {'role', 'content'}, at least one, got "
            f"{str(messages)[:80]!r}"
        )
    for m in messages:
        if not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or "content" not in m:
            raise ChatTemplateError(
                f"chat: expected every message to have 'role' and 'content', got {str(m)[:80]!r}"
            )


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here: its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _render(template: str, **variables: Any) -> str:
    try:
        return _environment().from_string(template).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"chat: expected a chat template that parses, got line {error.lineno}: {error.message}"
        ) from None
    except jinja2.TemplateError as error:  # raise_exception, the sandbox, an undefined name
        raise ChatTemplateError(f"chat: the model's chat template refuses: {error}") from None
    except Exception as error:  # a template is a program: anything may come out of it
        raise ChatTemplateError(
            f"chat: the model's chat template fails: {type(error).__name__}: {error}"
        ) from None
