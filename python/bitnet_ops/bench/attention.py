"""`bench attention`: attention under policies beside attention to all positions.

All policies of a row alternate in one process over the same caches, whose layers take turns, so
that keys and values come from memory as in a model. Times are of one layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.bench.harness import Budget, Timed, interleave, paired_ratios, summarize
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import Report, Row
from bitnet_ops.bench.session import Progress, measured
from bitnet_ops.blocks.block import PAGE
from bitnet_ops.config.attention import AttentionPolicy, read_policies
from bitnet_ops.errors import BitNetError
from bitnet_ops.nn.kv_config import DEFAULT_BLOCK_SIZE, KV_DTYPES, KVCacheConfig
from bitnet_ops.nn.kv_pool import KVPool

# heads, KV heads, size of a head
SHAPES = {"2b-4t": (20, 5, 128), "bonsai-1.7b": (16, 8, 128)}
USUAL = ("window:256,sinks=4", "top_k:0.25,sinks=4", "dynamic:min_ratio=0.1,max_ratio=0.5,sinks=4")
_CACHE_BYTES = 448 << 20  # of all layers of a row
# What --check asks for at this context: how many times as fast as dense.
_CHECKED_CONTEXT, _MIN_GAIN = 16384, {"window:256,sinks=4": 8.0, "top_k:0.25,sinks=4": 2.2}
_NEVER_BELOW = 0.98


@dataclass(frozen=True)
class AttentionSettings:
    """What to measure.

    tokens: new ones at the end of a context: 1 is decode, more a chunk of a prompt.
    check: whether a row that is too slow makes the report fail.
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    contexts: tuple[int, ...] = (8192, 16384, 32768)
    policies: tuple[str, ...] = USUAL
    kv_dtypes: tuple[str, ...] = ("bfloat16", "int8")
    threads: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] = (1,)
    seconds: float = 1.0
    check: bool = False


