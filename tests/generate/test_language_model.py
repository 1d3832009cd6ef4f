"""load(): strict about every tensor and file. LanguageModel: text in, text out, stops, batches.

The files are written here, or are the demo model. What logits are right is test_model.py's matter.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import bitnet_ops
from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.convert import convert
from bitnet_ops.formats.sglbitnt import SglbitntError, Writer
from bitnet_ops.generate.draft_choice import DraftHeadError
from bitnet_ops.generate.engine_thread import EngineThread
from bitnet_ops.generate.grammar import GrammarError
from bitnet_ops.generate.request import ClosedError
from bitnet_ops.generate.sampling import SamplingError
from bitnet_ops.generate.tokenizer import ChatTemplateError, TokenizerError
from bitnet_ops.language_model import DEMO_DIR, LanguageModel, LoadError, load
from bitnet_ops.models import TensorError, build
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.packing import PackedWeight, pack_ternary
from hf_writer import config_dict, make_network, write_tokenizer
from isa_control import torch_threads
from tiny_models import SMALL, config_of, random_ids, tensors_of, tiny_model

DEMO_SOURCE = Path(__file__).resolve().parents[1] / "data" / "demo-model"
FAMILY = SMALL["bitnet-offline-untied"]
NETWORK = make_network(FAMILY)
LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load()


def write_model(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None
) -> Path:
    config = {**(config or config_dict(FAMILY)), "bitnet_ops": {"format_version": 1}}
    folder.mkdir(exist_ok=True)
    with Writer(folder / "model.bin", config, len(tensors)) as writer:
        for name, tensor in tensors.items():
            if isinstance(tensor, PackedWeight):
                writer.add_packed(name, tensor.weight, tensor.scale, tensor.in_features)
            else:
                writer.add_dense(name, tensor)
    return folder


# The embedded demo ----------------------------------------------------------------------------


def test_reconverting_the_demo_gives_the_bytes_that_are_shipped(tmp_path: Path) -> None:
    """If this fails after a change of converter or version, convert again and commit the result.

    The demo is a file of version 1, so that reading those is proved by every use of it.
    """
    convert(DEMO_SOURCE, tmp_path / "demo", format_version=1)
    for name in ("model.bin", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "demo" / name).read_bytes() == (DEMO_DIR / name).read_bytes(), name


def test_five_lines() -> None:
    lm = bitnet_ops.load()
    text = lm.generate("And God said unto", max_new_tokens=8)
    assert text == " him, Thou art my servant, and"


def test_packed_weights_lie_in_one_stretch_of_memory(demo: LanguageModel) -> None:
    """And each has a storage of its own there: a shared one would be saved once for each."""
    layers = demo.model.model.layers
    weights = [b for b in layers.buffers() if b.dtype == torch.uint8]
    assert len(weights) == 7 * len(layers)
    end = max(w.data_ptr() + w.nbytes for w in weights)
    assert end - min(w.data_ptr() for w in weights) == sum(w.nbytes for w in weights)
    assert all(w.untyped_storage().data_ptr() == w.data_ptr() for w in weights)


@pytest.mark.parametrize(
    ("head_format", "dtypes"),
    [
        ("stored", (torch.bfloat16, None)),
        ("bf16", (torch.bfloat16, None)),
        ("float32", (torch.float32, None)),
        ("int8", (torch.int8, torch.float32)),
        ("int4", (torch.uint8, torch.bfloat16)),
    ],
)
def test_the_embedding_is_held_once_in_the_format_asked_for(head_format: str, dtypes: Any) -> None:
    state = load(head_format=head_format).model.state_dict()
    weight, scale = state["model.embed_tokens.weight"], state.get("model.embed_tokens.scale")
    assert (weight.dtype, None if scale is None else scale.dtype) == dtypes
    assert not any(name.startswith("lm_head") for name in state)


def test_the_head_is_int8_unless_asked_otherwise(demo: LanguageModel) -> None:
    assert demo.model.head.head_format == "int8"
    with pytest.raises(ValueError, match=r"head_format: expected one of int8, .*got 'int2'"):
        load(head_format="int2")


# Strict loading -------------------------------------------------------------------------------


def changed(**changes: Any) -> dict[str, Any]:
    """The network's tensors with some replaced, added, or (value ...) left out."""
    tensors = {**tensors_of(FAMILY, NETWORK), **changes}
    return {k: v for k, v in tensors.items() if v is not ...}


def zeros(*shape: int) -> PackedWeight:
    return pack_ternary(torch.zeros(shape, dtype=torch.int8))


