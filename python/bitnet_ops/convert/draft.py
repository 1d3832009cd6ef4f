"""A draft head, on its way from a source into a model file: its values, its checks.

Its matrices were not trained to be ternary. They are stored as ternary digits (nn/digits.py), its
norms as float32, what they multiply by. It must not know files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import DIGITS, FEEDS, MATRICES, DraftConfig
from bitnet_ops.config.draft_shapes import draft_shapes
from bitnet_ops.convert.errors import listed
from bitnet_ops.errors import BitNetError
from bitnet_ops.nn.digits import digit_group, to_digits
from bitnet_ops.nn.packing import PackedWeight

GATE = "mtp.layers.0.mlp.gate_proj.weight"
_ROUNDED = {1: "ternary in groups, as they were", 3: "rounded to 27 levels a group"}
_CHUNK_ELEMS = 1 << 20  # bounds the temporaries of the digits, whatever a matrix's size
# parts of names that say what a head has beside a layer of its trunk's kind
_OTHERS = {
    "embed_tokens": "an embedding of its own",
    "shared_head_head": "an output head of its own",
    "shared_head.head": "an output head of its own",
    "lm_head": "an output head of its own",
    "experts": "a mixture of experts",
    "scale_inv": "another quantisation (FP8)",
}


class HeadError(BitNetError, ValueError):
    """A head that cannot be taken over. str(): `expected ..., got ...`, for a remark or an error.

    code: of the ConvertError, where the user has asked for the head.
    """

    def __init__(self, code: str, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, got {found}")
        self.code, self.expected, self.found = code, expected, found


@dataclass(frozen=True)
class Turned:
    """The rotation of a head's inputs: of a width its block and its signs, float32 [width]."""

    blocks: Mapping[int, int]
    signs: Mapping[int, Tensor]


@dataclass(frozen=True)
class DraftHead:
    """A head of a source: what is written of it, and its tensors by their names in a model file.

    shapes: of every tensor, logical [N, K] of a matrix. values: float, of a matrix [N, K], of a
    norm what it multiplies by. packed: the matrices where the source has them as digits already;
    `values` gives norms alone then. turned: what `config.rotated` means in the source. files: those
    that are read beside the source's own.
    """

    config: DraftConfig
    shapes: Mapping[str, tuple[int, ...]]
    values: Callable[[str], Tensor]
    packed: Callable[[str], PackedWeight] | None = None
    turned: Turned | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def digits(self, name: str) -> PackedWeight:
        """A matrix as it is stored. Raises ValueError for values that are not finite."""
        if self.packed is not None:
            return self.packed(name)
        return in_pieces(self.values(name), self.config.digits)

    def in_digits(self) -> DraftHead:
        """The same with as many digits a weight as its matrices need, which are read for it.

        One where the values of every group are -s, 0 and s, so that nothing is rounded.
        """
        if self.packed is not None:
            return self
        ternary = all(_is_ternary(self.values(name)) for name in self.shapes if is_matrix(name))
        digits = DIGITS[0] if ternary else DIGITS[-1]
        return dataclasses.replace(self, config=dataclasses.replace(self.config, digits=digits))

    def fed(self, feed: str | None) -> DraftHead:
        """The same with another `feed`; None: its own."""
        if feed is None:
            return self
        assert feed in FEEDS
        return dataclasses.replace(self, config=dataclasses.replace(self.config, feed=feed))

    def line(self, nbytes: int) -> str:
        """What a user must know of it."""
        turned = len(self.config.rotated)
        return (
            f"a draft head, from {self.config.origin}: {nbytes / 1e6:,.1f} MB, its "
            f"matrices {_ROUNDED[self.config.digits]}"
            + (f", {turned} of them rotated as the model's" if turned else "")
        )


def is_matrix(name: str) -> bool:
    """Whether a tensor of a head is stored as digits."""
    return name.removesuffix(".weight") in MATRICES


def in_pieces(weight: Tensor, digits: int) -> PackedWeight:
    """`to_digits`, some rows at a time."""
    step = max(1, _CHUNK_ELEMS // weight.shape[1])
    parts = [to_digits(piece, digits=digits) for piece in weight.split(step)]
    first = parts[0]
    rows, scales = (torch.cat(t) for t in zip(*((p.weight, p.scale) for p in parts), strict=True))
    return PackedWeight(
        rows, scales, len(weight), first.in_features, "canonical", first.group_size
    )  # fmt: skip


def _is_ternary(weight: Tensor) -> bool:
    """Whether each group holds one magnitude beside 0; some rows at a time, until one does not."""
    step = max(1, _CHUNK_ELEMS // weight.shape[1])
    for piece in weight.split(step):
        groups = piece.float().unflatten(1, (-1, digit_group(weight.shape[1]))).abs()
        if not ((groups == 0) | (groups == groups.amax(2, keepdim=True))).all():
            return False
    return True


def check_names(names: Iterable[str]) -> None:
    """Raise HeadError for names of a head, `mtp.` and so on, that is more than one layer."""
    names = list(names)
    for part, meaning in _OTHERS.items():
        if found := [name for name in names if part in name]:
            raise HeadError("draft-kind", "one layer over the model's own embedding and output "
                            "head", f"{meaning}: {listed(sorted(found))}")  # fmt: skip
    layers = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
    if len(layers) > 1:
        raise HeadError("draft-kind", "one layer that drafts tokens", str(len(layers)))


def check_shapes(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The width of a head's MLP. Raises HeadError for a head that is not one of `model`.

    shapes: of every tensor, by its name in a model file.
    """
    check_names(shapes)
    gate = shapes.get(GATE)
    if gate is None or len(gate) != 2:
        raise HeadError("draft-tensors", f"{GATE}, a matrix", "no such tensor")
    expected = draft_shapes(model, gate[0])
    for names, word in ((expected.keys() - shapes.keys(), "no "), (shapes.keys() - expected, "")):
        if names:
            whole = f"the {len(expected)} tensors of a layer and its head"
            raise HeadError("draft-tensors", whole, word + listed(sorted(names)))
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            found = str(list(shapes[name]))
            raise HeadError("draft-shape", f"{name} of shape {list(shape)}", found)
        if is_matrix(name):
            try:
                digit_group(shape[1])
            except ValueError:
                found = f"{shape[1]} in {name}"
                raise HeadError("draft-columns", "columns a multiple of 64", found) from None
    return gate[0]


def check_turned(head: DraftHead, model: ModelConfig, signs: Callable[[int], Tensor]) -> None:
    """Raise HeadError for a head whose rotation is not that of the trunk `model`.

    signs: of the trunk, for a width of an input.
    """
    if not head.config.rotated:
        return
    assert head.turned is not None
    for module in head.config.rotated:
        width = head.shapes[f"{module}.weight"][1]
        block = model.rotation.block(width) if model.rotation is not None else 0
        own = head.turned.blocks.get(width, 0)
        if not block or own != block:
            found = f"{own}" if block else f"{own} beside a model that does not rotate them"
            expected = f"inputs of {width} in {module} rotated in blocks of {block or 'none'}"
            raise HeadError("draft-rotation", expected, found)
        if not torch.equal(signs(width).flatten(), head.turned.signs[width].flatten()):
            expected = f"{module} rotated with the model's signs of width {width}"
            raise HeadError("draft-rotation", expected, "others")


def matrices(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    """(module, rows, columns) of every matrix of a head."""
    for name, shape in shapes.items():
        if is_matrix(name):
            yield name.removesuffix(".weight"), shape[0], shape[1]
