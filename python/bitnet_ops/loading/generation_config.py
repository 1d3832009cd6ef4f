"""generation_config.json: which ids end a text, and how the makers of a model sample from it.

A file often names one end of several: the usual fine-tuning changes the tokenizer's alone, and GGUF
files have keys for three. Whatever the tokenizer or the chat template ends a turn with ends a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.sampling import SamplingError, SamplingParams
from bitnet_ops.generate.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerError
from bitnet_ops.loading.resolve import LoadError
from bitnet_ops.untrusted import UntrustedFileError, printable, read_json_object

GENERATION_CONFIG = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Nothing of how a token is chosen: ids, and the work of other libraries.
_OTHERS = frozenset(
    """do_sample bos_token_id eos_token_id pad_token_id decoder_start_token_id transformers_version
    _from_model_config use_cache cache_implementation return_dict_in_generate output_scores
    output_logits output_attentions output_hidden_states trust_remote_code max_length chat_format
    renormalize_logits remove_invalid_values""".split()
)


@dataclass(frozen=True)
class GenerationConfig:
    """What the file says.

    stop_ids: that end a text. sampling: the options of `LanguageModel.generate` that it asks for,
    where they differ from the neutral ones. ignored: its other settings, as text, that would choose
    tokens otherwise.
    """

    stop_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def read_generation_config(
    folder: Path, model: ModelConfig, tokenizer: Tokenizer | None
) -> GenerationConfig:
    """The file in `folder`, if any, with the ends that the config and the tokenizer know."""
    settings = _settings(folder)
    ids = frozenset(_stated_ids(settings, folder, model))
    if tokenizer is not None:
        ids |= {i for i in tokenizer.ends() if i < model.vocab_size}
    sampling, ignored = _sampling(settings)
    return GenerationConfig(ids, sampling, ignored)


def stated_ends(folder: Path, model: ModelConfig) -> list[int]:
    """The ends that generation_config.json or else the config names, in their order."""
    return _stated_ids(_settings(folder), folder, model)


def complete_ends(folder: Path, model: ModelConfig) -> list[str]:
    """Write every end that the tokenizer and its chat template know into the file in `folder`.

    Returns a remark for each that was not there: other programs read this file alone.
    """
    if model.embedding_only or not (folder / TOKENIZER_FILE).is_file():
        return []
    try:
        tokenizer = Tokenizer.from_dir(folder)
    except TokenizerError:  # whoever loads the model is told
        return []
    ends = tokenizer.ends()
    if (closing := tokenizer.turn_end()) is not None:
        ends.add(closing)
    settings = _settings(folder)
    known = _stated_ids(settings, folder, model)
    new = sorted(i for i in ends.difference(known) if i < model.vocab_size)
    if not new:
        return []
    settings["eos_token_id"] = [*known, *new]
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")
    return [
        f"{printable(tokenizer.id_to_token(i))} ({i}) ends a text too: the tokenizer or its chat "
        "template ends turns with it, though eos_token_id does not name it"
        for i in new
    ]


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except UntrustedFileError as error:
        raise LoadError(f"load: {error}; repair or remove it") from None


def _stated_ids(settings: Mapping[str, Any], folder: Path, model: ModelConfig) -> list[int]:
    """eos ids of generation_config.json if it has any (as transformers), else the config's."""
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < model.vocab_size:
            raise LoadError(
                f"load: expected eos_token_id in {folder / GENERATION_CONFIG} to be ids below "
                f"vocab_size {model.vocab_size}, got {value!r}"
            )
    return list(dict.fromkeys(ids or model.eos_token_ids))


def _sampling(settings: Mapping[str, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
    """(options, other settings); without do_sample, transformers takes the penalty alone."""
    sampling, ignored = dict[str, float](), list[str]()
    neutral, samples = SamplingParams(), settings.get("do_sample") is True
    if samples and settings.get("temperature") is None:
        settings = {**settings, "temperature": 1.0}
    for name, value in settings.items():
        if name not in _SAMPLING:
            if name not in _OTHERS and value not in (None, False, 0, 1, [], {}):
                ignored.append(f"{name} {value!r}")
        elif value is not None and (samples or name == "repetition_penalty"):
            try:
                SamplingParams(**{name: value})
            except SamplingError:
                ignored.append(f"{name} {value!r}")
            else:
                sampling[name] = value
    sampling = {name: v for name, v in sampling.items() if v != getattr(neutral, name)}
    return sampling, tuple(printable(text)[:60] for text in ignored)