REJECTED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a missing projection": (lambda: changed(**{LAYER: ...}), f"missing: {LAYER}"),
    "a missing gain": (lambda: changed(**{"model.norm.weight": ...}), "missing: model.norm.weight"),
    "a missing head": (lambda: changed(**{"lm_head.weight": ...}), "missing: lm_head.weight"),
    "a missing layer": (
        lambda: {k: v for k, v in changed().items() if ".layers.1." not in k},
        "missing: model.layers.1.input_layernorm.weight and 10 more",
    ),
    "an unknown tensor": (
        lambda: changed(**{"model.layers.2.extra": torch.ones(3)}),
        "unknown: model.layers.2.extra",
    ),
    "a leftover scale": (
        lambda: changed(**{LAYER + "_scale": torch.ones(1)}),
        f"{LAYER}_scale to repeat the scale",
    ),
    "rows too few": (lambda: changed(**{LAYER: zeros(252, 512)}), "256 rows, got 252"),
    "columns too many": (lambda: changed(**{LAYER: zeros(256, 640)}), LAYER),
    "a gain too long": (
        lambda: changed(**{"model.norm.weight": torch.ones(257)}),
        r"model.norm.weight \[256\], got \[257\]",
    ),
    "a gain of another rank": (
        lambda: changed(**{"model.norm.weight": torch.ones(1, 256)}),
        r"model.norm.weight \[256\], got \[1, 256\]",
    ),
    "a dense projection": (
        lambda: changed(**{LAYER: torch.ones(256, 512)}),
        f"expected {LAYER} ternary, got dense",
    ),
    "a packed gain": (lambda: changed(**{"model.norm.weight": zeros(256, 1)}), "model.norm.weight"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_k7_strict_loading(name: str, tmp_path: Path) -> None:
    """K7, K8: a missing, unknown or misshapen tensor stops the load; nothing gets a default."""
    make, message = REJECTED[name]
    folder = write_model(tmp_path, make())
    with pytest.raises((TensorError, SglbitntError), match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_k7_a_gain_that_is_not_finite_is_rejected(bad: float, tmp_path: Path) -> None:
    gain = torch.ones(256)
    gain[200] = bad
    tensors = changed(**{"model.norm.weight": gain})
    with pytest.raises(TensorError, match="model.norm.weight finite, got a NaN or an infinity"):
        build(config_of(FAMILY), tensors)
    with pytest.raises(SglbitntError, match="model.norm.weight"):
        write_model(tmp_path, tensors)


def test_integer_gains_are_rejected() -> None:
    tensors = changed(**{"model.norm.weight": torch.ones(256, dtype=torch.int32)})
    with pytest.raises(TensorError, match="model.norm.weight float32, bfloat16 or float16"):
        build(config_of(FAMILY), tensors)


def test_wrong_padding_codes_are_rejected(tmp_path: Path) -> None:
    """K = 192 leaves 64 padding codes in a row; a file that fills them is rejected."""
    family = SMALL["bitnet-odd-k"]
    tensors = tensors_of(family, make_network(family))
    name = "model.layers.0.self_attn.q_proj.weight"
    full = pack_ternary(torch.ones(192, 256, dtype=torch.int8))
    tensors[name] = PackedWeight(full.weight, full.scale, 192, 192)
    with pytest.raises(SglbitntError, match=name):
        load(write_model(tmp_path, tensors, config_dict(family)))


def test_unsupported_configs_are_rejected(tmp_path: Path) -> None:
    config = {**config_dict(FAMILY), "attention_bias": True}
    with pytest.raises(UnsupportedModelError, match="attention_bias"):
        load(write_model(tmp_path, changed(), config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_k8_dense_tensors_are_read_in_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """K8: whatever their dtype, dense tensors were copied as float32. Same values, same logits."""
    given = {k: v if isinstance(v, PackedWeight) else v.to(dtype) for k, v in changed().items()}
    exact = {k: v if isinstance(v, PackedWeight) else v.float() for k, v in given.items()}
    loaded = load(write_model(tmp_path, given), head_format="stored").model
    assert loaded.state_dict()["lm_head.weight"].dtype == dtype
    ids = random_ids(1, 1, 9)
    with torch.inference_mode():
        logits = [
            m(ids, KVCache(m.config, 1, 9)) for m in (loaded, build(config_of(FAMILY), exact))
        ]
    assert torch.equal(*logits)


def test_a_file_computes_what_the_tensors_do(tmp_path: Path) -> None:
    for name, family in SMALL.items():
        network = make_network(family)
        folder = write_model(tmp_path / name, tensors_of(family, network), config_dict(family))
        loaded = load(folder / "model.bin", head_format="stored").model
        direct = tiny_model(family, network)
        ids = random_ids(2, 2, 7)
        with torch.inference_mode():
            logits = [m(ids, KVCache(m.config, 2, 7)) for m in (loaded, direct)]
        assert torch.equal(*logits), name


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="got no such file or directory"):
        load(tmp_path / "nothing")
    with pytest.raises(LoadError, match="expected model.bin, .* in the directory .*, got none"):
        load(tmp_path)
    with pytest.raises(LoadError, match="got a Hugging Face checkpoint; convert it first"):
        load(DEMO_SOURCE, convert=False)
    (tmp_path / "model.bin").write_bytes(b"not a model")
    with pytest.raises(SglbitntError, match="model.bin"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "valid JSON"),
        ("[]", "JSON object"),
        ('{"eos_token_id": "x"}', "ids below vocab_size"),
        ('{"eos_token_id": [1, 260]}', "ids below vocab_size 260"),
    ],
)
def test_bad_generation_configs(tmp_path: Path, text: str, message: str) -> None:
    folder = write_model(tmp_path, changed())
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_k8_several_eos_ids(tmp_path: Path) -> None:
    """K8: one eos only. generation_config.json decides where it names any, as in transformers."""
    config = {**config_dict(FAMILY), "eos_token_id": [1, 7, 9]}
    folder = write_model(tmp_path, changed(), config)
    assert load(folder).stop_ids == {1, 7, 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert load(folder).stop_ids == {2, 3}
    (folder / "generation_config.json").write_text("{}")
    assert load(folder).stop_ids == {1, 7, 9}


def test_a_model_without_tokenizer_runs_on_ids(tmp_path: Path) -> None:
    lm = load(write_model(tmp_path, changed()))
    assert len(lm.engine.generate([[1, 2, 3]])[0].token_ids) > 0
    with pytest.raises(TokenizerError, match="expected tokenizer.json beside"):
        lm.generate("text")
    write_tokenizer(tmp_path, FAMILY.vocab)
    assert isinstance(load(tmp_path).generate("text", max_new_tokens=3), str)


# Text -----------------------------------------------------------------------------------------


def test_stream_is_generate_in_pieces(demo: LanguageModel) -> None:
    stream = demo.stream("And God said unto", max_new_tokens=20)
    pieces = list(stream)
    assert len(pieces) > 10
    assert "".join(pieces) == demo.generate("And God said unto", max_new_tokens=20)
    assert stream.timing.prompt_tokens == 5 and stream.timing.new_tokens == 20
    assert stream.generation.finish_reason == "length"


def test_prompts_may_be_ids(demo: LanguageModel) -> None:
    ids = demo.encode("And God said unto")
    expected = demo.generate("And God said unto", max_new_tokens=5)
    assert demo.generate(ids, max_new_tokens=5) == expected


@pytest.mark.parametrize(
    "stop", [",", ", Thou", "servant", " him", "Thou art my s", ["zzz", "art"]]
)
def test_stop_texts_never_show(demo: LanguageModel, stop: Any) -> None:
    """The answer ends right before the first stop text, however tokens cut it up."""
    whole = demo.generate("And God said unto", max_new_tokens=20)
    stops = [stop] if isinstance(stop, str) else stop
    at = min(whole.find(s) for s in stops if s in whole)
    stream = demo.stream("And God said unto", max_new_tokens=20, stop=stop)
    assert "".join(stream) == whole[:at]
    assert stream.generation.finish_reason == "stop"
    assert len(stream.generation.token_ids) < 20


def test_a_stop_text_that_never_comes_holds_nothing_back(demo: LanguageModel) -> None:
    whole = demo.generate("And God said unto", max_new_tokens=6)
    assert demo.generate("And God said unto", max_new_tokens=6, stop=whole[-3:] + "###") == whole


def test_batches_of_texts(demo: LanguageModel) -> None:
    prompts = ["And God said unto", "Psalm 151\n", "In the beginning"]
    options = {"max_new_tokens": 16, "stop": ["servant"]}
    assert demo.generate_batch(prompts, **options) == [demo.generate(p, **options) for p in prompts]


def test_logprobs_are_those_of_the_models_logits(demo: LanguageModel) -> None:
    """Against a log softmax in float64 over the whole text at once."""
    sampled = {"temperature": 0.8, "seed": 3, "frequency_penalty": 1.0}
    for options in ({}, sampled):
        answer = demo.generate("In the", max_new_tokens=12, logprobs=3, **options)
        ids = demo.encode("In the")
        cache = KVCache(demo.config, 1, 64, demo.engine.kv_dtype)
        logits = demo.model(torch.tensor([[*ids, *answer.token_ids]]), cache)[0, len(ids) - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1)
        assert [one.token_id for one in answer.logprobs] == answer.token_ids
        for one, row in zip(answer.logprobs, expected, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-5)
            best = row.topk(3)
            assert [token for token, _ in one.top_logprobs] == best.indices.tolist()
            values = [value for _, value in one.top_logprobs]
            assert values == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_come_from_every_way_to_generate(demo: LanguageModel) -> None:
    alone = [demo.generate(p, max_new_tokens=6, logprobs=1).logprobs for p in ("In the", "And")]
    batch = demo.generate_batch(["In the", "And"], max_new_tokens=6, logprobs=1)
    assert [c.logprobs for c in batch] == alone
    stream = demo.stream("And", max_new_tokens=6, logprobs=1, speculation="auto")
    stream.read()
    assert stream.generation.logprobs == alone[1]
    assert demo.generate("And", max_new_tokens=6).logprobs == []


def test_a_draft_head_that_is_missing_is_named_before_anything_runs(demo: LanguageModel) -> None:
    expected = r'^{}: expected speculation "head" only for a model with a draft head, got one with'
    calls = {
        "generate": lambda: demo.generate("In the", speculation="head"),
        "stream": lambda: demo.stream("In the", speculation="head"),
        "generate_batch": lambda: demo.generate_batch(["In the"], speculation="head"),
        "chat": lambda: demo.chat(speculation="head"),
    }
    for name, call in calls.items():
        with pytest.raises(DraftHeadError, match=expected.format(name)):
            call()


@pytest.mark.parametrize("how", ["auto", "ngram", 1, 7])
def test_speculation_changes_no_text(demo: LanguageModel, how: Any) -> None:
    text = "the son of Adam, which was the son of Adam, which was"
    for options in ({}, {"temperature": 0.9, "seed": 4}):
        plain = demo.generate(text, max_new_tokens=40, speculation="off", **options)
        assert demo.generate(text, max_new_tokens=40, speculation=how, **options) == plain
        batch = demo.generate_batch([text, "In"], max_new_tokens=40, speculation=how, **options)
        assert batch[0] == plain
    assert how in ("auto", "ngram") or demo.engine.stats().drafted_tokens > 0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}


class Person:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return SCHEMA


def test_json_of_a_schema(demo: LanguageModel) -> None:
    ways: list[dict[str, Any]] = [{}, *({"temperature": 1.0, "seed": s} for s in range(4))]
    for way in ways:
        answer = demo.generate("In the beginning", json_schema=SCHEMA, **way)
        jsonschema.validate(json.loads(answer), SCHEMA)
        assert answer.finish_reason == "stop" and len(answer.token_ids) < 60
        assert demo.generate("In the beginning", json_schema=Person, **way) == answer
        assert "".join(demo.stream("In the beginning", json_schema=SCHEMA, **way)) == answer
    alone = [demo.generate(prompt, json_schema=SCHEMA) for prompt in ("In", "And God")]
    assert demo.generate_batch(["In", "And God"], json_schema=SCHEMA) == alone
    conversation = demo.chat(json_schema=SCHEMA)
    for question in ("Who?", "And then?"):
        jsonschema.validate(json.loads("".join(conversation.say(question))), SCHEMA)


@pytest.mark.parametrize(
    ("schema", "error", "words"),
    [
        (5, TypeError, "json_schema as a dict or a pydantic model, got 5"),
        ({"type": "word"}, GrammarError, "json_schema: expected one that can be followed"),
        ({"not": {}}, GrammarError, "Unimplemented keys"),
    ],
)
def test_schemas_that_cannot_be_held(
    demo: LanguageModel, schema: Any, error: type[Exception], words: str
) -> None:
    for call in (
        lambda: demo.generate("In", json_schema=schema),
        lambda: demo.chat(json_schema=schema),
    ):
        with pytest.raises(error, match=words):
            call()


def test_a_schema_needs_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = bitnet_ops.load()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match="llguidance, got none; run: pip install .*llguidance"):
        lm.generate("In", json_schema=SCHEMA)


