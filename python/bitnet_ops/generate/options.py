"""The options of generation: their names and types for editors, their checks for everybody else.

Every method that generates takes these keywords. Ranges are checked by sampling and the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from bitnet_ops.generate.engine import Limits
from bitnet_ops.generate.sampling import SamplingParams
from bitnet_ops.generate.speculation import check_drafts


class GenerateOptions(TypedDict, total=False):
    """Keywords of LanguageModel.generate, stream, generate_batch and chat; all may be left out.

    max_new_tokens: 128; temperature: 0 (greedy); top_k: 0 (all); top_p: 1 (all); min_p: 0 (all);
    repetition_penalty: 1 (none); seed: None (a fresh one); frequency_penalty, presence_penalty: 0
    (none); logit_bias: None, or token id -> what is added; logprobs: None, or for how many of the
    most probable tokens the logarithms of probabilities are wanted beside the chosen one's: they
    are in Generation.logprobs. They are sampling.SamplingParams'.
    stop: texts that end the answer and are left out of it; ignore_eos: go on past the end of text.
    speculation: "off", or how many tokens a step may guess from what the text repeats and verify at
    once, or "auto": as many as make it faster on this machine. Tokens are the same.
    adapter: None, or the name of a LoRA adapter that the model has loaded.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    speculation: int | Literal["off", "auto"]
    adapter: str | None


NAMES = tuple(GenerateOptions.__annotations__)
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Request:
    """The options of one call, checked."""

    params: SamplingParams
    limits: Limits
    stop: tuple[str, ...] = ()
    max_drafts: int | Literal["auto"] = 0
    adapter: str | None = None


def request(call: str, options: Mapping[str, Any], stop_ids: frozenset[int]) -> Request:
    """The options of `call`, the method's name, checked; `stop_ids` end a text unless ignore_eos.

    Raises TypeError for an unknown name or a wrong kind of value, SamplingError or ValueError for
    one out of range.
    """
    for name in options:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            remedy = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(
                f"{call}: expected options among {', '.join(NAMES)}, got {name}{remedy}"
            )
    params = SamplingParams(**{name: options[name] for name in _SAMPLING if name in options})
    ignore_eos = options.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise TypeError(f"{call}: expected ignore_eos True or False, got {ignore_eos!r}")
    limits = Limits(
        options.get("max_new_tokens", Limits.max_new_tokens),
        frozenset() if ignore_eos else stop_ids,
    )
    speculation = options.get("speculation", "off")
    if speculation == "off":
        speculation = 0
    check_drafts(speculation, f'{call}: expected speculation "off",')
    adapter = options.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise TypeError(f"{call}: expected adapter as a name or None, got {adapter!r}")
    stop = _stop_texts(call, options.get("stop", ()))
    return Request(params, limits, stop, speculation, adapter)


def _stop_texts(call: str, stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(s, str) for s in texts):
        raise TypeError(f"{call}: expected stop as a text or a list of texts, got {stop!r}")
    if not all(texts):
        raise ValueError(f"{call}: expected stop to be non-empty texts, got {stop!r}")
    return tuple(texts)
