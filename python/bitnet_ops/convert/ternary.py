"""One projection of a checkpoint -> canonical packed weight and its multiplying scale.

The data half of the converter: reads a tensor, checks every value, ternarises or re-packs. It must
not know files or configs beyond the Scheme and the logical shape it is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bitnet_ops import ops
from bitnet_ops.config.scheme import Scheme
from bitnet_ops.convert.errors import reject
from bitnet_ops.convert.source import Uneven
from bitnet_ops.errors import counted
from bitnet_ops.nn.packing import BLOCK, MIN_SCALE, multiplying_scale, unpack_hf
from bitnet_ops.nn.storage import GROUP_SIZES

SPREAD = 2.0**-7  # of the magnitudes of a group, relative; a few published groups have 0.005
_CHUNK_ELEMS = 1 << 22  # bounds the temporaries of the checks, whatever a tensor's size


def first_non_finite(tensor: torch.Tensor) -> int | None:
    """The flat index of the first NaN or infinity, or None."""
    if tensor.numel() == 0 or _all_finite(tensor):
        return None
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMS):
        bad = ~torch.isfinite(flat[start : start + _CHUNK_ELEMS])
        if bad.any():
            return start + int(bad.nonzero()[0])
    return None


def _all_finite(tensor: torch.Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # one pass without temporaries; NaN spreads into both
    return bool(torch.isfinite(low) and torch.isfinite(high))


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Reject a tensor with a NaN or an infinity."""
    where = first_non_finite(tensor)
    if where is not None:
        value = tensor.reshape(-1)[where].item()
        reject("non-finite", f"finite values in {name}", f"{value} at element {where}")


def from_packed(name: str, packed: torch.Tensor, out_features: int) -> torch.Tensor:
    """uint8 [N/4, K] in contiguous quarters -> codes int8 [N, K]."""
    # Code 3 is the pair of bits 11: a bit and its upper neighbour both set.
    bad = (packed & (packed >> 1) & 0x55) != 0
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        reject(
            "code-3",
            f"codes 0, 1, 2 in {name}",
            f"code 3 in byte [{row}, {column}] = 0x{int(packed[row, column]):02x}",
            "the file is damaged or not packed by transformers",
        )
    return unpack_hf(packed, out_features)


def packed_scale(name: str, weight_scale: torch.Tensor, scheme: Scheme) -> float:
    """The multiplying scale that belongs to the packed weight `name`."""
    value = float(weight_scale.float().reshape(()))
    if not (0.0 < value < float("inf")):
        reject("bad-scale", f"a finite {name}_scale above zero", str(value))
    try:
        return float(multiplying_scale(weight_scale, scheme.linear_class))
    except ValueError as error:  # a subnormal reciprocal overflows when it is inverted
        reject("bad-scale", f"{name}_scale that can be inverted", f"{value}: {error}")


def from_masters(
    name: str, masters: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, float, str | None]:
    """Floating [N, K] -> (codes int8 [N, K], absmean scale, a remark or None)."""
    check_masters(name, masters, scheme)
    codes, scale = ops.quantize_weights(masters)
    remark = None
    if not torch.count_nonzero(codes):
        remark = f"{name} is ternarised to zeros alone"
    elif _already_ternary(masters, codes):
        remark = f"{name} holds one magnitude beside zero; its absmean differs from that magnitude"
    return codes, float(scale), remark


def check_masters(name: str, masters: torch.Tensor, scheme: Scheme) -> None:
    """Reject what is not finite, and on the caller's word alone what has its scales already.

    Weights of one bit, -s and s, have them as ternary ones do.
    """
    check_finite(name, masters)
    if scheme.assumed and masters.any() and _scales_of(masters.abs()) is not None:
        reject(
            "already-ternary",
            f"real-valued masters in {name}",
            "only one magnitude beside zero in every row or group of weights: they have their "
            "scales already",
            "taking their mean again would change them",
        )


