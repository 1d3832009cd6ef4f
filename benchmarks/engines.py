"""Other engines on a model of the same dimensions, for the same run.

Engines that bring a thread pool of their own run in a process of their own (engine_worker.py); all
are asked for the same number of threads. Weights are random: no engine's speed depends on them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from benchmarks.process import Process
from bitnet_ops.bench.harness import Timed
from bitnet_ops.dummy import model as dummy

# name -> (module that has to be there, what it is)
ENGINES = {
    "hf-bf16": ("transformers", "Hugging Face transformers, bfloat16"),
    "hf-fp32": ("transformers", "Hugging Face transformers, float32"),
    "litespark": ("litespark_inference", "litespark-inference, 2-bit weights, int8 head"),
    "llama-cpp": ("llama_cpp", "llama-cpp-python, TQ2_0 weights, Q8_0 head"),
}


class OtherEngine(Protocol):
    """Another engine with its model loaded."""

    name: str

    def decode_run(self, threads: int) -> Timed: ...

    def prefill_run(self, tokens: int, threads: int) -> Timed: ...

    def close(self) -> None: ...


def missing(names: Sequence[str]) -> list[str]:
    """Those of `names` whose module is not installed here."""
    return [n for n in names if importlib.util.find_spec(ENGINES[n][0]) is None]


def installed(names: Sequence[str], model: str) -> Iterator[OtherEngine]:
    """The engines of `names` that are installed, one at a time: two may not fit in memory."""
    for name in names:
        if importlib.util.find_spec(ENGINES[name][0]) is None:
            continue
        if name.startswith("hf-"):
            dtype = torch.bfloat16 if name == "hf-bf16" else torch.float32
            yield HuggingFace(name, model, dtype)
        else:
            yield Worker(name, model)


class HuggingFace:
    """BitNetForCausalLM of transformers on dense weights, in this process on torch's threads."""

    def __init__(self, name: str, dummy_name: str, dtype: torch.dtype) -> None:
        from transformers.cache_utils import DynamicCache
        from transformers.models.bitnet import BitNetConfig, BitNetForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.name, self._cache = name, DynamicCache
        c = dummy.config(dummy_name)
        fields = [
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps"),
            *("max_position_embeddings", "tie_word_embeddings"),
        ]
        config = BitNetConfig(**{f: getattr(c, f) for f in fields})
        with torch.device("meta"):
            model: Any = BitNetForCausalLM(config)
        self.model = model.to(dtype).to_empty(device="cpu").eval()
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)
        _fill(self.model)

    def decode_run(self, threads: int) -> Timed:
        cache, ids = self._cache(), torch.zeros(1, 1, dtype=torch.int64)

        def step(_: int) -> None:
            nonlocal ids
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)

        return Timed(step)

    def prefill_run(self, tokens: int, threads: int) -> Timed:
        ids = torch.arange(tokens).unsqueeze(0) % self.model.config.vocab_size
        return Timed(
            lambda _: self.model(
                ids, past_key_values=self._cache(), use_cache=True, logits_to_keep=1
            )
        )

    def close(self) -> None:
        del self.model


def _fill(model: torch.nn.Module) -> None:
    """Values of a sensible size in every parameter, quickly: one random vector, repeated."""
    some = torch.randn(4093) * 0.02
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), 1 << 24):
            piece = flat[start : start + (1 << 24)]
            piece.copy_(some.repeat(-(-piece.numel() // some.numel()))[: piece.numel()])


class Worker:
    """An engine in a process of its own (engine_worker.py), started for a number of threads."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self._model = name, model
        self._process: Process | None = None
        self._threads = 0

    def decode_run(self, threads: int) -> Timed:
        process = self._started(threads)
        return Timed(lambda _: process.ask("decode"))

    def prefill_run(self, tokens: int, threads: int) -> Timed:
        process = self._started(threads)
        return Timed(lambda _: process.ask("prefill", tokens))

    def _started(self, threads: int) -> Process:
        if self._process is None or threads != self._threads:
            self.close()
            self._threads = threads
            module = [sys.executable, "-m", "benchmarks.engine_worker"]
            self._process = Process(
                self.name,
                [*module, self.name, self._model, str(threads)],
                {"OMP_NUM_THREADS": str(threads)},
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
