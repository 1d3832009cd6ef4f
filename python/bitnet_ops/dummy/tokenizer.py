"""The tokenizer of a synthetic model: one id a byte, and words for the ids that are left over.

So `generate`, `chat` and `embed` run on it as on a real model. Reading takes as many tokens as the
text has bytes; what the model writes are mostly words such as "w4711".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bitnet_ops.generate.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from bitnet_ops.vision.config import IMAGE_TOKENS
from bitnet_ops.vision.weights import vision_config

_BOS, _EOS = "<s>", "</s>"
# the form of BitNet 2B-4T's: the role, the message, the end of the turn
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


# of a model that reads images, whose messages are lists of parts
_PARTS = (
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
)


def build(config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer for a config's vocab_size, bos_token_id and eos_token_id.

    Of a model that reads images with the tokens of images too.

    Raises ValueError for a vocabulary that has no room for 256 bytes and the two.
    """
    size, bos, eos = (config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(letters) + 2:
        raise ValueError(f"dummy: expected a vocab_size of at least 258, got {size}")
    words = iter([*letters, *(f"\u0120w{i}" for i in range(size))])  # \u0120 is a space
    special = {bos: _BOS, eos: _EOS}
    if (vision := vision_config(config)) is not None:
        ids = vision.image_token_id, vision.vision_start_token_id, vision.vision_end_token_id
        special |= dict(zip(ids, IMAGE_TOKENS, strict=True))
    vocabulary = {special.get(i) or next(words): i for i in range(size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special.values()])
    return tokenizer


def write(folder: Path, config: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, with a chat template, into `folder`."""
    build(config).save(str(folder / TOKENIZER_FILE))
    template = _TEMPLATE
    if vision_config(config) is not None:
        template = template.replace("{{ m['content'] | trim }}", _PARTS)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    text = json.dumps(about, indent=1)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
