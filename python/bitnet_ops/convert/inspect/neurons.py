"""How many neurons of a model's MLPs can only be zero, and how many of them its file leaves out.

It must not know kinds of files.
"""

from __future__ import annotations

from torch import Tensor

from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.config.neurons import KEY
from bitnet_ops.convert.inspect.sources import Contents

_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"


def dead_neurons(source: Contents) -> dict[str, int] | None:
    """`neurons` of all layers, `dead`: gate and up rows all zero, `left_out`: without weights."""
    gates = [name for name in source.entries if name.endswith(_GATE)]
    pairs = [(name, name.removesuffix(_GATE) + _UP) for name in gates]
    pairs = [pair for pair in pairs if _are_matrices(source, *pair)]
    if not pairs:
        return None
    stored = dead = 0
    for gate, up in pairs:
        zeros = _zero_rows(source, gate)
        stored += len(zeros)
        if zeros.any():
            dead += int((zeros & _zero_rows(source, up)).sum())
    left_out = _left_out(source, len(pairs))
    return {"neurons": stored + left_out, "dead": dead + left_out, "left_out": left_out}


def _are_matrices(source: Contents, gate: str, up: str) -> bool:
    """Of one shape; what a file holds need not be a model."""
    if up not in source.entries:
        return False
    shapes = source.entries[gate].shape, source.entries[up].shape
    return shapes[0] == shapes[1] and len(shapes[0]) == 2


def _zero_rows(source: Contents, name: str) -> Tensor:
    values = source.values(name)
    matrix = values.dense if values.codes is None else values.codes
    assert matrix is not None
    return ~(matrix != 0).any(dim=1)


def _left_out(source: Contents, layers: int) -> int:
    block = source.config.get(PRIVATE_BLOCK)
    places = block.get(KEY) if isinstance(block, dict) else None
    if not isinstance(places, list):
        return 0
    several = any(isinstance(place, list) for place in places)
    return sum(map(len, places)) if several else layers * len(places)