def test_bad_options(demo: LanguageModel) -> None:
    with pytest.raises(SamplingError, match="top_p"):
        demo.generate("x", top_p=2)
    with pytest.raises(TypeError, match="options among max_new_tokens, temperature, .*stop.*beam"):
        demo.generate("x", beams=4)
    with pytest.raises(ValueError, match="stop to be non-empty texts"):
        demo.generate("x", stop="")
    with pytest.raises(ValueError, match="max_new_tokens"):
        demo.generate("x", max_new_tokens=-1)


def test_a_conversation_grows_and_reuses_its_cache(demo: LanguageModel) -> None:
    talk = demo.chat(max_new_tokens=6, temperature=0)
    first = "".join(talk.say("And God said unto"))
    assert first == demo.generate("And God said unto", max_new_tokens=6)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    second = "".join(talk.say("And Moses"))
    history = f"And God said unto\n{first}\nAnd Moses"  # what the demo's template writes
    assert second == demo.generate(history, max_new_tokens=6)
    assert talk.last is not None and talk.last.timing.reused_tokens > 0


def test_a_conversation_has_a_system_message_and_answers_again(demo: LanguageModel) -> None:
    talk = demo.chat(system="Be brief", max_new_tokens=6, temperature=1.0, seed=5)
    with pytest.raises(ValueError, match="regenerate: expected a message of the user, got none"):
        talk.regenerate()
    answers = ["".join(talk.say("And God said unto"))]
    for _ in range(3):
        answers.append("".join(talk.regenerate()))
        assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
        assert talk.messages[-1]["content"] == answers[-1]
    assert len(set(answers)) > 1
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 5 + 3}
    assert answers[3] == "".join(demo.chat(system="Be brief", **options).say("And God said unto"))
    talk.set_system(None)
    assert talk.messages[0]["role"] == "user"
    with pytest.raises(TypeError, match="chat: expected system as a text or None, got 3"):
        demo.chat(system=3)  # type: ignore[arg-type]


