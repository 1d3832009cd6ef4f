"""`python -m benchmarks.tower`: the tower for images beside transformers' own class, by turns.

Both have the same random weights of the sizes of a 2B and a 9B and see the same noise. Printed are
the best seconds of each, the difference of their rows, and the memory of the weights and of one
call beside them.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.convert.oracles import transformers_tower
from bitnet_ops.machine import cpu_model
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.tower import VisionTower

_SIZES = {
    "2b": VisionConfig(24, 1024, 16, 4096, 2048),
    "9b": VisionConfig(27, 1152, 16, 4304, 4096),
}


def _ours(tower: VisionTower, pixels: Tensor, n: int) -> Tensor:
    rows: Tensor = tower(pixels, [(n, n)])[0]
    return rows


def _of_theirs(tower: Any, pixels: Tensor, grid: Tensor) -> Tensor:
    rows: Tensor = tower(pixels, grid_thw=grid).pooler_output
    return rows


def _seconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    began = time.perf_counter()
    rows = call()
    return time.perf_counter() - began, rows


def _peak_mb(call: Callable[[], Tensor]) -> float:
    """MiB that a call takes beside what is there before it, at most."""

    def resident(key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = resident("VmRSS")
    call()
    return (resident("VmHWM") - before) / 1024


@torch.inference_mode()
def _rows(size: str, dtype: torch.dtype, sides: list[int], turns: int) -> None:
    config = _SIZES[size]
    theirs = transformers_tower(config).to(dtype)
    ours = VisionTower(config, dtype)
    ours.load_state_dict(theirs.state_dict())
    weights = sum(p.numel() * p.element_size() for p in ours.parameters()) / 2**20
    for side in sides:
        n = side // config.patch_size
        pixels = torch.rand(n * n, config.patch_features) * 2 - 1
        twice = pixels.view(n * n, 3, 1, -1).repeat(1, 1, 2, 1).flatten(1).to(dtype)
        grid = torch.tensor([(1, n, n)])
        calls = [partial(_ours, ours, pixels, n), partial(_of_theirs, theirs, twice, grid)]
        memory = [_peak_mb(call) for call in calls]  # and what a first call costs
        found = [[_seconds(call) for call in calls] for _ in range(turns)]
        (mine, a), (other, b) = (
            min(runs, key=lambda run: run[0]) for runs in zip(*found, strict=True)
        )
        apart = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        print(
            f"{size} {str(dtype).removeprefix('torch.'):8} {side:5} px: {mine:6.2f} s, "
            f"transformers {other:6.2f} s ({other / mine:.2f}); apart {apart:.1e}; weights "
            f"{weights:.0f} MiB, a call {memory[0]:.0f} MiB, theirs {memory[1]:.0f}",
            flush=True,
        )


def main() -> None:
    """Parse the arguments and print a line for each size, type and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="2b,9b")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--pixels", default="256,512,768,1024", help="a side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{cpu_model()}, {given.threads} threads, torch {torch.__version__}")
    for size in given.sizes.split(","):
        for name in given.dtypes.split(","):
            sides = [int(side) for side in given.pixels.split(",")]
            _rows(size, getattr(torch, name), sides, given.turns)


if __name__ == "__main__":
    main()
