"""Finds neurons whose gate and up rows are all zero, and leaves out their weights.

Whatever the token, such a neuron is act(0) * 0 = 0: its rows of gate and up and its column of down
weigh nothing. In front of down stand norms that take a mean over all neurons, so intermediate_size
stays what it is and the file says which neurons are gone (config/neurons.py). Every layer leaves
out equally many, since a step has one width. Where down has scales of groups, its columns stay:
without some of them the others would stand in other groups. It must not know kinds of sources.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.neurons import KEY, WHOLE_DOWN, as_json, kept
from bitnet_ops.convert.source import Source, Ternary
from bitnet_ops.models import TensorSpec, expected_tensors

_GATE, _UP, _DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_ZEROS = 0x55  # a byte of canonical rows whose four weights are 0; padding is 0, too
_MOST_JSON = 1 << 19  # half of what a file's config may have


class DropDead:
    """The dead neurons of a source's layers; none where any layer has none.

    specs: of the tensors to write. block: what the private block of the config says of it.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._width = source, source.plan.config.intermediate_size
        self.remark: str | None = None
        self.config = source.plan.config
        self.specs: dict[str, TensorSpec] = source.plan.specs
        self.block: dict[str, Any] = {}
        self._whole_down = False
        dead = self._find()
        count = min(map(len, dead), default=0)
        dropped = tuple(tuple(places[:count]) for places in dead) if count else ()
        if not dropped or len(json.dumps(as_json(dropped))) > _MOST_JSON:
            return
        self.config = dataclasses.replace(
            self.config, dropped_neurons=dropped, whole_down=self._whole_down
        )
        self.specs = dict(expected_tensors(self.config))
        self.block = {KEY: as_json(dropped)} | ({WHOLE_DOWN: True} if self._whole_down else {})
        self._kept = [torch.tensor(kept(places, self._width)) for places in dropped]
        total, left = sum(map(len, dead)), sum(map(len, dropped))
        self.remark = (
            f"{total:,} of {self._width * len(dead):,} neurons have gate and up rows of zeros; "
            f"{left:,} were left out (--keep-dead keeps them)"
            + (", but for their columns of down, which has scales of groups" * self._whole_down)
        )

    def _find(self) -> list[list[int]]:
        """Of each layer the dead neurons; empty as soon as a layer has none."""
        config = self.config
        if config.dropped_neurons or any(name.startswith("mlp.") for name in config.biases):
            return []
        found: list[list[int]] = []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            zeros = self._zero_rows(prefix + _GATE)
            if zeros.any():
                zeros &= self._zero_rows(prefix + _UP)
            if not zeros.any() or zeros.all():
                return []
            if not self._whole_down:
                self._whole_down = self._source.ternary(prefix + _DOWN).group_size > 0
                self._source.release(prefix + _DOWN)
            found.append(zeros.nonzero().flatten().tolist())
        return found

    def _zero_rows(self, name: str) -> Tensor:
        zeros = (self._source.ternary(name).rows == _ZEROS).all(dim=1)
        self._source.release(name)
        return zeros

    def without(self, name: str, found: Ternary) -> Ternary:
        """The matrix `name` as it is written."""
        if not self.block or not name.endswith((_GATE, _UP, _DOWN)):
            return found
        places = self._kept[int(name.split(".")[2])]
        if name.endswith(_DOWN) and self._whole_down:
            return found
        if name.endswith(_DOWN):
            codes = ops.unpack(found.rows, self._width) if found.codes is None else found.codes
            codes = codes[:, places].contiguous()
            return dataclasses.replace(found, rows=ops.pack(codes), codes=codes)
        of_rows = found.group_size > 0 or len(found.scale) == self._width > 1
        scale = found.scale[places] if of_rows else found.scale
        less = None if found.codes is None else found.codes[places]
        return dataclasses.replace(found, rows=found.rows[places], codes=less, scale=scale)


def restored(name: str, rows: Tensor, config: ModelConfig) -> Tensor:
    """Canonical rows of a file's matrix `name`, zeros for the neurons that it leaves out."""
    if not config.dropped_neurons or not name.endswith((_GATE, _UP, _DOWN)):
        return rows
    if config.whole_down and name.endswith(_DOWN):
        return rows
    places = torch.tensor(kept(config.dropped_neurons[int(name.split(".")[2])],
                               config.intermediate_size))  # fmt: skip
    if not name.endswith(_DOWN):
        whole = rows.new_full((config.intermediate_size, rows.shape[1]), _ZEROS)
        return whole.index_copy(0, places, rows)
    codes = ops.unpack(rows, config.stored_neurons)
    wide = codes.new_zeros(len(codes), config.intermediate_size)
    return ops.pack(wide.index_copy(1, places, codes))