class Caches:
    """Random keys and values of one sequence in several layers; pages have a mean of their own."""

    def __init__(self, shape: tuple[int, int, int], context: int, kv_dtype: str) -> None:
        self.heads, kv_heads, self.dim = shape
        config = KVCacheConfig(context, 1, kv_heads, self.dim, key_bounds=True)
        g = torch.Generator().manual_seed(1)
        keys, values = (torch.randn(context, kv_heads, self.dim, generator=g) for _ in "kv")
        pages = torch.randn(-(-context // PAGE), kv_heads, self.dim, generator=g)
        keys += pages.repeat_interleave(PAGE, 0)[:context]
        blocks = -(-context // DEFAULT_BLOCK_SIZE)
        layers = max(len(USUAL) + 1, _CACHE_BYTES // (4 * keys.numel()))
        self.pools = [KVPool(config, blocks, dtype=KV_DTYPES[kv_dtype]) for _ in range(layers)]
        for pool in self.pools:
            pool.update(0, keys, values, torch.arange(context))
        self._generator, self._queries = g, dict[int, Tensor]()
        self.table, self.context = torch.arange(blocks)[None], context

    def query(self, tokens: int) -> Tensor:
        if tokens not in self._queries:
            shape = tokens, self.heads, self.dim
            self._queries[tokens] = torch.randn(shape, generator=self._generator)
        return self._queries[tokens]

    def attend(self, call: int, policy: str, ahead: int = 0, tokens: int = 1) -> Tensor:
        """Of the newest tokens, in the layer whose turn it is, or so many ahead of it."""
        pool = self.pools[(call + ahead) % len(self.pools)]
        scales = (None, None) if pool.key_scale is None else (pool.key_scale, pool.value_scale)
        key_scale, value_scale = (None if s is None else s[0] for s in scales)
        bounds = pool.key_bounds
        return ops.paged_attention(
            self.query(tokens), pool.key_pool[0], pool.value_pool[0], torch.tensor([0, tokens]),
            torch.tensor([self.context]), self.table, self.dim**-0.5, key_scale, value_scale,
            pool.layout, policy=policy, key_bounds=None if bounds is None else bounds[0],
        )  # fmt: skip


def policy_words(text: str) -> str:
    """A policy of one layer, as the op takes it. Raises AttentionPolicyError."""
    (policy,) = read_policies(text, 1, lambda _: None)
    assert isinstance(policy, AttentionPolicy)
    return str(policy)


def _share_read(caches: Caches, words: str, tokens: int) -> float:
    caches.attend(0, words, tokens=tokens)
    ((read, pages),) = _runtime.attention_pages()
    return read / pages


def _rows(s: AttentionSettings, shape: str, context: int, kv_dtype: str) -> list[Row]:
    caches = Caches(SHAPES[shape], context, kv_dtype)
    words = ["", *map(policy_words, s.policies)]
    rows = []
    for threads, tokens in itertools.product(s.threads, s.tokens):
        use_threads(threads)
        # each in layers that the one before it has not just read
        apart = len(caches.pools) / len(words)
        runs = [
            Timed(
                partial(caches.attend, policy=word, ahead=int(i * apart), tokens=tokens), cold=True
            )
            for i, word in enumerate(words)
        ]
        rounds = interleave(runs, Budget(s.seconds)).usable()
        for name, word, samples in zip(("dense", *s.policies), words, rounds, strict=True):
            ratio = summarize(paired_ratios(rounds[0], samples))
            aimed = context == _CHECKED_CONTEXT and tokens == 1
            minimum = _MIN_GAIN.get(name, _NEVER_BELOW) if aimed else _NEVER_BELOW
            rows.append(
                {
                    "shape": shape, "context": context, "kv": kv_dtype, "threads": threads,
                    "tokens": tokens, "policy": name, "time_us": summarize(samples).to_dict(1e6),
                    "times_dense": ratio.to_dict(),
                    "read": round(_share_read(caches, word, tokens), 4) if word else 1.0,
                    "flags": ["slow"] if word and ratio.median < minimum else [],
                }
            )  # fmt: skip
    return rows


def run(settings: AttentionSettings, progress: Progress = lambda _: None) -> Report:
    """Measure everything and return the report. Threads are put back as they were."""

    def rows(_: Workspace, __: list[MachineLimits]) -> dict[str, Any]:
        found: list[Row] = []
        for shape in settings.shapes:
            for context in settings.contexts:
                for kv_dtype in settings.kv_dtypes:
                    progress(f"{shape}, context {context}, {kv_dtype}")
                    found += _rows(settings, shape, context, kv_dtype)
        slow = any("slow" in row["flags"] for row in found)
        return {"ok": not (settings.check and slow), "rows": found}

    return measured("attention", settings, lambda: Workspace(64 << 20, 0), rows, progress)


def plot(found: Report, file: Path) -> None:
    """Time against context, a line for each policy, a field for each shape; of the first cache."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BitNetError(
            "bench attention: expected matplotlib for --plot, got none; run: pip install matplotlib"
        ) from None
    settings = found["settings"]
    figure = Figure(figsize=(4.2 * len(settings["shapes"]), 3.8), layout="constrained")
    fields = figure.subplots(1, len(settings["shapes"]), squeeze=False, sharey=True)[0]
    for shape, axes in zip(settings["shapes"], fields, strict=True):
        for policy in ("dense", *settings["policies"]):
            rows = [
                row
                for row in found["rows"]
                if (row["shape"], row["policy"]) == (shape, policy)
                and row["kv"] == settings["kv_dtypes"][0]
                and row["threads"] == settings["threads"][0]
                and row["tokens"] == settings["tokens"][0]
            ]
            x = [row["context"] for row in rows]
            axes.plot(x, [row["time_us"]["median"] / 1e3 for row in rows], "o-", label=policy)
        axes.set(xscale="log", yscale="log", xlabel="context, positions", title=shape)
        axes.set_xticks(settings["contexts"], [f"{n:,}" for n in settings["contexts"]], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    unit = "ms a layer and token" if settings["tokens"][0] == 1 else "ms a layer"
    fields[0].set_ylabel(f"{unit}, {settings['kv_dtypes'][0]}")
    names = fields[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
