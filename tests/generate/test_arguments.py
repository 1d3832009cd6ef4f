"""Every argument of what people call gets every kind of value: taken, or refused at the call.

Signatures are enumerated: a new method needs a call here, a new argument a rule of what it takes.
What is refused raises one line; whatever is given, a request that runs beside it gets its tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitnet_ops import load
from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.engine import Engine, Event, Limits, SamplingParams, SchedulerOptions
from bitnet_ops.generate.text import OPTION_NAMES
from bitnet_ops.language_model import Conversation, LanguageModel
from counting_model import Counting, answers, drain, used
from isa_control import torch_threads


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # some of these are paths
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    """The demo model with a short context."""
    opened = load()
    model = opened.model
    model.config = dataclasses.replace(model.config, max_position_embeddings=48)
    return LanguageModel(model, opened.tokenizer)


class Named(Counting):
    """A model that a prefix cache on disk takes."""

    def identity(self, adapter: str | None) -> bytes:
        return b"counting"


def raises(event: Event) -> None:
    raise RuntimeError("a consumer's own")


NAN, INF = float("nan"), float("inf")
# Given to every argument, whatever it is for.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 10**400),
    *(0.5, -0.5, 1e-320, 1e300, NAN, INF, -INF, 1j),
    *("", "1", "auto", "off", "a\0b", "x" * 300, "\ud800", b"1", Path("a")),
    *([], [1], [2**70], ["1"], [[1]], (), (1, 2), {}, {1: 1.0}, {"1": 1}, {1}, range(3)),
    *(object(), object, Limits(2), SamplingParams(), SchedulerOptions(), raises, lambda: None),
    *(torch.tensor(1), torch.tensor([NAN]), torch.empty(0, dtype=torch.int64), torch.float16),
    *(np.int64(1), np.float32(0.5), np.arange(2), np.array([NAN])),
]

# What takes arguments -> how it is called with one of them. The last three need a model with text.
CALLS: dict[Any, Callable[..., Any]] = {
    Engine.__init__: lambda **given: alone(Engine(**{"model": Named(), **given})),
    SchedulerOptions.__init__: lambda **given: alone(
        Engine(Named(), scheduling=SchedulerOptions(**given))
    ),
    Engine.add: lambda engine, **given: engine.add(
        **{"prompt": [7], "limits": Limits(3), "consumer": None, **given}
    ),
    Limits.__init__: lambda engine, **given: engine.add([7], limits=Limits(**{**SHORT, **given})),
    SamplingParams.__init__: lambda engine, **given: engine.add(
        [7], SamplingParams(**{"temperature": 1.0, **given}), Limits(3)
    ),
    Engine.start: lambda engine, **given: list(
        engine.start(**{"prompts": [[7]], "limits": Limits(3), **given})
    ),
    Engine.generate: lambda engine, **given: engine.generate(
        **{"prompts": [[7]], "limits": Limits(3), **given}
    ),
    Engine.abort: lambda engine, id: engine.abort(id) and id,
    Engine.close: lambda engine, seconds: engine.close(seconds),
    load: lambda **given: load(**given),
    LanguageModel.__init__: lambda lm, **given: LanguageModel(
        **{"model": lm.model, "tokenizer": lm.tokenizer, **given}
    ).engine.generate([[1]], None, Limits(1)),
    LanguageModel.add_adapter: lambda lm, **given: lm.add_adapter(
        **{"name": "a", "folder": "nowhere", **given}
    ),
    LanguageModel.remove_adapter: lambda lm, name: lm.remove_adapter(name),
    LanguageModel.encode: lambda lm, prompt: lm.encode(prompt),
    LanguageModel.generate: lambda lm, **given: lm.generate(**{**TEXT, **given}),
    LanguageModel.stream: lambda lm, **given: lm.stream(**{**TEXT, **given}).read(),
    LanguageModel.generate_batch: lambda lm, **given: lm.generate_batch(
        **{"prompts": ["In"], "max_new_tokens": 2, **given}
    ),
    LanguageModel.embed: lambda lm, **given: lm.embed(**{"texts": ["In"], **given}),
    LanguageModel.score: lambda lm, **given: lm.score(**{"texts": ["In"], **given}),
    LanguageModel.chat: lambda lm, **given: lm.chat(**given),
    LanguageModel.image: lambda lm, source: lm.image(source),
    Conversation.say: lambda lm, **given: list(
        lm.chat(max_new_tokens=2).say(**{"content": "In", **given})
    ),
    Conversation.set_system: lambda lm, content: lm.chat().set_system(content),
}
SHORT, TEXT = {"max_new_tokens": 3}, {"prompt": "In", "max_new_tokens": 2}


def alone(engine: Engine) -> None:
    """What was taken works."""
    assert engine.generate([[1]], limits=Limits(3))[0].token_ids == [2, 3, 4]


# What each takes: by its name, and by its call's where names mean several things -----------------


def integer(minimum: int, maximum: float = INF) -> Callable[[Any], bool]:
    return lambda v: type(v) is int and minimum <= v <= maximum


def number(minimum: float, maximum: float = 1.7976931348623157e308) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and minimum <= v <= maximum


def real(minimum: float, maximum: float) -> Callable[[Any], bool]:
    """Numbers of NumPy too."""
    return lambda v: number(minimum, maximum)(v.item() if isinstance(v, np.number) else v)


def among(*values: Any) -> Callable[[Any], bool]:
    return lambda v: any(type(v) is type(one) and repr(v) == repr(one) for one in values)


def path(v: Any) -> bool:
    return isinstance(v, Path) or (isinstance(v, str) and v not in ("", "a\0b", "\ud800"))


def nothing(v: Any) -> bool:
    return v is None


def never(v: Any) -> bool:
    return False


def either(*rules: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: any(rule(v) for rule in rules)


def kind(*classes: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, classes)


EMPTY = torch.empty(0, dtype=torch.int64)
IDS = [1], (1, 2), range(3), np.arange(2)  # prompts that can be run
TEXTS = "", "1", "auto", "off", "a\0b"
LISTS = ["1"], [[1]]
TAKES: dict[str, Callable[[Any], bool]] = {
    "Engine.abort.id": integer(0),
    "activation_format": among("auto"),
    "activation_sparsity": either(nothing, among("auto")),
    "attention": nothing,
    "adapter": nothing,
    "Engine.add.constraint": nothing,
    "constraints": nothing,
    "Engine.add.consumer": either(nothing, callable),
    "Engine.add.prompt": among(*IDS),
    "block_size": integer(1, 2**16),
    "cache": either(nothing, path),
    "chat_template_kwargs": either(nothing, kind(Mapping)),
    "checkpoint_tokens": integer(1),
    "Engine.close.seconds": real(0, 1e308),
    "content": among(*TEXTS),
    "Conversation.set_system.content": either(nothing, kind(str)),
    "system": either(nothing, kind(str)),
    "convert": kind(bool),
    "dimensions": either(nothing, integer(1, 256)),
    "dtype": never,
    "LanguageModel.embed.texts": among(*TEXTS, [], (), *LISTS),
    "LanguageModel.encode.prompt": among(*TEXTS, "x" * 300, *IDS, [], (), [2**70], EMPTY),
    "folder": never,
    "frequency_penalty": number(-2, 2),
    "generation": nothing,
    "head_format": never,
    "draft": kind(bool),
    "ignore_eos": kind(bool),
    "image_limits": nothing,
    "images": among([], ()),
    "json_schema": among(None, {}, {1: 1.0}, {"1": 1}),
    "keep_prefix": kind(bool),
    "kv_cache_mb": either(nothing, real(0.1, 2**26)),
    "kv_dtype": lambda v: v is torch.float16,
    "limits": kind(Limits, type(None)),
    "logit_bias": among(None, {}, {1: 1.0}),
    "logprobs": either(nothing, integer(0, 20)),
    "lora": among(None, {}),
    "max_drafts": either(integer(0), among("auto", "ngram", "off", None)),
    "max_new_tokens": integer(0),
    "max_sequences": integer(1, 256),
    "min_p": number(0, 1),
    "mmproj": nothing,
    "model": never,
    "name": never,
    "params": kind(SamplingParams, type(None)),
    "path": either(nothing, path),
    "load.path": nothing,
    "prefill_beside_decode": either(nothing, integer(1)),
    "prefill_chunk": integer(1),
    "prefix_cache": kind(bool),
    "prefix_cache_mb": either(nothing, real(0, 2**26)),
    "prefix_dir": either(nothing, path),
    "prefix_dir_mb": real(1e-320, 2**26),
    "presence_penalty": number(-2, 2),
    "prompt": among(*TEXTS, *IDS),
    "prompts": among([[1]]),
    "LanguageModel.generate_batch.prompts": among(*LISTS),
    "repetition_penalty": number(2**-126, 2**127),
    "scheduling": kind(SchedulerOptions, type(None)),
    "LanguageModel.score.texts": among(*TEXTS, [], (), *LISTS),
    "seed": either(nothing, integer(0, 2**63 - 1)),
    "source": never,  # the demo model reads texts alone
    "speculation": either(integer(0), among("auto", "ngram", "off", None)),
    "stop": among(*TEXTS[1:], "x" * 300, "\ud800", [], ["1"], ()),
    "stop_ids": among(*IDS, [], [2**70], (), {}, {1: 1.0}, {1}, EMPTY),
    "LanguageModel.stop_ids": among(None, *IDS, [], [2**70], (), {}, {1: 1.0}, {1}, EMPTY),
    "temperature": number(0),
    "token_budget": integer(64),
    "tokenizer": nothing,
    "top_k": integer(0, 2**31 - 1),
    "top_p": number(1e-320, 1),
    "vision": kind(bool),
    "watermark": real(0, 0.99),
    "use": never,
    "weight_format": among("auto"),
}


def parameters() -> Iterator[Any]:
    """Of every call: its arguments, each option of **options among them."""
    for call in CALLS:
        for name, parameter in inspect.signature(call).parameters.items():
            expanded = OPTION_NAMES if parameter.kind is parameter.VAR_KEYWORD else (name,)
            for each in expanded:
                if each != "self":
                    yield pytest.param(call, each, id=f"{call.__qualname__}-{each}")


def test_every_method_has_a_call() -> None:
    for cls in (Engine, LanguageModel, Conversation):
        for name, value in vars(cls).items():
            function = inspect.unwrap(value) if inspect.isfunction(value) else None
            if function is None or name.startswith("_"):
                continue
            takes = set(inspect.signature(function).parameters) - {"self"}
            assert value in CALLS or not takes, f"{cls.__name__}.{name}"


@pytest.mark.parametrize(("call", "name"), list(parameters()))
def test_a_value_is_taken_or_refused_in_one_line_and_disturbs_nobody(
    call: Any, name: str, lm: LanguageModel
) -> None:
    takes = TAKES.get(f"{call.__qualname__.removesuffix('.__init__')}.{name}") or TAKES[name]
    shared = inspect.signature(CALLS[call]).parameters.keys() & {"engine", "lm"}
    engine = lm.engine if "lm" in shared else Engine(Counting())
    target = [lm] if "lm" in shared else [engine] if shared else []
    expected = engine.generate([[1]], limits=Limits(36))[0].token_ids
    plain = engine.add([1], limits=Limits(36))
    engine.step()
    for value in ODD:
        if call is Engine.abort and type(value) is int and value == plain:
            continue
        try:
            CALLS[call](*target, **{name: value})
            taken = True
        except (BitNetError, TypeError, ValueError) as error:
            message, taken = str(error), False
            assert "expected" in message and "\n" not in message, (value, message)
            assert len(message) < 600, (value, message)
        assert taken == takes(value), value
    tokens, ending = answers(drain(engine))[plain]
    assert ending == "length" and tokens in (expected, expected[1:])
    assert used(engine) == 0
