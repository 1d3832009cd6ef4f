"""What a line of a listing is, and what a kind of block says about its lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.attention import AttentionPolicy

Value: TypeAlias = "str | int | float"
PAGE = 64  # positions that have common bounds, where attention chooses what it reads


@dataclass(frozen=True)
class Line:
    """One line of a program: its kind, and its keys in their order.

    biased: the keys of projections that have a bias, which a program's text does not say.
    """

    kind: str
    keys: Mapping[str, Value]
    biased: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.keys.items())])

    def name(self, key: str) -> str | None:
        """The name that `key` holds; None where the line has no such key."""
        value = self.keys.get(key)
        return None if value is None else str(value)

    def integer(self, key: str, otherwise: int = 0) -> int:
        return int(self.keys.get(key, otherwise))

    def number(self, key: str, otherwise: float = 1.0) -> float:
        return float(self.keys.get(key, otherwise))

    def with_keys(self, **keys: Value) -> Line:
        return replace(self, keys={**self.keys, **keys})


@dataclass(frozen=True)
class TensorSpec:
    """What a model needs under a name: kind "ternary" or "dense", and the logical shape.

    may_be_ternary: of a dense matrix, an embedding or a head: packed ternary weights do as well.
    """

    kind: str
    shape: tuple[int, ...]
    may_be_ternary: bool = False


@dataclass(frozen=True)
class Buffer:
    """Numbers that a line keeps between steps; every line of its kind has a layer of them.

    per: "position" or "page" (PAGE positions): kept in blocks, shape [heads, features]; "sequence":
        kept in slots.
    dtype: torch's name; None: the cache's, with its scales.
    rows: of a sequence's buffer that has rows in front of `shape`: how many, without those of
        drafts, of which each has one more; None: it has no rows.
    """

    name: str
    per: str
    shape: tuple[int, ...]
    dtype: str | None = None
    rows: int | None = None


class Tensors:
    """The tensors that the keys of a line name, in the order in which files have them."""

    def __init__(self, line: Line, model: Line) -> None:
        self.found: dict[str, TensorSpec] = {}
        self._line, self._inner_norms = line, "linear_norm_eps" in model.keys

    def norm(self, key: str, length: int) -> None:
        """Nothing where the line has no such key."""
        if key in self._line.keys:
            self.dense(key, length)

    def dense(self, key: str, *shape: int, suffix: str = ".weight") -> None:
        self.found[f"{self._line.keys[key]}{suffix}"] = TensorSpec("dense", shape)

    def matrix(self, key: str, *shape: int) -> None:
        """A dense matrix, or a ternary one."""
        self.found[f"{self._line.keys[key]}.weight"] = TensorSpec("dense", shape, True)

    def projection(self, key: str, rows: int, columns: int) -> None:
        """A ternary matrix, its bias, and the norm inside it; or `digits` ones side by side."""
        name, digits = str(self._line.keys[key]), self._line.integer("digits", 1)
        self.found[f"{name}.weight"] = TensorSpec("ternary", (rows, digits * columns))
        if key in self._line.biased:
            self.found[f"{name}.bias"] = TensorSpec("dense", (rows,))
        if self._inner_norms:
            self.found[f"{name}.rms_norm.weight"] = TensorSpec("dense", (columns,))


class Ops(Protocol):
    """What the maths of a block is made of: models/composed.py."""

    @property
    def ops(self) -> Any: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def ropes(self) -> Mapping[str, tuple[Tensor, float]]: ...
    @property
    def states(self) -> Mapping[str, Tensor]: ...
    @property
    def step(self) -> Any: ...
    @property
    def attend(self) -> Any: ...
    @property
    def store(self) -> Any: ...
    @property
    def embedded(self) -> Tensor: ...
    def sections(self, rope: str) -> Sequence[int]: ...
    def tensor(self, name: str) -> Tensor: ...
    def rounded(self, x: Tensor) -> Tensor: ...
    def norm(self, line: Line, key: str, x: Tensor, eps: str = "eps") -> Tensor: ...
    def project(self, line: Line, key: str, x: Tensor) -> Tensor: ...


class Block:
    """A kind of block. `kind`: of its lines.

    inputs: its keys of projections, those together that read the same tokens. added: the key of
    the projection whose result is added to the residual stream.
    """

    kind: ClassVar[str]
    inputs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    added: ClassVar[str | None] = None

    def line(self, c: ModelConfig, layer: int) -> Line:
        """Of a layer of a model."""
        raise NotImplementedError

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        """The tensors that a line names, in the order of files. `model`: the first line."""
        raise NotImplementedError

    def state(self, line: Line) -> tuple[Buffer, ...]:
        """What a line keeps between steps."""
        return ()

    def reads(self, line: Line) -> AttentionPolicy | None:
        """Which positions its tokens read of what it keeps for them; None: it keeps nothing."""
        return None

    def float_macs(self, line: Line) -> int:
        """Float multiply-adds of a token, whatever its position, beside the products."""
        return 0

    def input(self, line: Line, key: str, x: Tensor) -> Tensor:
        """What the projection `key` multiplies of its input x F [..., K]."""
        return x

    def run(self, c: Ops, line: Line, number: int, x: Tensor) -> Tensor:
        """x f32 [..., hidden] behind the block, by single ops. number: of its lines, from 0 on."""
        raise NotImplementedError


def names(line: Line, keys: Iterable[str]) -> list[str]:
    """The names that those of `keys` hold that the line has."""
    return [name for key in keys if (name := line.name(key)) is not None]
