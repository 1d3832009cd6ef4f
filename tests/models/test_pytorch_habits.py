"""What PyTorch users try first: casts, calls without a cache, threads, typed options, reprs."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import bitnet_ops
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.language_model import Completion, LanguageModel
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.linear import BitLinear
from cache_types import KV_TYPES_TEXT
from isa_control import torch_threads
from tiny_models import SMALL, random_ids, tiny_model

FAMILY = SMALL["bitnet-offline-untied"]


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return bitnet_ops.load()


# Casts ----------------------------------------------------------------------------------------


def test_bfloat16_is_the_model_built_in_bfloat16() -> None:
    ids = random_ids(1, 2, 7)
    expected = tiny_model(FAMILY, dtype=torch.bfloat16)(ids)
    model = tiny_model(FAMILY)
    exact = model(ids)
    before = {name: b.dtype for name, b in model.named_buffers() if "lm_head" not in name}
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(model(ids), expected) and not torch.equal(expected, exact)
    model.run_as = "ops"
    assert torch.equal(model(ids), expected)
    kept = {name: b.dtype for name, b in model.named_buffers()}
    assert all(kept[name] == dtype for name, dtype in before.items() if "embed" not in name)
    assert model.float().dtype == torch.float32


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_changes_nothing(default: torch.dtype, demo: LanguageModel) -> None:
    """Scripts set it to float64, and loaders of other libraries to the model's own."""
    prompt, options = "In the beginning", {"max_new_tokens": 4, "temperature": 0.7, "seed": 1}
    expected = demo.generate(prompt, **options)  # type: ignore[arg-type]
    vector, (score,) = demo.embed(prompt), demo.score([prompt])
    torch.set_default_dtype(default)
    try:
        lm = bitnet_ops.load()
        assert lm.generate(prompt, **options) == expected  # type: ignore[arg-type]
        assert torch.equal(lm.embed(prompt), vector)
        assert torch.equal(lm.score([prompt])[0].logprobs, score.logprobs)
        layer = BitLinear.from_float(torch.ones(4, 128, dtype=torch.float32))
        assert layer.weight_scale.dtype == torch.float32
        assert BitLinear(128, 4, bias=True).bias.dtype == torch.float32  # type: ignore[union-attr]
        key = torch.ones(1, 1, demo.config.num_key_value_heads, demo.config.head_dim)
        cache = KVCache(demo.config, 1, 8)
        cache.update(0, key.float(), key.float(), 0)
        assert cache.get(0)[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cast", ["half", "double"])
def test_other_dtypes_are_rejected_at_once_and_change_nothing(cast: str) -> None:
    model, ids = tiny_model(FAMILY), random_ids(2, 1, 5)
    expected = model(ids)
    with pytest.raises(ValueError, match=r"expected dtype float32 or bfloat16, got float.*; use"):
        getattr(model, cast)()
    with pytest.raises(ValueError, match="expected dtype float32 or bfloat16"):
        getattr(torch.nn.Sequential(model), cast)()
    assert torch.equal(model(ids), expected)


def test_a_layer_keeps_its_codes_and_scale() -> None:
    layer = BitLinear.from_float(torch.randn(4, 128), torch.randn(4))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert layer.to(dtype).bias.dtype == dtype
        assert layer(torch.ones(2, 128, dtype=dtype)).dtype == dtype
        assert layer.weight_scale.dtype == torch.float32 and layer.weight.dtype == torch.uint8
    with pytest.raises(ValueError, match="BitLinear: expected dtype .*, got float64"):
        layer.double()


# Calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_runs_without_a_cache(fused: bool) -> None:
    model, ids = tiny_model(FAMILY), random_ids(3, 2, 9)
    model.run_as = "program" if fused else "ops"
    expected = model(ids, KVCache(model.config, 2, 9, torch.float32))
    assert expected.shape == (2, 9, model.config.vocab_size)
    assert torch.equal(model(ids), expected) and torch.equal(model(ids), expected)
    assert torch.equal(model(ids, logits_to_keep=1), expected[:, -1:])
    assert model.hidden(ids).shape == (2, 9, model.config.hidden_size)
    with pytest.raises(TypeError, match=r"input_ids as a tensor int64 \[B, T\], got a list"):
        model([[1, 2]])
    with pytest.raises(TypeError, match="cache as a KVCache or None, got a tuple"):
        model(ids, ())


@pytest.mark.parametrize("bad", [torch.float64, "int7", None])
def test_a_wrong_kv_dtype_is_rejected_before_anything_is_read(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"kv_dtype {KV_TYPES_TEXT}, got"):
        bitnet_ops.load("/no/such/model", kv_dtype=bad)
    with pytest.raises(ValueError, match=f"kv_dtype {KV_TYPES_TEXT}, got"):
        Engine(tiny_model(FAMILY), kv_dtype=bad)


def test_load_makes_bfloat16_caches_and_takes_names(demo: LanguageModel) -> None:
    assert demo.engine.kv_dtype == torch.bfloat16
    named = bitnet_ops.load(dtype="bfloat16", kv_dtype="int8")
    assert (named.model.dtype, named.engine.kv_dtype) == (torch.bfloat16, torch.int8)
    with pytest.raises(ValueError, match="dtype float32 or bfloat16, got 'float16'; relu2"):
        bitnet_ops.load(dtype="float16")


# Threads --------------------------------------------------------------------------------------


def test_threads_on_one_model_get_what_one_thread_gets() -> None:
    """Every round starts from a model that nobody has run, so that the binding is raced for."""
    fresh = tiny_model(FAMILY)
    prompts = [random_ids(seed, 1, 5)[0].tolist() for seed in range(6)]
    expected = [Engine(fresh).generate([p], None, Limits(6)) for p in prompts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with torch_threads(1), ThreadPoolExecutor(6) as pool:
            for _ in range(15):
                engine = Engine(tiny_model(FAMILY))
                answers = pool.map(lambda p, e=engine: e.generate([p], None, Limits(6)), prompts)
                assert list(answers) == expected
    finally:
        sys.setswitchinterval(interval)


# Options --------------------------------------------------------------------------------------


def test_a_typo_is_named_at_run_time(demo: LanguageModel) -> None:
    calls = (demo.generate, demo.stream, demo.chat, demo.generate_batch)
    for call in calls:
        args = () if call == demo.chat else (["x"],) if call == demo.generate_batch else ("x",)
        with pytest.raises(TypeError, match=rf"^{call.__name__}: .*did you mean temperature\?$"):
            call(*args, tempreature=1.0)


@pytest.mark.sampled(0)
def test_a_typo_and_a_wrong_type_are_seen_by_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import bitnet_ops\n"
        "lm = bitnet_ops.load()\n"
        "lm.generate('x', temperature=1.0, max_new_tokens=3, stop=['a'], seed=None)\n"
        "lm.generate('x', tempreature=1.0)\n"
        "lm.stream('x', max_new_tokens='3')\n"
        "lm.generate_batch(['x'], top_q=1)\n"
        "lm.chat(seed='s')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", str(tmp_path / "c")]
    command += ["--follow-imports=silent", "--ignore-missing-imports", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
    )
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert lines == {4, 5, 6, 7}, done.stdout + done.stderr


PROMPTS: dict[str, Any] = {
    "a list of texts": ["a", "b"],
    "floats": [1.0, 2.0],
    "booleans": [True],
    "nothing": None,
    "bytes": b"abc",
    "a float tensor": torch.ones(3),
    "two rows": torch.ones(2, 3, dtype=torch.int64),
    "a mapping": {"input_ids": [1]},
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_what_is_no_prompt_is_a_type_error(demo: LanguageModel, kind: str) -> None:
    with pytest.raises(TypeError, match="^prompt: expected .* got "):
        demo.generate(PROMPTS[kind])


def test_ids_may_come_as_tensors_and_arrays(demo: LanguageModel) -> None:
    ids = demo.encode("In the beginning")
    tensor = torch.tensor(ids)
    expected = demo.generate(ids, max_new_tokens=3)
    for given in (
        tensor,
        tensor[None],
        tensor.int(),
        tensor.numpy(),
        tuple(ids),
        list(tensor.numpy()),
    ):
        assert demo.generate(given, max_new_tokens=3) == expected
    assert demo.generate_batch(tensor[None], max_new_tokens=3) == [expected]


@pytest.mark.parametrize("bad", ["abc", [1, 2], 5, None, b"abc"])
def test_one_prompt_is_not_taken_to_pieces(demo: LanguageModel, bad: Any) -> None:
    for call, name in ((demo.generate_batch, "generate_batch"), (demo.embed, "embed")):
        if name == "embed" and bad == "abc":
            continue  # one text may be given alone there
        with pytest.raises(TypeError, match=f"^{name}: expected a list of prompts"):
            call(bad)


# Why it ended ---------------------------------------------------------------------------------


def test_a_completion_is_a_text_that_knows_why_it_ended(demo: LanguageModel) -> None:
    by_length = demo.generate("In the beginning", max_new_tokens=3)
    assert isinstance(by_length, str) and by_length.finish_reason == "length"
    assert len(by_length.token_ids) == 3 and by_length.timing.new_tokens == 3
    word = by_length.split()[0]
    by_text = demo.generate("In the beginning", max_new_tokens=9, stop=["zzz", word])
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", word)
    token = by_length.token_ids[1]
    lm = LanguageModel(demo.model, demo.tokenizer, frozenset({token}))
    by_token = lm.generate("In the beginning", max_new_tokens=9)
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
    (full,) = demo.generate_batch([[5] * 1020], max_new_tokens=100_000, ignore_eos=True)
    assert full.finish_reason == "context" and len(full.token_ids) == 5
    endings = {c.ending for c in (by_length, by_text, by_token, full)}
    assert len(endings) == 4 and all(endings)
    stream = demo.stream("In", max_new_tokens=2)
    assert stream.finish_reason == "" and "".join(stream) and stream.finish_reason == "length"
    again = pickle.loads(pickle.dumps(by_text))
    assert isinstance(again, Completion) and again == by_text and again.stop_reason == word


def test_reprs_are_short_and_say_what_it_is(demo: LanguageModel) -> None:
    assert "kv bfloat16" in repr(demo) and "6 layers of 256" in repr(demo)
    assert "vocabulary 4096" in repr(demo.model)
    assert "lengths=[0, 0]" in repr(KVCache(demo.config, 2, 8))
    packed = BitLinear.from_float(torch.randn(4, 128)).packed
    texts = [repr(x) for x in (demo, demo.engine, packed, demo.stream("a"), demo.chat())]
    assert all(" at 0x" not in t and "\n" not in t and len(t) < 300 for t in texts)
