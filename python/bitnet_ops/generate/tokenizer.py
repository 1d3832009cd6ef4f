"""Text to token ids and back: tokenizer.json, special tokens, the chat template.

The Hugging Face `tokenizers` library does the work. What a checkpoint brings is not trusted: chat
templates run in a process with limits (chat.py), and a tokenizer whose regular expressions may not
end is rejected (tokenizer_guard.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bitnet_ops.generate import chat
from bitnet_ops.generate.chat import ChatTemplateError
from bitnet_ops.generate.given_text import ChatText, GivenText
from bitnet_ops.generate.pictures import PictureMarks
from bitnet_ops.generate.tokenizer_guard import (
    MAX_BYTES,
    MAX_TOKEN,
    TextLengthError,
    TokenizerError,
    bytes_of_token,
    check_backend,
    encoding,
    library_errors,
    max_bytes_of_token,
)
from bitnet_ops.untrusted import UntrustedFileError, read_json_object, read_text

__all__ = ["ChatTemplateError", "TextLengthError", "Tokenizer", "TokenizerError"]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# Tokens that end a turn or a text in every published vocabulary that has them, by their text, since
# files often name one end of several. After llama.cpp's list in `llama-vocab.cpp`.
END_TOKENS = frozenset(
    """<|eot_id|> <|eom_id|> <|eot|> <|eom|> <|im_end|> <|end|> <|return|> <|call|> <|endoftext|>
    <|end_of_text|> <|end_of_turn|> <|turn_end|> <|eos|> <end_of_turn> <turn|> <end_of_utterance>
    <EOT> _<EOT> [EOT] [EOS] <\uff5cend\u2581of\u2581sentence\uff5c>""".split()
)
_PIECE = 1 << 18  # characters that are read at once in order to know whether a text is too long
_QUESTION, _ANSWER = "What is it?", "It is a lighthouse."


class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its model.

    Args:
        backend: the `tokenizers.Tokenizer`.
        config: the parsed tokenizer_config.json (special tokens, chat_template); may be empty.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        self._backend = backend
        try:
            check_backend(backend)
        except ValueError as error:
            raise TokenizerError(
                f"tokenizer: expected {error}; tokenizer.json is broken or hostile: take that of "
                "the original checkpoint, or give token ids instead of text"
            ) from None
        config = config or {}
        _add_declared(backend, config)
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
        if path.stat().st_size > MAX_BYTES:
            raise TokenizerError(
                f"tokenizer: expected {path} below {MAX_BYTES >> 20} MiB, got more"
            )
        with library_errors(f"{path} to be readable"):
            backend = Backend.from_file(str(path))
            # as transformers: a prompt is never cut or filled up because a file says so
            backend.no_truncation()
            backend.no_padding()
        file, template = folder / CONFIG_FILE, folder / TEMPLATE_FILE
        try:
            config = read_json_object(file) if file.is_file() else {}
            if template.is_file():
                config["chat_template"] = read_text(template)
        except UntrustedFileError as error:
            raise TokenizerError(f"tokenizer: {error}; repair or remove it") from None
        return cls(backend, config)

    @property
    def backend(self) -> Backend:
        """The checked `tokenizers.Tokenizer`, with the tokens that tokenizer_config.json adds."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in the text are read as such.

        `add_special_tokens` lets the tokenizer add those it was trained with, such as `<s>`.
        """
        return list(encoding(self._backend, text, add_special_tokens).ids)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text`, in which special tokens written out are plain text."""
        with library_errors("text (str)"):
            return self._given_text.encode(text)

    def check_length(self, text: str, most: int) -> None:
        """Raise TextLengthError for a text that certainly has more than `most` tokens.

        By its length alone, or by counting pieces of it, so that reading it whole takes memory for
        some times `most` tokens.
        """
        size = len(text.encode("utf-8", "surrogatepass"))
        if size <= most * self._bytes_a_token:
            found, starts = 0, range(0, len(text) if len(text) > _PIECE else 0, _PIECE)
            while starts and found <= 2 * most:  # pieces have some more than the whole
                found += len(encoding(self._backend, text[starts[0] : starts[0] + _PIECE], False))
                starts = starts[1:]
            if found <= 2 * most:
                return
        raise TextLengthError(
            f"tokenizer: expected a text of at most {most} tokens, got {size:,} bytes, which are "
            "more; shorten it"
        )

    def shortened(self, text: str, most: int) -> str:
        """`text` without its middle, if its first `most` tokens and its last one stay the same."""
        ends = 2 * max(_PIECE, most * self._bytes_a_token)  # characters
        return text if len(text) <= 2 * ends else text[:ends] + text[-ends:]

    @cached_property
    def _bytes_a_token(self) -> int:
        return max_bytes_of_token(self._backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        An id above the vocabulary has no text (models may have more rows than the tokenizer).
        """
        with library_errors("token ids at least 0"):
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary entry of an id. Raises TokenizerError if there is none."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise TokenizerError(
                f"tokenizer: expected a token id from 0 to {self.vocab_size - 1}, got {token_id}; "
                "the tokenizer belongs to another model"
            )
        return str(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that a token stands for, which may be a part of a character's, and the space
        before a word; of a special token its name, of an id above the vocabulary nothing.

        All of a text's together are the text, but for a space that the tokenizer puts before it.
        """
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None or token_id in self._added:
            return (token or "").encode()
        return self._bytes_of(str(token))

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes]:
        return bytes_of_token(self._backend)

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None if there is none."""
        return self._backend.token_to_id(token)

    def ends(self) -> set[int]:
        """The ids that end a text by their names: eos_token, and those of END_TOKENS."""
        added = self._backend.get_added_tokens_decoder()
        found = {i for i, token in added.items() if token.content in END_TOKENS}
        eos = self.special_tokens.get("eos_token")
        if eos is not None and (token_id := self.token_id(eos)) is not None:
            found.add(token_id)
        return found

    def turn_end(self) -> int | None:
        """The token with which the chat template closes an answer; None where there is none."""
        messages = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text = self.render_chat(messages, add_generation_prompt=False)
        except ChatTemplateError:  # said where somebody wants to chat
            return None
        _, answered, tail = text.rpartition(_ANSWER)
        tail = tail.lstrip() if answered else ""
        added = {t.content: i for i, t in self._backend.get_added_tokens_decoder().items()}
        closing = [token for token in added if token and tail.startswith(token)]
        if not closing or (longest := max(closing, key=len)) == self.special_tokens.get(
            "bos_token"
        ):
            return None
        return added[longest]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, by the model's own template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], at least one. A content is a text, or a
                list of {"type": "text", "text": ...}, whose texts become one, a line each. With
                "tool_calls" it may be missing; their arguments are objects.
            add_generation_prompt: end with what opens the assistant's answer.
            tools: [{"type": "function", "function": {"name", "description", "parameters"}}, ...].
            chat_template_kwargs: options of this template, such as {"enable_thinking": False}.
        Raises ChatTemplateError if the model has no template, or the template fails, rejects, or
        knows no such option, or no tools.
        """
        template, given = self._given(messages, tools, chat_template_kwargs)
        return self._render(template, given, add_generation_prompt)

    def read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        most_tokens: int | None = None,
        pictures: PictureMarks | None = None,
        picture_ids: Sequence[int] = (),
    ) -> ChatText:
        """The text of `render_chat(...)`, which knows its ids.

        The special tokens among them are those that the template writes: where one is written out
        in what is given, in any text of it, it is read as plain text. continue_final: the text ends
        with that of the last message, which an answer is to continue. `most_tokens`: raises
        TextLengthError, before the work, where there are certainly more. `pictures`: those whose
        marks stand in messages, each of which becomes the tokens `picture_ids`.
        """
        template, given = self._given(messages, tools, chat_template_kwargs)

        def check(text: str) -> None:
            if most_tokens is not None:
                self.check_length(text, most_tokens)

        for message in given["messages"]:  # what a template says again, it says whole
            check(message["content"] or "")
        end = ""
        if continue_final:
            *before, last = given["messages"]
            end, add_generation_prompt = f"END{secrets.token_hex(16)}", False
            given["messages"] = [*before, {**last, "content": f"{last['content'] or ''}{end}"}]
        found = self._given_text.mark(template, given)
        marked, marks = found or (given, None)
        text = self._render(template, marked, add_generation_prompt)
        if end:
            text, known, _ = text.rpartition(end)
            if not known:
                raise ChatTemplateError(
                    "chat: expected a chat template that writes the last message as it is, to "
                    "continue it, got one that does not; end with a message of the user"
                )
        found_pictures = []
        if pictures is not None and len(pictures):
            found_pictures = pictures.found(text)
            text = pictures.without(text, "".join(map(self.id_to_token, picture_ids)))
        check(text if marks is None else marks.take_back(text))
        if marks is None:
            result = ChatText(text, self._backend)
        else:
            result = self._given_text.read(text, marks)
        result.pictures = found_pictures
        return result

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of `read_chat(...)`: only the template itself writes special tokens."""
        return self.read_chat(
            messages, add_generation_prompt, tools=tools, chat_template_kwargs=chat_template_kwargs
        ).ids()

    def _given(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, Any]]:
        """The template, and what it is given, checked."""
        if self.chat_template is None:
            raise ChatTemplateError(
                "chat: expected a model with a chat template, got one without (no chat_template in "
                f"{CONFIG_FILE}, no {TEMPLATE_FILE}); it was not made for conversation: use plain "
                "continuation (generate, or chat --plain)"
            )
        checked, options = _checked_messages(messages), {} if options is None else options
        chat.check(self.chat_template, checked, options, tools)
        return self.chat_template, {"messages": checked, "tools": tools, "options": options}

    def _render(self, template: str, given: Mapping[str, Any], prompt: bool) -> str:
        messages, options, tools = given["messages"], given["options"], given["tools"]
        return chat.render(template, messages, prompt, self.special_tokens, options, tools)

    @cached_property
    def _given_text(self) -> GivenText:
        return GivenText(self._backend, END_TOKENS)


# tokenizer_config.json -----------------------------------------------------------------------


_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _add_declared(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json declares, in the order of transformers.

    Their ids follow those of the vocabulary; a token that has an id keeps it.
    """
    table = config.get("added_tokens_decoder") or {}
    declared = []
    if isinstance(table, Mapping):
        numbered = [(i, entry) for i, entry in table.items() if str(i).isdecimal()]
        declared += [entry for _, entry in sorted(numbered, key=lambda pair: int(pair[0]))]
    special = [config.get(name) for name in (*_SPECIAL, "mask_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name) or []
        special += more.values() if isinstance(more, Mapping) else more
    declared += [
        {**(entry if isinstance(entry, Mapping) else {"content": entry}), "special": True}
        for entry in special
    ]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = []
    for entry in declared:
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN or content in known:
            continue
        known.add(content)
        flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
        new.append(AddedToken(content, **flags))
    backend.add_tokens(new)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as strings; a token may be stored as an object with `content`."""
    found = {}
    for name in _SPECIAL:
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


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not messages:
        raise ChatTemplateError(
            "chat: expected messages as a list of {'role', 'content'}, at least one, got "
            f"{str(messages)[:80]!r}"
        )
    for m in messages:
        if not (
            isinstance(m, Mapping)
            and isinstance(m.get("role"), str)
            and ("content" in m or m.get("tool_calls"))
        ):
            raise ChatTemplateError(
                f"chat: expected every message to have 'role' and 'content', got {str(m)[:80]!r}"
            )
    return [{**m, "content": _content(m)} for m in messages]


def _content(message: Mapping[str, Any]) -> str | None:
    """The text of a message; none where it calls tools instead."""
    content: Any = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise ChatTemplateError(
                "chat: expected a content as a text, or a list of {'type': 'text', 'text': ...}, "
                f"got {str(part)[:80]!r}; models here read texts alone"
            )
        texts.append(text)
    return "\n".join(texts)
