"""Prompt: the token ids of what a client asks, and the limits that the model sets to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_ops.generate.given_text import ChatText
from bitnet_ops.generate.images import NO_TOWER
from bitnet_ops.generate.pictures import Picture, PictureMarks
from bitnet_ops.generate.prompt import PromptRows
from bitnet_ops.generate.tokenizer import (
    ChatTemplateError,
    TextLengthError,
    Tokenizer,
    TokenizerError,
)
from bitnet_ops.server.catalog import Served, infill_ids
from bitnet_ops.server.exchange import Ask, AskError, remark
from bitnet_ops.server.placing import read_placed
from bitnet_ops.server.shape import AnswerShape
from bitnet_ops.vision.decode import ImageLimits
from bitnet_ops.vision.errors import ImageError
from bitnet_ops.vision.sources import image_bytes


@dataclass(frozen=True)
class Prompt:
    """ids: to count; text: the same as the chat template has written it, "" without one.

    shape: what the answers have to look like. pictures: those for which `short`, the ids too, has
    one padding token each, or their rows, where these are still known.
    """

    ids: list[int]
    text: str
    shape: AnswerShape
    pictures: Sequence[Picture | PromptRows] = ()
    short: Sequence[int] = ()


def make_prompt(served: Served, ask: Ask) -> Prompt:
    """The prompt of `ask`; raises AskError, 400, for what the model cannot read or follow.

    Pictures are decoded, to see whether they can be read, but no tower computes.
    """
    shape = AnswerShape(ask, served.lm.tokenizer, served.grammars)
    try:
        if ask.messages is not None:
            chat = read_chat(served, ask, shape, served.context_length)
            text, pictures, short = chat.text, chat.pictures, chat.ids()
        else:
            text, pictures, short = "", [], _text_ids(served, ask)
        ids = padded_ids(served, short, pictures)
        _check(served, ask, ids)
        images = served.lm.images
        known = [images.kept(one) or one for one in pictures] if images is not None else []
    except ChatTemplateError as error:
        raise AskError(str(error), field="messages") from None
    except TextLengthError as error:
        raise _too_long(served, ask, str(error).partition(", got ")[2]) from None
    except TokenizerError as error:
        raise AskError(str(error), field="prompt") from None
    except ImageError as error:
        raise picture_error(error) from None
    return Prompt(ids, text, shape, known, short)


def picture_error(error: ImageError) -> AskError:
    """The error of a picture, whose field is the part that it stood in."""
    return AskError(str(error), field=str(error).partition(": expected ")[0])


def _read_pictures(
    served: Served, marks: PictureMarks, messages: Sequence[Mapping[str, Any]], decode: bool
) -> None:
    """Read what pictures name, where the model reads any. Raises ImageError.

    decode: whether their pixels are looked at too, or their headers alone.
    """
    images = served.lm.images
    for message in messages:
        if message["role"] == "system" and (found := marks.found(message["content"])):
            expected = "pictures in messages of users, answers and tools"
            raise ImageError(expected, "one in a system message", "move it", found[0].where)
    if images is not None:
        _leave_out_old(marks, images.limits)
        images.limits.check_count(len(marks) - len(marks.remarks))

    def read(picture: Picture) -> bytes:
        try:
            if images is None:
                raise ImageError(*NO_TOWER)
            data = image_bytes(picture.source, served.sources, images.limits)
            (images.check if decode else images.grid)(Picture(data))
            return data
        except ImageError as error:
            raise error.at(picture.where) from None

    marks.read(read, lambda _: remark("image"), ImageError)


def _leave_out_old(marks: PictureMarks, limits: ImageLimits) -> None:
    """Have remarks in the place of a conversation's oldest pictures, where it has too many.

    It must go on, however many screenshots an agent has made. They are left out by half of what is
    allowed at once, so that the prompts of many turns begin alike, and are found in the cache.
    """
    maximum, count = limits.max_images, len(marks)
    if count <= maximum:
        return
    step = max(1, maximum // 2)
    old = [i for i, picture in enumerate(marks.pictures) if not picture.needed]
    for i in old[: -(-(count - maximum) // step) * step]:
        marks.remarks[i] = remark("image")


def padded_ids(served: Served, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
    """`Images.padded` of a prompt, which has no pictures where the model reads texts alone."""
    images = served.lm.images
    return images.padded(ids, pictures) if images is not None and pictures else ids


def read_chat(
    served: Served, ask: Ask, shape: AnswerShape, most_tokens: int, *, decode: bool = True
) -> ChatText:
    """The conversation through the chat template.

    most_tokens: where there are certainly more, TextLengthError is raised before the work. decode:
    whether pictures are decoded, which counting needs not. Raises ChatTemplateError,
    TokenizerError, ImageError.
    """
    options, images = template_options(served, ask), served.lm.images
    if ask.pictures is not None and len(ask.pictures):
        _read_pictures(served, ask.pictures, shape.messages, decode)

    def read(messages: Sequence[Mapping[str, Any]]) -> ChatText:
        return served.lm.tokenizer.read_chat(
            messages,
            tools=shape.tools,
            chat_template_kwargs=options,
            continue_final=ask.continues,
            most_tokens=most_tokens,
            pictures=ask.pictures,
            picture_ids=() if images is None else images.token_ids,
        )

    return read_placed(read, shape.messages)


def _check(served: Served, ask: Ask, ids: list[int]) -> None:
    context, vocabulary = served.context_length, served.lm.config.vocab_size
    if not ids:
        raise AskError("server: expected a prompt of at least one token, got none", field="prompt")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise AskError(
            f"server: expected token ids from 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}",
            field="prompt",
        )
    if len(ids) + (ask.max_tokens != 0) > context:
        raise _too_long(served, ask, f"{len(ids)}; shorten the conversation")


def _too_long(served: Served, ask: Ask, got: str) -> AskError:
    return AskError(
        "server: expected a prompt shorter than the model's context of "
        f"{served.context_length} tokens, got {got}",
        field="messages" if ask.messages is not None else "prompt",
        code="context_length_exceeded",
    )


def template_options(served: Served, ask: Ask) -> dict[str, Any]:
    """The variables of the chat template, as far as it reads them: others are ignored."""
    wanted: dict[str, Any] = {}
    if ask.thinking is not None:
        wanted = {"enable_thinking": ask.thinking, "thinking": ask.thinking}  # DeepSeek's name
    if ask.effort is not None and ask.thinking is not False:
        wanted["reasoning_effort"] = ask.effort
    wanted.update(ask.template_options)
    template = served.chat_template or ""
    known = {n: v for n, v in wanted.items() if re.search(rf"\b{re.escape(n)}\b", template)}
    return {n: v for n, v in known.items() if n not in ("messages", "add_generation_prompt")}


def _text_ids(served: Served, ask: Ask) -> list[int]:
    prompt = ask.prompt if ask.prompt is not None else ""
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = served.lm.tokenizer
    for text in (prompt, ask.suffix or ""):
        tokenizer.check_length(text, served.context_length)
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


def encode_within(
    tokenizer: Tokenizer, text: str | Sequence[int], maximum: int, truncate: bool
) -> list[int]:
    """The ids of a text with `maximum` at most; truncated, the first ids and the last one.

    Raises TextLengthError for one that certainly has more.
    """
    if not isinstance(text, str):
        ids = list(text)
    elif not truncate:
        tokenizer.check_length(text, maximum)
        ids = tokenizer.encode(text)
    else:
        ids = tokenizer.encode(tokenizer.shortened(text, maximum))
    return ids if len(ids) <= maximum or not truncate else [*ids[: maximum - 1], ids[-1]]
