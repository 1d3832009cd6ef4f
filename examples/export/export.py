"""Exports a ternary linear and a decoder layer with torch.export and compiles them for C++.

    python examples/export/export.py FOLDER [MODEL]

writes linear.pt2 and layer.pt2 into FOLDER, tensors of an example call beside them (linear.pt,
layer.pt: what run.cpp checks its results against), and where the op library lies (ops_path.txt).
MODEL is what bitnet_ops.load takes; the demo model without one.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import bitnet_ops
from bitnet_ops.models import Decoder
from bitnet_ops.models.composed import Composed
from bitnet_ops.nn.kv_pool import attend_rectangular, update_rectangular

POSITIONS = 64  # of the layer's keys and values


class Layer(nn.Module):
    """One decoder layer over keys and values that the caller owns: a step of prefill or decode."""

    def __init__(self, model: Decoder, index: int = 0) -> None:
        super().__init__()
        self.layer, self.prefix = model.model.layers[index], f"model.layers.{index}."
        lines = [b for b in model.listing.blocks if str(b.name("norm")).startswith(self.prefix)]
        self.listing = dataclasses.replace(model.listing, blocks=tuple(lines))
        self.scale, self.ropes = model.config.head_dim**-0.5, model._ropes

    def forward(self, x: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x f32 [1, T, hidden] at the positions from start int64 [1] on; updates keys, values."""
        positions = start[:, None] + torch.arange(x.shape[1])

        def module(name: str) -> nn.Module:
            return self.layer.get_submodule(name.removeprefix(self.prefix))

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            update_rectangular(keys, values, k, v, start)
            return attend_rectangular(q, keys, values, start, self.scale)

        return Composed(self.listing, module, positions, self.ropes, attend).run(x)


class Holder(nn.Module):
    """Tensors under names, in the form that C++ reads: attributes of a scripted module."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def export(
    module: nn.Module,
    arguments: tuple[Tensor, ...],
    tokens_dimension: int,
    folder: Path,
    name: str,
) -> None:
    """Compile `module` for any number of tokens, and keep one call with its results."""
    before = [a.clone() for a in arguments]
    tokens = torch.export.Dim("tokens", min=1, max=POSITIONS)
    shapes = tuple({tokens_dimension: tokens} if i == 0 else None for i in range(len(arguments)))
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / f"{name}.pt2"))
        result = module(*arguments)
    saved = {f"input_{i}": a for i, a in enumerate(before)}
    saved |= {f"after_{i}": a for i, a in enumerate(arguments)}  # caches are written to
    torch.jit.script(Holder({**saved, "result": result})).save(str(folder / f"{name}.pt"))


def main(folder: Path, source: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = bitnet_ops.load(source, kv_dtype=torch.float32).model
    c = model.config
    generator = torch.Generator().manual_seed(1)
    linear = model.model.layers[0].mlp.gate_proj
    x = torch.randn(5, c.hidden_size, generator=generator)
    export(linear, (x,), 0, folder, "linear")
    kv = torch.zeros(1, c.num_key_value_heads, POSITIONS, c.head_dim)
    arguments = (x[None], torch.tensor([3]), kv, kv.clone())
    export(Layer(model), arguments, 1, folder, "layer")
    library = next(p for p in torch.ops.loaded_libraries if "bitnet_ops" in p)
    (folder / "ops_path.txt").write_text(library)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