def test_close_ends_what_runs_frees_the_memory_and_stays(tmp_path: Path) -> None:
    """Streams end where they are; afterwards every way in is one error, and what was said stays."""
    with load(prefix_dir=tmp_path / "prefixes") as lm:
        thread = EngineThread(lm.engine)
        running = lm.stream("In the beginning", max_new_tokens=900)
        begun = next(iter(running))
        waiting, talk = lm.stream("And God"), lm.chat(max_new_tokens=4)
        answer = "".join(talk.say("And Moses " * 100))
        weights = weakref.ref(next(iter(lm.model.buffers())))
    assert not thread._thread.is_alive()
    rest = running.read()
    assert running.finish_reason == "abort" and begun and len(rest.token_ids) < 900
    gc.collect()
    assert weights() is None and lm.engine.stats().used_blocks == 0
    assert any(path.is_file() for path in (tmp_path / "prefixes").rglob("*"))
    calls: list[Callable[[], Any]] = [
        lambda: lm.generate("x"),
        lambda: lm.stream("x"),
        waiting.read,
        lambda: lm.generate_batch(["x"]),
        lambda: lm.chat(),
        lambda: "".join(talk.say("x")),
        lambda: lm.score("two words"),
        lambda: lm.embed("x"),
        lambda: lm.model(torch.tensor([[1]])),
        lambda: lm.engine.add([1], consumer=print),
        lambda: lm.engine.generate([[1]]),
        lambda: lm.add_adapter("a", tmp_path),
        lambda: lm.remove_adapter("a"),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="expected an open model, got one that was closed"):
            call()
    lm.close()
    assert "closed" in repr(lm) and lm.encode("In") and talk.messages[-1]["content"] == answer
    assert lm.config.vocab_size


def test_a_conversation_survives_what_cannot_be_run(demo: LanguageModel) -> None:
    talk = demo.chat(max_new_tokens=4)
    with pytest.raises(ValueError, match="at most 1024 tokens"):
        talk.say("word " * 2000)
    assert talk.messages == []
    answer = talk.say("And God")
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]


def test_chat_needs_a_template(tmp_path: Path) -> None:
    for name in ("model.bin", "tokenizer.json"):
        shutil.copy(DEMO_DIR / name, tmp_path / name)
    with pytest.raises(ChatTemplateError, match="chat template, got one without"):
        load(tmp_path).chat().say("hello")


def test_demo_files_travel_in_the_package() -> None:
    assert (DEMO_DIR / "LICENSE").read_bytes() == (DEMO_SOURCE / "LICENSE").read_bytes()
    source = json.loads((DEMO_SOURCE / "config.json").read_text())
    assert dataclasses.asdict(load().config)["vocab_size"] == source["vocab_size"]
