"""An MTP head beside a decoder: its modules, and the cache in which its program runs.

The decoder owns the head (`Decoder.set_draft_head`): keys and values of the head are the last layer
of the decoder's cache, which its own program writes (blocks/draft.py). The head's program reads and
extends them. It must not know requests or policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bitnet_ops.blocks.draft import HEAD, STATES
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import DraftConfig
from bitnet_ops.models.layer import DecoderLayer, Tensors, norm_weight
from bitnet_ops.nn.kv_pool import PagedPool
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import PackedWeight
from bitnet_ops.nn.tracked import Tracked, TrackedList

_NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden"


class DraftHead(Tracked):
    """The modules of a head: `fc`, `layers.0`, norms. `draft`: what its file says of it.

    tensors: by their names in a model file, "mtp.fc.weight", ...; matrices as digits.
    """

    def __init__(self, draft: DraftConfig, tensors: Tensors) -> None:
        super().__init__()
        self.draft = draft
        fc = tensors[f"{HEAD}fc.weight"]
        assert isinstance(fc, PackedWeight)
        self.fc = BitLinear.from_packed(fc)
        self.norm = norm_weight(tensors[f"{HEAD}norm.weight"])
        for name in _NORMS:
            self.add_module(name, norm_weight(tensors[f"{HEAD}{name}.weight"]))
        layer = f"{HEAD}layers.0."
        of_layer = {n.removeprefix(layer): t for n, t in tensors.items() if n.startswith(layer)}
        self.layers = TrackedList([DecoderLayer(of_layer, {})])

    def rotate(self, signs: Mapping[int, Tensor]) -> None:
        """Turn the input of the modules that are rotated by `signs` [K / block, block] of width K.

        A matrix of digits reads its input several times, side by side: so do the signs.
        """
        copies = {w: s.repeat(self.draft.digits, 1) for w, s in signs.items()}
        for name, module in self.named_modules(prefix=HEAD.rstrip(".")):
            if name in self.draft.rotated and isinstance(module, BitLinear):
                module.signs = copies[module.in_features // self.draft.digits]


def with_draft(config: ModelConfig, draft: DraftConfig | None) -> ModelConfig:
    """The config of a model whose cache holds what such a head keeps."""
    return config if draft is None else replace(config, draft=draft)


class DraftPool(PagedPool):
    """The part of a pool that the program of a head reads and writes.

    The last layer of keys and values, and `states` float32 [n, hidden] of n sequences.
    """

    def __init__(self, pool: PagedPool) -> None:
        self._pool, self.layout = pool, pool.layout
        self._whole: Mapping[str, Tensor] = {}

    def of(self, states: Tensor) -> DraftPool:
        """Itself, with these states."""
        if self._whole is not self._pool._caches:  # a pool that grows has new tensors
            self._whole = self._pool._caches
            self._caches = {n: t[-1:] for n, t in self._whole.items() if n != "key_bounds"}
        self._states = states[:, None, None].contiguous()
        return self

    def caches(self) -> dict[str, Tensor]:
        return {**self._caches, STATES: self._states}


def keeps_drafts(pool: PagedPool) -> bool:
    """Whether a step over this pool makes keys and values of a head."""
    return pool.states is not None and STATES in pool.states.tensors


def kept_states(pool: PagedPool, slots: list[int], replays: list[int]) -> Tensor:
    """The newest states f32 [n, hidden] of the sequences in `slots`, a copy."""
    assert pool.states is not None
    states = pool.states.tensors[STATES]
    if len(slots) == 1:  # as one row, without the time that indices take
        return states[slots[0] : slots[0] + 1, 0, replays[0]].clone()
    return states[torch.tensor(slots), 0, torch.tensor(replays)]
