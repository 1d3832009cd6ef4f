"""`BitNetLinearMethod.apply` of a loaded layer against the op on the very same repacked weight.

    python -m benchmarks.bench_apply --shape 6912x2560 --threads 1 2 --check

Calls alternate in one process. `rows` is the op on the rows of the file, which apply multiplied
before it repacked. Needs no engine. It must not know how layers are loaded.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

import torch
from torch import nn

from bitnet_ops import _runtime, machine, ops
from bitnet_ops.bench.harness import Budget, Timed, interleave, paired_ratios
from bitnet_ops.integrations import BitNetLinearMethod, ScaleRule
from bitnet_ops.nn import packing

LINEAR = torch.ops.bitnet.linear
GOAL = 0.95  # of the op's speed


def loaded_layer(rows: int, columns: int) -> tuple[Any, torch.Tensor]:
    """A layer as an engine has it after loading, and the canonical rows that went in."""
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8)
    layer: Any = nn.Module()
    method = BitNetLinearMethod(ScaleRule.MULTIPLY)
    method.create_weights(layer, columns, [rows], columns, rows, torch.bfloat16)
    layer.weight.weight_loader(layer.weight, packing.pack_hf(codes))
    layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor([0.5]))
    method.process_weights_after_loading(layer)
    return layer, ops.pack(codes)


def measure(shape: tuple[int, int], tokens: int, seconds: float) -> tuple[float, str]:
    """(apply's share of the op's speed, the row of the table)"""
    rows, columns = shape
    layer, canonical = loaded_layer(rows, columns)
    weight, scale = layer.weight.data, layer.weight_scale.data
    x = torch.randn(tokens, columns).bfloat16()
    apply = BitNetLinearMethod().apply
    if not torch.equal(apply(layer, x), LINEAR(x, canonical, scale)):
        raise SystemExit(
            "bench_apply: expected apply to equal the op on the file's rows, it does not"
        )
    # All warm: whichever came after `rows` would find the other weight in the caches.
    runs = [
        Timed(lambda _: apply(layer, x), warm=True),
        Timed(lambda _: LINEAR(x, weight, scale, None, shape), warm=True),
        Timed(lambda _: LINEAR(x, canonical, scale), warm=True),
    ]
    rounds = interleave(runs, Budget(seconds, min_rounds=20))
    applied, product, before = rounds.usable()
    share = median(paired_ratios(product, applied))
    gain = median(paired_ratios(before, applied))
    times = "".join(f"{median(samples) * 1e6:>11.1f}" for samples in (applied, product, before))
    text = (
        f"{rows}x{columns:<6} {torch.get_num_threads():>7} {tokens:>6}{times}"
        f"{share:>11.3f}{gain:>11.2f}  {'disturbed' if rounds.disturbed else ''}"
    )
    return share, text


def call_overhead() -> float:
    """Microseconds that apply adds to a call of the op with next to no work in it."""
    layer, _ = loaded_layer(4, 128)
    weight, scale, x = layer.weight.data, layer.weight_scale.data, torch.ones(1, 128)
    apply, product = BitNetLinearMethod().apply, LINEAR.default
    runs = [
        Timed(lambda _: apply(layer, x)),
        Timed(lambda _: product(x, weight, scale, None, (4, 128))),
    ]
    applied, bare = interleave(runs, Budget(0.5, min_rounds=200)).usable()
    return 1e6 * (median(applied) - median(bare))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="6912x2560", help="outputs x inputs")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--check", action="store_true", help=f"status 1 below {GOAL}")
    options = parser.parse_args()
    rows, columns = (int(size) for size in options.shape.split("x"))
    load = machine.load_average()
    print(
        f"{machine.cpu_model()}, {_runtime.isa()}, {machine.cpus_available()} CPUs, load "
        f"{'unknown' if load is None else load[0]}, torch {torch.__version__}"
    )
    print(f"apply adds {call_overhead():.2f} us to a call")
    print("shape        threads tokens   apply us      op us    rows us   op/apply rows/apply")
    worst = 1.0
    for threads in sorted(set(options.threads)):
        torch.set_num_threads(threads)
        for tokens in options.tokens:
            share, text = measure((rows, columns), tokens, options.seconds)
            worst = min(worst, share)
            print(text, flush=True)
    return 1 if options.check and worst < GOAL else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