def _already_ternary(masters: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether all non-zero masters have one magnitude, and some are zero (cheap test first)."""
    row = next(row for row in range(len(codes)) if torch.count_nonzero(codes[row]))
    magnitude = masters[row, int(codes[row].abs().argmax())].abs()
    for row in masters:
        size = row.abs()
        if not torch.equal(
            (size == 0) | (size == magnitude), torch.ones_like(size, dtype=torch.bool)
        ):
            return False
    return bool((codes == 0).any())


_PIECE = 1 << 18  # weights
_LONG_ROW, _MANY = 64, 4096  # weights that are not alike by chance
_MIN_ZEROS, _MAX_ALIKE = 0.05, 0.9  # shares; trained matrices have 0.2 to 0.7 zeros, 0.5 alike
_MAX_EMPTY = 0.25  # share of the rows of an embedding


def implausible(name: str, codes: torch.Tensor, unwritten: int) -> str | None:
    """What no training gives, for people: the end of a file that was never written is zero bytes,
    and packed zero bytes are weights of -1. A matrix of zeros alone is possible.

    `unwritten`: rows of zero bytes in the source that say nothing of their weights.
    """
    rows, columns = codes.shape
    alike = minus = plus = 0
    for part in codes.split(max(1, _PIECE // columns)):  # temporaries of a piece alone
        low, high = torch.aminmax(part, dim=1)
        alike += int(((low == high) & (low != 0)).sum())
        minus += int((part == -1).sum())
        plus += int((part == 1).sum())
    found = None
    if unwritten:
        found = f"{unwritten} of {rows} rows of zero bytes"
    elif alike and columns >= _LONG_ROW:
        found = f"{alike} of {rows} rows of one value"
    elif (size := codes.numel()) >= _MANY and (
        minus + plus > (1 - _MIN_ZEROS) * size or max(minus, plus) > _MAX_ALIKE * size
    ):
        found = f"{minus / size:.1%} weights of -1 and {plus / size:.1%} of +1"
    if found is None:
        return None
    return f"{name} has {found}"


def implausible_dense(name: str, tensor: torch.Tensor, norm_offset: float) -> str | None:
    """The same of a norm, most of which is zero, and of an embedding or a head with many rows of
    zeros. Some are filled up to a round number of rows.

    `norm_offset`: of the family; where a norm multiplies by more than is stored, zeros are usual.
    """
    if tensor.dim() == 2:
        rows, empty = len(tensor), int((~tensor.any(dim=1)).sum())
        return f"{name} has {empty} of {rows} rows of zeros" if empty > _MAX_EMPTY * rows else None
    if not name.endswith("norm.weight") or norm_offset:
        return None
    zeros = tensor.numel() - int(torch.count_nonzero(tensor))
    if 2 * zeros <= tensor.numel():
        return None
    return f"{name} has {zeros} zeros among {tensor.numel()} weights of a norm"


def damage(warnings: list[str]) -> list[str]:
    """One sentence for all that `implausible` and `implausible_dense` have found, if anything."""
    if not warnings:
        return []
    others = counted(len(warnings) - 1, "more tensor is", "more tensors are")
    more = f"; {others} like it" if len(warnings) > 1 else ""
    return [f"{warnings[0]}{more}: the source is damaged, such as by a download that broke off"]


MASTERS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights to be ternarised


def looks_ternary(dense: torch.Tensor) -> bool:
    """Whether floating weights are code * scale, with a scale a matrix, a row or a group.

    What is no matrix, or an empty one, is not: whoever needs it as one rejects it by name.
    """
    if dense.dim() != 2 or not dense.numel() or dense.dtype not in MASTERS:
        return False
    magnitude = dense.abs()
    return _scales_of(magnitude) is not None and bool((magnitude == 0).any())


def from_ternary(
    name: str, dense: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, Uneven | None]:
    """Floating [N, K] of -s, 0 and s -> (codes int8 [N, K], scales, group size, uneven).

    Every value is looked at. Scales are f32 [1], [N] (one a row; size 0) or, with size 128 or else
    64, [N, groups]. A group may hold magnitudes that differ by SPREAD: the largest is its scale, as
    of the packers of Q2_0.
    """
    check_finite(name, dense)
    magnitude = dense.abs()
    largest = magnitude.amax()
    if largest == 0:
        none = torch.tensor([MIN_SCALE], dtype=torch.float32)
        return torch.zeros(dense.shape, dtype=torch.int8), none, 0, None
    found = _scales_of(magnitude)
    if found is None:
        reject(
            "not-ternary",
            f"only -s, 0 and s in every group of {GROUP_SIZES[-1]} weights of a row of {name}",
            _example(dense),
            "if these are masters, convert with --assume-online",
        )
    scales, group_size = found
    scales = torch.where(scales == 0, largest, scales).float()  # of a part without weights: any
    return dense.sign().to(torch.int8), scales, group_size, uneven_of(dense, group_size or BLOCK)


def _example(dense: torch.Tensor) -> str:
    """The first value that is too far below the largest of its group."""
    size = GROUP_SIZES[-1]
    groups = _groups(dense.abs(), size)
    largest = groups.amax(dim=2, keepdim=True)
    bad = ((groups != 0) & (groups < largest * (1 - SPREAD))).flatten(1)
    row, column = bad.nonzero()[0].tolist()
    beside = float(largest[row, column // size])
    return f"{float(dense[row, column]):.6g} at [{row}, {column}] beside {beside:.6g}"


def uneven_of(dense: torch.Tensor, size: int = BLOCK) -> Uneven | None:
    """The groups of a ternary matrix with two magnitudes; None where there are none."""
    groups = _groups(dense.abs(), size)
    largest = groups.amax(dim=2, keepdim=True)
    uneven = ((groups != 0) & (groups != largest)).any(dim=2)
    if not uneven.any():
        return None
    found, scales = groups[uneven].double(), largest[uneven].double()
    errors = torch.where(found == 0, 0.0, scales - found)
    return Uneven(int(uneven.sum()), float(errors.max()), float((errors / scales).max()))


def _groups(magnitude: torch.Tensor, size: int) -> torch.Tensor:
    """[N, K] -> [N, groups, size], filled up with 0."""
    padded = F.pad(magnitude, (0, -magnitude.shape[1] % size))
    return padded.view(len(magnitude), -1, size)


def _scales_of(magnitude: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The fewest scales that explain all magnitudes, [1], [N] or [N, groups]; None if none do.

    With how many weights of a row share one, 0 where all do.
    """
    by_row = magnitude.amax(dim=1)
    largest = by_row.amax()
    if ((magnitude == 0) | (magnitude == largest)).all():
        return largest.reshape(1), 0
    if ((magnitude == 0) | (magnitude == by_row.unsqueeze(1))).all():
        return by_row, 0
    for size in GROUP_SIZES:
        groups = _groups(magnitude, size)
        by_group = groups.amax(dim=2)
        if ((groups == 0) | (groups >= by_group.unsqueeze(2) * (1 - SPREAD))).all():
            return by_group, size
    return None
