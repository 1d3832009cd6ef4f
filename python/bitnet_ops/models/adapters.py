"""The LoRA adapters of a decoder by name, as lines and tensors of its program.

Which of a batch's sequences has which adapter is told by name; the name None is that of sequences
that name none. It must not know files or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bitnet_ops.arguments import shown
from bitnet_ops.blocks.block import Line
from bitnet_ops.memory.arena import Arena, aligned
from bitnet_ops.models.composed import Side
from bitnet_ops.nn.digest import digest_of
from bitnet_ops.nn.lora import Adapter, LoraError, LoraWeight

_TILE_ROWS = 16
_STEP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scaled(adapter: Adapter, residual: float, added: frozenset[str]) -> Adapter:
    """`adapter` for a model that multiplies by `residual` what the projections `added` give."""
    if residual == 1:
        return adapter
    weights = {
        name: replace(lora, scaling=lora.scaling * residual) if name in added else lora
        for name, lora in adapter.weights.items()
    }
    return replace(adapter, weights=weights)


@dataclass(frozen=True)
class PackedAdapter:
    """The factors of an adapter by the name of their projection, of one dtype.

    weights: as the adapter has them, for ops that are composed. tensors: the same as a program
    reads them, `<projection>.a` [rank, K] and `<projection>.b` [ceil(N / 16), rank, 16].
    """

    weights: Mapping[str, LoraWeight]
    tensors: Mapping[str, Tensor]

    @cached_property
    def digest(self) -> bytes:
        factors = (
            (f"{name} {w.scaling}", t) for name, w in self.weights.items() for t in (w.a, w.b)
        )
        return digest_of(factors)

    @classmethod
    @torch.inference_mode(False)
    def of(cls, adapter: Adapter) -> PackedAdapter:
        """`adapter`, which fits the model (nn.lora.check_fits)."""
        dtypes = {f.dtype for lora in adapter.weights.values() for f in (lora.a, lora.b)}
        common = dtypes.pop() if len(dtypes) == 1 else torch.float32
        dtype = common if common in _STEP_DTYPES else torch.float32
        weights = {name: lora.to(dtype) for name, lora in adapter.weights.items()}
        factors: dict[str, Tensor] = {}
        for name, lora in weights.items():
            factors[f"{name}.a"], factors[f"{name}.b"] = lora.a, _tiles(lora.b)
        # every token reads all of it: huge pages
        memory = Arena(sum(aligned(factor.nbytes) for factor in factors.values()))
        tensors = {}
        for name, factor in factors.items():
            tensors[name] = memory.take(factor.shape, dtype)
            tensors[name].copy_(factor)
        return cls(weights, tensors)


def _tiles(b: Tensor) -> Tensor:
    """B [N, rank] in tiles of 16 rows [ceil(N / 16), rank, 16], filled up with zeros."""
    padded = torch.nn.functional.pad(b, (0, 0, 0, -len(b) % _TILE_ROWS))
    return padded.view(-1, _TILE_ROWS, b.shape[1]).transpose(1, 2)


class Adapters:
    """The loaded adapters of one model. Not to be changed while a thread runs the model."""

    def __init__(self) -> None:
        self._packed: dict[str | None, PackedAdapter] = {}
        self.version = 0  # how often they have changed

    def __repr__(self) -> str:
        return f"Adapters({', '.join(map(repr, self._packed))})"

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(self._packed)

    def add(self, name: str | None, packed: PackedAdapter) -> None:
        """Raises LoraError for a name that is taken."""
        if not isinstance(name, str | None) or name in self._packed:
            raise LoraError(
                f"lora: expected a new name, got {shown(name)}; remove that adapter first"
            )
        self._packed[name] = packed
        self.version += 1

    def remove(self, name: str | None) -> None:
        """Raises LoraError for a name that is unknown."""
        if not isinstance(name, str | None) or name not in self._packed:
            raise self._unknown(name)
        del self._packed[name]
        self.version += 1

    def check(self, name: str | None) -> None:
        """Raise LoraError unless `name` is None or a loaded adapter's."""
        if name is not None and (not isinstance(name, str) or name not in self._packed):
            raise self._unknown(name)

    def _unknown(self, name: str | None) -> LoraError:
        known = ", ".join(repr(n) for n in self._packed if n is not None) or "none is loaded"
        return LoraError(
            f"lora: expected the name of a loaded adapter ({known}), got {shown(name)}; "
            "add_adapter loads one"
        )

    def digest(self, name: str | None) -> bytes:
        """Of the adapter of sequences that name `name`; empty where they have none."""
        return self._packed[name].digest if name in self._packed else b""

    def lines(self) -> tuple[Line, ...]:
        """The lines `lora` of a program with these adapters."""
        return tuple(
            Line(
                "lora",
                {
                    "adapter": number,
                    "projection": name,
                    "a": f"lora.{number}.{name}.a",
                    "b": f"lora.{number}.{name}.b",
                    "scaling": lora.scaling,
                },
            )
            for number, packed in enumerate(self._packed.values())
            for name, lora in packed.weights.items()
        )

    def tensors(self) -> dict[str, Tensor]:
        """What these lines name."""
        return {
            f"lora.{number}.{name}": factor
            for number, packed in enumerate(self._packed.values())
            for name, factor in packed.tensors.items()
        }

    def _indices(self, names: Sequence[str | None]) -> list[int]:
        places = {name: i for i, name in enumerate(self._packed)}
        for name in names:
            self.check(name)
        return [places.get(name, -1) for name in names]

    def of_sequences(self, names: Sequence[str | None]) -> Tensor | None:
        """int64 [sequences]: the number of the adapter of each, -1: none; None where none has one.

        Raises LoraError for a name that is unknown.
        """
        if not self._packed and not any(names):
            return None
        indices = self._indices(names)
        return torch.tensor(indices) if max(indices, default=-1) >= 0 else None

    def sides(self, names: Sequence[str | None], owners: Tensor) -> list[Side]:
        """What runs beside the tokens of sequences with these adapters.

        owners: int64 [tokens], the sequence of each. Raises LoraError for a name that is unknown.
        """
        indices = self._indices(names)
        packed = list(self._packed.values())
        of_tokens = torch.tensor(indices, dtype=torch.int64)[owners]
        return [
            ((of_tokens == index).nonzero().flatten(), packed[index].weights)
            for index in sorted(set(indices) - {-1})
        ]
