"""The LoRA adapters of a decoder by name, laid out as its steps read them.

An adapter's factors lie behind each other in one tensor, in the order of the layers' projections,
and once more as the adapter has them, for layers composed of single ops. Which of a batch's
sequences has which adapter is told by name; the name None is that of sequences that name none. It
must not know files or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.config import PROJECTIONS
from bitnet_ops.memory.arena import Arena
from bitnet_ops.nn.lora import Adapter, LoraError, LoraWeight

_TILE_ROWS = 16
_STEP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scaled(adapter: Adapter, residual: float) -> Adapter:
    """`adapter` for a model that multiplies by `residual` what attention and MLP give."""
    if residual == 1:
        return adapter
    added = PROJECTIONS[3], PROJECTIONS[6]
    weights = {
        name: replace(lora, scaling=lora.scaling * residual) if name.endswith(added) else lora
        for name, lora in adapter.weights.items()
    }
    return replace(adapter, weights=weights)


@dataclass(frozen=True)
class PackedAdapter:
    """weights F [n]: A and B of every adapted projection; ranks int64, scalings f32 [layers, 7].

    `layers`: the same by projection, for ops that are composed.
    """

    weights: Tensor
    ranks: Tensor
    scalings: Tensor
    layers: tuple[Mapping[str, LoraWeight], ...]

    @classmethod
    @torch.inference_mode(False)
    def of(cls, adapter: Adapter, num_layers: int) -> PackedAdapter:
        """`adapter`, which fits the model (nn.lora.check_fits)."""
        dtypes = {f.dtype for lora in adapter.weights.values() for f in (lora.a, lora.b)}
        common = dtypes.pop() if len(dtypes) == 1 else torch.float32
        dtype = common if common in _STEP_DTYPES else torch.float32
        layers = [
            {p: lora.to(dtype) for p in PROJECTIONS if (lora := adapter.weights.get(_name(i, p)))}
            for i in range(num_layers)
        ]
        factors = [
            factor.flatten()
            for layer in layers
            for lora in layer.values()
            for factor in (lora.a, _tiles(lora.b))
        ]
        # every token reads all of it: huge pages
        count = sum(factor.numel() for factor in factors)
        weights = Arena(count * dtype.itemsize).take((count,), dtype)
        if factors:
            torch.cat(factors, out=weights)
        pairs = [layer.get(p) for layer in layers for p in PROJECTIONS]
        shape = num_layers, len(PROJECTIONS)
        ranks = torch.tensor([len(lora.a) if lora else 0 for lora in pairs], dtype=torch.int64)
        scalings = torch.tensor(
            [lora.scaling if lora else 0.0 for lora in pairs], dtype=torch.float32
        )
        return cls(weights, ranks.view(shape), scalings.view(shape), tuple(layers))


def _name(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.{projection}"


def _tiles(b: Tensor) -> Tensor:
    """B [N, rank] in tiles of 16 rows [ceil(N / 16), rank, 16], filled up with zeros."""
    padded = torch.nn.functional.pad(b, (0, 0, 0, -len(b) % _TILE_ROWS))
    return padded.view(-1, _TILE_ROWS, b.shape[1]).transpose(1, 2)


# What runs beside a layer: the rows of its tokens (None: all) and the side paths by projection.
Side = tuple[Tensor | None, Mapping[str, LoraWeight]]


class Adapters:
    """The loaded adapters of one model. Not to be changed while a thread runs the model."""

    def __init__(self) -> None:
        self._packed: dict[str | None, PackedAdapter] = {}
        self._step: dict[str, Any] = {}  # the arguments that are the same for every step
        self.version = 0  # how often they have changed

    def __repr__(self) -> str:
        return f"Adapters({', '.join(map(repr, self._packed))})"

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(self._packed)

    def add(self, name: str | None, packed: PackedAdapter) -> None:
        """Raises LoraError for a name that is taken."""
        if name in self._packed:
            raise LoraError(f"lora: expected a new name, got {name!r}; remove that adapter first")
        self._packed[name] = packed
        self._gather()

    def remove(self, name: str | None) -> None:
        """Raises LoraError for a name that is unknown."""
        if name not in self._packed:
            raise self._unknown(name)
        del self._packed[name]
        self._gather()

    def check(self, name: str | None) -> None:
        """Raise LoraError unless `name` is None or a loaded adapter's."""
        if name is not None and name not in self._packed:
            raise self._unknown(name)

    def _unknown(self, name: str | None) -> LoraError:
        known = ", ".join(repr(n) for n in self._packed if n is not None) or "none is loaded"
        return LoraError(
            f"lora: expected the name of a loaded adapter ({known}), got {name!r}; "
            "add_adapter loads one"
        )

    def _gather(self) -> None:
        self.version += 1
        loaded = self._packed.values()
        self._step = {
            "lora_weights": [packed.weights for packed in loaded],
            "lora_ranks": torch.stack([p.ranks for p in loaded]) if loaded else None,
            "lora_scalings": torch.stack([p.scalings for p in loaded]) if loaded else None,
        }

    def _indices(self, names: Sequence[str | None]) -> list[int]:
        places = {name: i for i, name in enumerate(self._packed)}
        for name in names:
            self.check(name)
        return [places.get(name, -1) for name in names]

    def step_arguments(self, names: Sequence[str | None]) -> dict[str, Any]:
        """The lora_ arguments of a step of sequences with these adapters; none where none has one.

        Raises LoraError for a name that is unknown.
        """
        if not self._packed and not any(names):
            return {}
        indices = self._indices(names)
        if max(indices, default=-1) < 0:
            return {}
        return {**self._step, "lora_indices": torch.tensor(indices)}

    def sides(self, names: Sequence[str | None], owners: Tensor | None) -> list[list[Side]]:
        """By layer, what runs beside tokens of sequences with these adapters.

        owners: int64 [tokens], the sequence of each; None: all of `names` are the same.
        Raises LoraError for a name that is unknown.
        """
        indices = self._indices(names)
        used = sorted(set(indices) - {-1})
        packed = list(self._packed.values())
        if owners is None or not used:
            rows: dict[int, Tensor | None] = dict.fromkeys(used)
        else:
            of_tokens = torch.tensor(indices)[owners]
            rows = {i: (of_tokens == i).nonzero().flatten() for i in used}
        layers = len(packed[used[0]].layers) if used else 0
        return [[(rows[i], packed[i].layers[layer]) for i in used] for layer in range(layers)]
