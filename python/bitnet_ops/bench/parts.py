"""Where the time of a decode step goes: its kernels called one by one, in the order of the model.

A part's time is that of its kernels over all layers, each reading its own weights from memory, less
what an empty call of an op with a parallel region costs. What is left of the step is not kernels:
norms, quantisation, rotation, dispatch, waiting. It must not know budgets or reports.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.bench.harness import Run
from bitnet_ops.bench.subject import Subject
from bitnet_ops.nn.kv_cache import KVCache

Call = Callable[[], object]


def part_runs(subject: Subject, batch: int, context: int) -> dict[str, tuple[Run, int]]:
    """Part -> (a run of all its kernels of one step, how many calls of ops those are)."""
    calls: dict[str, list[Call]] = {}
    inputs = _Inputs(batch)
    for part, modules in subject.projections():
        calls.setdefault(part, []).extend(_product(module, inputs) for module in modules)
    cache = subject.cache(batch, max(context, 1), 0)
    calls["attention"] = _attention_calls(subject, cache)
    calls["head"] = [_head_call(subject, batch)]
    return {part: (_run(found), len(found)) for part, found in calls.items()}


def _run(calls: list[Call]) -> Run:
    def run(_: int) -> None:
        for call in calls:
            call()

    return Run(run)


class _Inputs:
    """Quantised activations of each width, made once."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def get(self, k: int) -> tuple[Tensor, Tensor]:
        if k not in self._made:
            x = torch.randint(-127, 128, (self.batch, k), dtype=torch.int8)
            self._made[k] = (x, torch.full((self.batch,), 0.01))
        return self._made[k]


def _product(module: torch.nn.Module, inputs: _Inputs) -> Call:
    weight, scale = module.get_buffer("weight"), module.get_buffer("weight_scale")
    n, k = int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    x, x_scale = inputs.get(k)
    canonical = tuple(weight.shape) == (n, 32 * -(-k // 128))
    extra = {} if canonical else {"out_features": n}
    if inputs.batch == 1:
        return lambda: ops.gemv(weight, x[0], x_scale, scale, **extra)
    return lambda: ops.gemm(weight, x, x_scale, scale, **extra)


def _attention_calls(subject: Subject, cache: KVCache) -> list[Call]:
    c = subject.config
    query = torch.randn(cache.batch, 1, c.num_attention_heads, c.head_dim).bfloat16()
    start, scale = cache.lengths - 1, c.head_dim**-0.5

    def call(layer: int) -> Call:
        keys, values, scales = cache.keys[layer], cache.values[layer], cache.scales(layer)
        return lambda: ops.attention(query, keys, values, start, scale, *scales)

    return [call(layer) for layer in range(len(cache.keys))]


def _head_call(subject: Subject, batch: int) -> Call:
    x = torch.randn(batch, subject.config.hidden_size)
    buffers = dict(subject.head().named_buffers())
    weight, scale = buffers["weight"], buffers.get("scale")
    if scale is None:
        return lambda: ops.lm_head(x, weight)
    lm_head: Callable[..., object] = ops.lm_head
    return lambda: lm_head(x, weight, scale, subject.config.vocab_size)
