"""`bench sparsity`: decode with products that leave zeros out, beside decode that multiplies all.

One model of random weights in which so many inputs of every MLP's last projection are 0 as is asked
for: weights of the norm before it are 0 there. It has another activation than squared ReLU, which
would make two thirds of the codes 0 by itself. All policies alternate over the same weights.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitnet_ops import _runtime
from bitnet_ops.bench.harness import Budget, Timed, interleave, paired_ratios, summarize
from bitnet_ops.bench.limits import MachineLimits
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.bench.model import rewind
from bitnet_ops.bench.pinning import use_threads
from bitnet_ops.bench.report import Report, Row
from bitnet_ops.bench.session import Progress, measured
from bitnet_ops.config.sparsity import ALWAYS
from bitnet_ops.dummy import model as dummy
from bitnet_ops.errors import BitNetError, counted
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache

SHARES = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
POLICIES = ("off", "auto", "exact")  # exact: zeros are left out whatever it costs
NEVER_BELOW = 0.98  # times dense, of "auto"
_CONTEXT = 64


@dataclass(frozen=True)
class SparsitySettings:
    """What to measure; check: whether a row of "auto" that is too slow makes the report fail.

    shares: of inputs that a norm makes 0; more codes are 0, for small ones are rounded to it.
    """

    dummy: str = "2b-4t"
    shares: tuple[float, ...] = SHARES
    threads: tuple[int, ...] = (1,)
    seconds: float = 4.0
    check: bool = False


class Models:
    """One model under each of POLICIES, over the same tensors."""

    def __init__(self, name: str) -> None:
        config = dummy.config(name)
        if not config.sub_norms:
            raise BitNetError(
                f"bench sparsity: expected a model with a norm before down_proj, got {name}"
            )
        self._dense = dummy.decoder(name, torch.bfloat16, head_format="int8")
        self._dense.config = dataclasses.replace(config, hidden_act="silu")
        self._norms = [
            layer.get_submodule("mlp.ffn_sub_norm").get_buffer("weight")
            for layer in self._dense.model.layers
        ]
        self._given = [norm.clone() for norm in self._norms]
        self.models: dict[str, Decoder] = {}
        for policy in POLICIES:
            model = copy.copy(self._dense)
            model.set_activation_sparsity(None if policy == "off" else "auto")
            if policy == "exact":  # says how many codes are 0, and what `auto` saves by measuring
                model.config = dataclasses.replace(model.config, sparsity=ALWAYS)
            self.models[policy] = model

    def silence(self, share: float) -> None:
        """Make so many inputs of every down_proj 0, others in each layer."""
        g = torch.Generator().manual_seed(1)
        for norm, given in zip(self._norms, self._given, strict=True):
            norm.copy_(given).masked_fill_(torch.rand(len(norm), generator=g) < share, 0)

    def run(self, policy: str) -> Timed:
        """A step of one token behind a short context."""
        model = self.models[policy]
        cache = KVCache(model.config, 1, _CONTEXT + 1, torch.bfloat16)
        model(torch.ones(1, _CONTEXT, dtype=torch.int64), cache)
        ids = torch.ones(1, 1, dtype=torch.int64)

        def step(_: int) -> None:
            rewind(cache, _CONTEXT)
            model(ids, cache)

        return Timed(step)


def _rows(models: Models, s: SparsitySettings, share: float, threads: int) -> list[Row]:
    models.silence(share)
    use_threads(threads)
    runs = [models.run(policy) for policy in POLICIES]
    skipped = []
    for run in runs:
        run.call(0)
        zeros, inputs = _runtime.activation_zeros()
        skipped.append(zeros / inputs if inputs else 0.0)
    rounds = interleave(runs, Budget(s.seconds)).usable()
    rows = []
    for policy, left_out, samples in zip(POLICIES, skipped, rounds, strict=True):
        ratio = summarize(paired_ratios(rounds[0], samples))
        slow = policy == "auto" and ratio.median < NEVER_BELOW
        rows.append(
            {
                "model": s.dummy, "threads": threads, "zeros": round(skipped[-1], 4),
                "policy": policy, "skipped": round(left_out, 4),
                "time_us": summarize(samples).to_dict(1e6), "times_dense": ratio.to_dict(),
                "flags": ["slow"] if slow else [],
            }
        )  # fmt: skip
    return rows


def run(settings: SparsitySettings, progress: Progress = lambda _: None) -> Report:
    """Measure everything and return the report. Threads are put back as they were."""

    def rows(_: Workspace, __: list[MachineLimits]) -> dict[str, Any]:
        progress("filling the model")
        models = Models(settings.dummy)
        found: list[Row] = []
        for threads in settings.threads:
            for share in settings.shares:
                progress(f"{counted(threads, 'thread')}, {share:.0%} of the inputs 0")
                found += _rows(models, settings, share, threads)
        slow = any("slow" in row["flags"] for row in found)
        return {"ok": not (settings.check and slow), "rows": found}

    return measured("sparsity", settings, lambda: Workspace(64 << 20, 0), rows, progress)


def plot(found: Report, file: Path) -> None:
    """Speed against zeros, a line for each policy, a field for each number of threads."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BitNetError(
            "bench sparsity: expected matplotlib for --plot, got none; run: pip install matplotlib"
        ) from None
    threads = found["settings"]["threads"]
    figure = Figure(figsize=(4.2 * len(threads), 3.6), layout="constrained")
    fields = figure.subplots(1, len(threads), squeeze=False, sharey=True)[0]
    for count, axes in zip(threads, fields, strict=True):
        for policy in POLICIES[1:]:
            rows = [r for r in found["rows"] if (r["threads"], r["policy"]) == (count, policy)]
            x = [row["zeros"] for row in rows]
            axes.plot(x, [row["times_dense"]["median"] for row in rows], "o-", label=policy)
        axes.axhline(1, color="grey", linewidth=0.8)
        title = counted(count, "thread")
        axes.set(xlabel="codes of down's input that are 0", title=title)
        axes.grid(alpha=0.3)
    fields[0].set_ylabel("speed of a decode step, dense = 1")
    fields[0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
