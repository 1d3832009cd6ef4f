"""Prompt: the token ids of what a client asks, and the limits that the model sets to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.tokenizer import ChatTemplateError, TokenizerError
from bitnet_ops.server.catalog import Served, infill_ids
from bitnet_ops.server.exchange import Ask, AskError


def prompt_ids(served: Served, ask: Ask) -> list[int]:
    """The ids to run; raises AskError, 400, for what the model cannot read."""
    try:
        ids = _chat_ids(served, ask) if ask.messages is not None else _text_ids(served, ask)
    except ChatTemplateError as error:
        raise AskError(str(error), field="messages") from None
    except TokenizerError as error:
        raise AskError(str(error), field="prompt") from None
    context, vocabulary = served.context_length, served.lm.config.vocab_size
    if not ids:
        raise AskError("server: expected a prompt of at least one token, got none", field="prompt")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise AskError(
            f"server: expected token ids from 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}",
            field="prompt",
        )
    if len(ids) + (ask.max_tokens != 0) > context:
        raise AskError(
            f"server: expected a prompt shorter than the model's context of {context} tokens, got "
            f"{len(ids)}; shorten the conversation",
            field="messages" if ask.messages is not None else "prompt",
            code="context_length_exceeded",
        )
    return ids


def template_options(served: Served, ask: Ask) -> dict[str, Any]:
    """The variables of the chat template, as far as it reads them: others are ignored."""
    wanted: dict[str, Any] = {}
    if ask.thinking is not None:
        wanted["enable_thinking"] = ask.thinking
    if ask.effort is not None:
        wanted["reasoning_effort"] = ask.effort
    wanted.update(ask.template_options)
    template = served.chat_template or ""
    known = {n: v for n, v in wanted.items() if re.search(rf"\b{re.escape(n)}\b", template)}
    return {n: v for n, v in known.items() if n not in ("messages", "add_generation_prompt")}


def _chat_ids(served: Served, ask: Ask) -> list[int]:
    messages: list[Mapping[str, Any]] = list(ask.messages or ())
    return served.lm.tokenizer.encode_chat(
        messages, chat_template_kwargs=template_options(served, ask)
    )


def _text_ids(served: Served, ask: Ask) -> list[int]:
    prompt = ask.prompt if ask.prompt is not None else ""
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = served.lm.tokenizer
    if not ask.suffix:
        ids = tokenizer.encode(prompt)
        start = served.lm.config.bos_token_id
        return ids or ([start] if start is not None else [])
    parts = infill_ids(served.lm)
    if parts is None:
        raise AskError(
            f"server: expected suffix for a model that fills in, got {served.name}, whose "
            "vocabulary has no tokens for it; leave it out",
            field="suffix",
        )
    prefix, suffix, middle = parts
    before = tokenizer.encode(prompt, add_special_tokens=False)
    behind = tokenizer.encode(ask.suffix, add_special_tokens=False)
    return [prefix, *before, suffix, *behind, middle]


def as_ask_error(error: BaseException) -> AskError:
    """What a client is told of an error of the engine's."""
    if isinstance(error, AskError):
        return error
    if isinstance(error, BitNetError | ValueError | TypeError):
        return AskError(str(error))
    return AskError("server: the model failed; see the server's log", status=500, code="internal")
