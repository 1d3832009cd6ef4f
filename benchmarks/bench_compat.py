"""The call of earlier BitNet kernels, and their studies' layers, against torch's bf16 and int8.

    python -m benchmarks.bench_compat [--threads 2] [--seconds 3] [--part calls layers]

`calls`: one 4096 x 4096 product through BitNetLinearMethod, eager and compiled. `layers`: all the
ternary products of a layer of the 2B and 7B models of earlier studies (2048/5632, 24 layers;
4096/11008, 32 layers), eager and compiled; tokens a second are those of all layers, without
attention and head, which those studies left out too. Runs alternate in one process. The figures of
the earlier systems stand beside them as they were published, from their machines: a ratio to them
says nothing about the code alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as dense_linear

from benchmarks.bench_apply import loaded_layer
from benchmarks.torch_int8 import onednn_linear
from bitnet_ops import _runtime, machine, ops
from bitnet_ops.bench.harness import Budget, Timed, interleave
from bitnet_ops.integrations import BitNetLinearMethod
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import pack_ternary

# name: hidden, intermediate, layers
STUDIES = {"2b": (2048, 5632, 24), "7b": (4096, 11008, 32)}
# What the earlier systems reported, on a desktop of 16 cores.
EARLIER_CALLS = {1: "53.46 -> 0.235 ms", 64: "55.21 -> 1.03 ms"}
EARLIER_LAYERS = {
    ("2b", 1): "14.2",
    ("2b", 32): "372.6",
    ("7b", 1): "2.5 eager, 3.7 compiled",
    ("7b", 32): "70.7",
    ("7b", 384): "172 eager, 262.8 compiled",
}


class Layer(nn.Module):
    """The products of one decoder layer, q k v o gate up down, made by `make(outputs, inputs)`."""

    def __init__(
        self, hidden: int, intermediate: int, make: Callable[[int, int], nn.Module]
    ) -> None:
        super().__init__()
        self.qkvo = nn.ModuleList(make(hidden, hidden) for _ in range(4))
        self.gate, self.up = make(intermediate, hidden), make(intermediate, hidden)
        self.down = make(hidden, intermediate)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o = self.qkvo
        h = o(q(x))
        return self.down(ops.relu2_mul(self.gate(h), self.up(h))), k(x), v(x)


def ternary(outputs: int, inputs: int) -> BitLinear:
    codes = torch.randint(-1, 2, (outputs, inputs), dtype=torch.int8)
    return BitLinear.from_packed(pack_ternary(codes, torch.tensor([1 / inputs**0.5]))).repack()


def dense(outputs: int, inputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)


def _ignoring_number(call: Callable[[], object], _: int) -> object:
    return call()


def _times(runs: dict[str, Callable[[], object]], seconds: float) -> tuple[dict[str, float], bool]:
    """Median seconds of each, alternating; whether other work disturbed them."""
    timed = [Timed(partial(_ignoring_number, call)) for call in runs.values()]
    rounds = interleave(timed, Budget(seconds, min_rounds=5))
    medians = [median(samples) for samples in rounds.usable()]
    return dict(zip(runs, medians, strict=True)), rounds.disturbed


def _compiled(module: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True)


def calls(seconds: float) -> None:
    """One product of 4096 x 4096."""
    layer, _ = loaded_layer(4096, 4096)
    method = BitNetLinearMethod()
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16)
    print("4096 x 4096, ms a call")
    print(
        "tokens     eager  compiled    bf16  bf16 compiled    int8  bf16/eager  "
        "earlier system: before -> after"
    )
    for tokens in (1, 8, 64, 384):
        x = torch.randn(tokens, 4096).bfloat16()
        compiled = _compiled(lambda x: method.apply(layer, x))
        compiled_dense = torch.compile(lambda x: dense_linear(x, weight), fullgraph=True)
        assert torch.equal(compiled(x), method.apply(layer, x))
        runs: dict[str, Callable[[], object]] = {
            "eager": partial(method.apply, layer, x),
            "compiled": partial(compiled, x),
            "bf16": partial(dense_linear, x, weight),
            "bf16 compiled": partial(compiled_dense, x),
            "int8": onednn_linear(4096, 4096, tokens),
        }
        found, disturbed = _times(runs, seconds)
        ms = {name: 1e3 * value for name, value in found.items()}
        print(
            f"{tokens:>6}{ms['eager']:>10.3f}{ms['compiled']:>10.3f}{ms['bf16']:>8.2f}"
            f"{ms['bf16 compiled']:>15.2f}{ms['int8']:>8.3f}{ms['bf16'] / ms['eager']:>12.1f}  "
            f"{EARLIER_CALLS.get(tokens, '-')}{'  disturbed' if disturbed else ''}",
            flush=True,
        )


def layers(seconds: float) -> None:
    """All ternary products of the studies' models."""
    print("Tokens a second of all layers' products")
    print("model tokens     eager  compiled      bf16  bf16 compiled  eager/bf16  earlier systems")
    for name, (hidden, intermediate, count) in STUDIES.items():
        ours, theirs = Layer(hidden, intermediate, ternary), Layer(hidden, intermediate, dense)
        compiled, compiled_theirs = _compiled(ours), torch.compile(theirs, fullgraph=True)
        for tokens in (1, 32, 384):
            x = torch.randn(tokens, hidden).bfloat16()
            assert torch.equal(compiled(x)[0], ours(x)[0])
            runs: dict[str, Callable[[], object]] = {
                "eager": partial(ours, x),
                "compiled": partial(compiled, x),
                "bf16": partial(theirs, x),
                "bf16 compiled": partial(compiled_theirs, x),
            }
            found, disturbed = _times(runs, seconds)
            speed = {run: tokens / (count * value) for run, value in found.items()}
            print(
                f"{name:>5}{tokens:>7}{speed['eager']:>10.1f}{speed['compiled']:>10.1f}"
                f"{speed['bf16']:>10.1f}{speed['bf16 compiled']:>15.1f}"
                f"{speed['eager'] / speed['bf16']:>12.1f}  "
                f"{EARLIER_LAYERS.get((name, tokens), '-')}{'  disturbed' if disturbed else ''}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--part", nargs="+", choices=("calls", "layers"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = machine.load_average()
    print(
        f"{machine.cpu_model()}, {_runtime.isa()}, {options.threads} threads, load "
        f"{'unknown' if load is None else load[0]}, torch {torch.__version__}, compiler "
        f"{_runtime.build_info()['compiler']}"
    )
    for part in options.part or ("calls", "layers"):
        {"calls": calls, "layers": layers}[part](options.seconds)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
