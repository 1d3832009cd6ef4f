"""The int8 KV cache in the demo model: how far it moves logits and texts, sessions and batches.

The op against float64 is test_attention.py's matter, the fused step models/test_program.py's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bitnet_ops
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.nn.kv_cache import KVCache
from isa_control import ISAS, forced_isa, torch_threads

VAL = Path(__file__).resolve().parents[1] / "data/demo-model/val.txt"
PROMPTS = ("And God said unto", "And it came to pass, when", "The LORD is my", "Blessed are the")


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return bitnet_ops.load(kv_dtype=torch.int8)


@pytest.fixture(scope="module")
def texts(demo: LanguageModel) -> list[list[int]]:
    return [demo.encode(part) for part in VAL.read_text().split("\n\n")[:6]]


@torch.inference_mode()
def logits(lm: LanguageModel, ids: list[int], dtype: torch.dtype, chunk: int = 10**6) -> Tensor:
    cache = KVCache(lm.config, 1, len(ids), dtype)
    parts = (ids[i : i + chunk] for i in range(0, len(ids), chunk))
    return torch.cat([lm.model(torch.tensor([part]), cache)[0] for part in parts])


def test_logits_move_as_far_as_the_rounding_of_the_cache_says(
    demo: LanguageModel, texts: list[list[int]]
) -> None:
    """Beside bfloat16, whose rounding is known to do no harm.

    A bfloat16 is off by at most 2^-9 of itself, about 2^-9 / sqrt(3) * 3/4 of it in the mean
    square; an int8 code by absmax / 254, absmax / (127 sqrt(12)) in the mean square, and a row's
    absmax is at most sqrt(head_dim) times its root mean square. So int8 rounds up to
    2.7 sqrt(head_dim) times as coarsely, and what is small goes through the model linearly.
    """
    squares = {torch.bfloat16: 0.0, torch.int8: 0.0}
    agree = count = 0
    for ids in texts:
        exact = logits(demo, ids, torch.float32)
        for dtype in squares:
            got = logits(demo, ids, dtype)
            squares[dtype] += float((got - exact).double().square().sum())
        agree += int((got.argmax(-1) == exact.argmax(-1)).sum())
        count += len(ids)
    ratio = (squares[torch.int8] / squares[torch.bfloat16]) ** 0.5
    assert 0 < ratio <= 2.7 * demo.config.head_dim**0.5
    assert count > 1000 and agree >= 0.98 * count  # 0.993 over all of val.txt, as with bfloat16


def test_greedy_texts_are_those_of_a_float_cache(demo: LanguageModel) -> None:
    exact = bitnet_ops.load()
    for prompt in PROMPTS:
        ours = demo.generate(prompt, max_new_tokens=48, ignore_eos=True)
        assert ours == exact.generate(prompt, max_new_tokens=48, ignore_eos=True)


def test_neither_chunks_nor_the_composed_ops_nor_the_isa_change_a_bit(
    demo: LanguageModel, texts: list[list[int]]
) -> None:
    ids = texts[0][:150]
    expected = logits(demo, ids, torch.int8)
    for chunk in (1, 7, 64, 100):
        assert torch.equal(logits(demo, ids, torch.int8, chunk), expected)
    demo.model.run_as = "ops"
    try:
        assert torch.equal(logits(demo, ids, torch.int8, 64), expected)
    finally:
        demo.model.run_as = "program"
    for isa in ISAS:
        # loaded anew: the lanes of the weights are those of the kernels in force at loading
        with forced_isa(isa), torch_threads(1):
            again = bitnet_ops.load(kv_dtype=torch.int8)
            assert torch.equal(logits(again, ids, torch.int8, 64), expected), isa


def test_a_conversation_goes_on_as_fresh_runs_would(demo: LanguageModel) -> None:
    history = demo.encode("And God said unto")
    for _ in range(3):
        run = demo.engine.start([history], None, Limits(6))
        for _ in run:
            pass
        answer = run.generations[0].token_ids
        (fresh,) = Engine(demo.model, kv_dtype=torch.int8).generate([history], None, Limits(6))
        assert answer == fresh.token_ids
        history = [*history, *answer]
