"""Whole models that read pictures: a tiny hybrid with its tower, bytes as tokens, a chat template.

    write_checkpoint(folder)           as published, with tokenizer and template
    write_gguf(folder)                 the same as a GGUF file, with an mmproj file beside it
    write_model(folder)                the folder of the converted model; seeing_lm: loaded
    rendered([question("...")])        the text of a conversation, as the template writes it
    prompt(folder, text, [file])       ids and rows of a text with <|image_pad|> for each picture,
                                       by tokenizers, transformers' processor and the tower alone

Texts of these models are noise, but other noise for every other picture.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import bitnet_ops
import hybrids
import towers
from bitnet_ops.convert import convert
from bitnet_ops.generate.images import tower_dtype
from bitnet_ops.generate.prompt import PromptRows
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.vision.weights import load_tower
from chat_templates import QWEN35
from gguf_bytes import key

MADE = hybrids.make("plain-tied", layers=4)
TOWER = hybrids.tower_sizes(MADE)
VOCAB = MADE.sizes.vocab
PAD, START, END = VOCAB - 5, VOCAB - 8, VOCAB - 7
# special tokens: those of images where hybrids.py has them, the end of a turn where a text ends
SPECIAL = {START: "<|vision_start|>", END: "<|vision_end|>", VOCAB - 6: "<|video_pad|>",
           PAD: "<|image_pad|>", VOCAB - 3: "<|im_start|>", VOCAB - 2: "<|im_end|>"}  # fmt: skip
THOUGHTS = {VOCAB - 4: "<think>", VOCAB - 1: "</think>"}  # tokens, but no special ones
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# Qwen 3.5's way with pictures in user's messages and tools' answers.
TEMPLATE = QWEN35.replace(
    "{%- else %}{{- raise_exception('no such part in ' ~ role) }}",
    "{%- elif 'image' in part or 'image_url' in part or part.type == 'image' %}"
    "{%- if role == 'system' %}{{- raise_exception('System message cannot contain images.') }}"
    "{%- endif %}{{- '" + PICTURE + "' }}"
    "{%- else %}{{- raise_exception('no such part in ' ~ role) }}",
)  # fmt: skip


def words() -> list[str]:
    """The token of every id: the 256 bytes, some words, the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = iter([*letters, *(f"\u0120w{i}" for i in range(VOCAB))])
    named = SPECIAL | THOUGHTS
    return [named.get(i) or next(plain) for i in range(VOCAB)]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL.values()])
    made.add_tokens([AddedToken(t, normalized=False) for t in THOUGHTS.values()])
    return made


def write_tokenizer(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def write_checkpoint(folder: Path, *, tower: bool = True) -> Path:
    """As it is published; without a tower: one that reads texts alone."""
    hybrids.write_unpacked(folder, MADE, nested=True, tower=TOWER if tower else None)
    write_tokenizer(folder)
    return folder


def write_gguf(folder: Path, *, mmproj: bool = True) -> Path:
    """The file of the model; its tower is in `mmproj-F16.gguf` beside it."""
    types = [3 if i in SPECIAL else 4 if i in THOUGHTS else 1 for i in range(VOCAB)]
    more = [
        key("tokenizer.ggml.model", "str", "gpt2"),
        key("tokenizer.ggml.pre", "str", "gpt-2"),
        key("tokenizer.ggml.tokens", "[str]", words()),
        key("tokenizer.ggml.token_type", "[i32]", types),
        key("tokenizer.ggml.merges", "[str]", []),
        key("tokenizer.chat_template", "str", TEMPLATE),
    ]
    file = hybrids.write_gguf(folder, MADE, more=more)
    if mmproj:
        towers.write_mmproj(folder / "mmproj-F16.gguf", TOWER, "F16")
    return file


def write_model(folder: Path, *, tower: bool = True) -> Path:
    """The model that it is converted to, `folder/model`."""
    convert(write_checkpoint(folder / "checkpoint", tower=tower), folder / "model")
    return folder / "model"


def seeing_lm(folder: Path, *, tower: bool = True, **options: Any) -> LanguageModel:
    """It loaded; options: of load."""
    return bitnet_ops.load(write_model(folder, tower=tower), **options)


# The oracle ---------------------------------------------------------------------------------------


def rendered(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """What the template makes of messages whose pictures are parts {"type": "image"}."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    options = {"add_generation_prompt": True, **options}
    return environment.from_string(TEMPLATE).render(messages=messages, **options)


def question(text: str, pictures: int = 1) -> dict[str, Any]:
    """A user's message with pictures before its text."""
    parts = [{"type": "image"}] * pictures
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def file_pixels(file: bytes, max_tokens: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """[patches, 768] and the grid of a picture, by transformers' processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    size = {"shortest_edge": 65_536, "longest_edge": max_tokens * 1024}
    processor = Qwen2VLImageProcessorPil(
        size=size, patch_size=16, merge_size=2, temporal_patch_size=2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    image = Image.open(io.BytesIO(file)).convert("RGB")
    found = processor(images=image, return_tensors="pt")
    rows, columns = found["image_grid_thw"][0, 1:].tolist()
    once = found["pixel_values"].view(-1, 3, 2, 256)[:, :, 0].reshape(-1, 768)
    return once, (rows, columns)


def rows_of(folder: Path, file: bytes, max_tokens: int = 1024) -> PromptRows:
    """What stands in a prompt for a picture, without `bitnet_ops.generate.images`."""
    tower = load_tower(folder, tower_dtype())
    assert tower is not None
    pixels, grid = file_pixels(file, max_tokens)
    with torch.inference_mode():
        rows = tower(pixels, [grid])[0]
    return PromptRows(rows, PAD, None, (grid[0] // 2, grid[1] // 2))


def prompt(
    folder: Path, text: str, pictures: Sequence[bytes], max_tokens: int = 1024
) -> list[int | PromptRows]:
    """The ids of `text`, the padding tokens in it being `pictures`."""
    rest = [rows_of(folder, file, max_tokens) for file in pictures]
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    assert ids.count(PAD) == len(rest)
    found = iter(rest)
    return [next(found) if i == PAD else i for i in ids]
