"""The part of a proof that is about a draft head: the file's against its source's.

Digits are put together here by arithmetic of its own. It must not know how they were made.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.convert.draft import DraftHead
from bitnet_ops.loading.draft import read_draft_head
from bitnet_ops.nn.packing import PackedWeight

# of a step between two levels of a group: half of it by rounding, the rest by float32
MAX_STEPS = 0.501
_ROWS = 1024  # of a matrix at a time


@dataclass
class DraftComparison:
    """largest_error: of a weight, in steps between levels of its group. why_not: not compared."""

    tensors: int = 0
    weights: int = 0
    largest_error: float = 0.0
    norms_different: int = 0
    why_not: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        return dataclasses.asdict(self)

    def failures(self) -> list[str]:
        """One sentence for every bound that is broken; NaN breaks them."""
        found = []
        if not self.largest_error <= MAX_STEPS:
            found.append(
                f"a weight of the draft head off by {self.largest_error:.3g} steps of "
                f"its group (at most {MAX_STEPS})"
            )
        if self.norms_different:
            found.append(f"{self.norms_different} norms of the draft head differ")
        return found


def compare_draft(source: DraftHead | None, file: Path) -> DraftComparison | None:
    """The head in the model file `file` with that of its source; None where it has none."""
    found = read_draft_head(file)
    if found is None:
        return None
    if source is None:
        return DraftComparison(why_not="it came from another model: name that by --draft-from")
    result, (config, tensors) = DraftComparison(), found
    for name, stored in tensors.items():
        given = source.values(name).float()
        result.tensors += 1
        if isinstance(stored, PackedWeight):
            result.weights += given.numel()
            result.largest_error = max(
                result.largest_error, _largest_error(stored, given, config.digits)
            )
        else:
            result.norms_different += not torch.equal(stored, given)
    return result


def _largest_error(stored: PackedWeight, given: Tensor, digits: int) -> float:
    """Of a weight, in steps of its group; infinite where a group of zeros is not one."""
    size, largest = stored.group_size, 0.0
    for begin in range(0, len(given), _ROWS):
        part = slice(begin, begin + _ROWS)
        codes = ops.unpack(stored.weight[part], stored.in_features).double()
        scales = stored.scale[part].double()
        parts = codes.unflatten(1, (scales.shape[1], size)) * scales.unsqueeze(2)
        values = parts.flatten(1).unflatten(1, (digits, -1)).sum(1)
        groups = given[part].double().unflatten(1, (-1, size))
        step = groups.abs().amax(2, keepdim=True) / ((3**digits - 1) // 2)
        off = (values.unflatten(1, (-1, size)) - groups).abs()
        largest = max(largest, float(torch.where(off == 0, 0.0, off / step).max()))
    return largest
