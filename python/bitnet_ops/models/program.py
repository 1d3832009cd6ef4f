"""A listing bound to a decoder's tensors: what `ops.model_step` runs.

Tensors stay where their modules have them, so values that change in place are seen. A program that
is no longer that of its modules is bound anew by the decoder (nn/tracked.py). It must not know
token ids, owners of caches or sampling.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.models.listing import (
    DENSE_KEYS,
    NORM_KEYS,
    PROJECTION_KEYS,
    VECTOR_KEYS,
    Line,
    Listing,
)
from bitnet_ops.nn.columns import columns_of
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import blocked_scales

if TYPE_CHECKING:
    from bitnet_ops.models.step_batch import StepBatch
    from bitnet_ops.nn.kv_pool import PagedPool

_FLOAT32 = torch.float32


class Program:
    """A listing whose names are bound to tensors; C++ keeps both until this object goes.

    Args:
        listing: the program.
        tensors: every tensor that it names.
        copied: tensors whose values `tensors` holds in another form; one that changes in place
            makes the program stale.
    """

    def __init__(
        self, listing: Listing, tensors: Mapping[str, Tensor], copied: tuple[Tensor, ...] = ()
    ) -> None:
        self.listing, self._copied = listing, copied
        # of a row of the result
        self._features = listing.blocks[-1].integer("vocab", listing.model.integer("hidden"))
        self._versions = _versions(copied)
        self._handle = ops.bind_program(str(listing), "\n".join(tensors), list(tensors.values()))
        release = weakref.finalize(self, ops.release_program, self._handle)
        release.atexit = False

    @property
    def stale(self) -> bool:
        """Whether something that was copied has changed since."""
        return bool(self._copied) and self._versions != _versions(self._copied)

    def step(
        self, x: Tensor, batch: StepBatch, pool: PagedPool, adapters: Tensor | None = None
    ) -> Tensor:
        """Embedded tokens f32 [tokens, hidden] -> logits f32 [rows, V]; the pool is written.

        Of a listing without a head's matrix: states f32 [rows, hidden].

        adapters: int64 [sequences], the number of each one's LoRA adapter, -1: none.
        """
        return ops.model_step(
            x,
            self._handle,
            pool.caches(),
            batch.positions,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.logit_rows,
            self._features,
            adapters,
            pool.layout,
            batch.state_steps,
            batch.largest,
            batch.draws,
        )


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    # an inference tensor counts no changes; outside of inference mode it cannot be changed
    return [0 if t.is_inference() else t._version for t in tensors]


def bind(
    listing: Listing,
    root: nn.Module,
    more: Mapping[str, Tensor],
) -> Program | None:
    """The program of `listing` over the modules of `root` that it names; None where it has none.

    C++ knows plain ternary projections, with a bias of float32 and a norm inside, and dense norms.
    Where another class of module stands, or something else lies inside a projection, ops have to be
    composed. more: tensors beside those of modules: frequencies, factors of adapters.
    """
    tensors: dict[str, Tensor] = dict(more)
    copied: list[Tensor] = []
    blocks = []
    for line in listing.blocks:
        formats = set()
        for key in PROJECTION_KEYS:
            if (name := line.name(key)) is None:
                continue
            module = root.get_submodule(name)
            if not _is_plain(module):
                return None
            assert isinstance(module, BitLinear)
            _add_projection(name, module, tensors, copied)
            if module.group_size:
                formats.add(module.activation_format)
            if key == "down" and "sparsity" in line.keys:
                tensors[f"{name}.columns"] = columns_of(module.packed)
                copied.append(module.weight)
        if len(formats) > 1 or not _stages_agree(line, root):
            return None
        blocks.append(line.with_keys(activation_format=formats.pop()) if formats else line)
        for key in NORM_KEYS:
            if (name := line.name(key)) is None:
                continue
            norm = root.get_submodule(name)
            if (weight := norm._buffers.get("weight")) is None or weight.dtype != _FLOAT32:
                return None
            tensors[f"{name}.weight"] = weight
        for key in (*DENSE_KEYS, *VECTOR_KEYS):
            if (name := line.name(key)) is None:
                continue
            whole = name if key in VECTOR_KEYS else f"{name}.weight"
            if (dense := root.get_buffer(whole)).dtype != _FLOAT32:
                return None
            tensors[whole] = dense
    if (name := listing.blocks[-1].name("weight")) is not None:
        head = root.get_submodule(name)
        if type(head) is not HeadWeight:
            return None
        tensors[f"{name}.weight"] = head.weight
        if head.scale is not None:
            tensors[f"{name}.scale"] = head.scale
        if head.signs is not None:
            tensors[f"{name}.signs"] = head.signs
    listing = Listing(listing.model, listing.ropes, tuple(blocks), listing.lora)
    return Program(listing, tensors, tuple(copied))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a ternary product and nothing else, but for a bias and a norm inside."""
    if type(module) is not BitLinear or module._modules.keys() - {"rms_norm"}:
        return False
    bias = module.bias
    return module.weight_scale.dtype == _FLOAT32 and (bias is None or bias.dtype == _FLOAT32)


def _stages_agree(line: Line, root: nn.Module) -> bool:
    """Whether projections of the same tokens have scales of groups of one size, or all none.

    And the same signs, if any.
    """
    for keys in (("q", "k", "v"), ("gate", "up"), ("qkv", "z")):
        names = [name for key in keys if (name := line.name(key)) is not None]
        found = {(m.group_size, id(m.signs)) for m in map(root.get_submodule, names)}
        if len(found) > 1:
            return False
    return True


def _add_projection(
    name: str, module: BitLinear, tensors: dict[str, Tensor], copied: list[Tensor]
) -> None:
    tensors[f"{name}.weight"] = module.weight
    scale = module.weight_scale
    if module.group_size and module.weight_format != "canonical":
        copied.append(scale)  # modules keep rows of scales, which files and state_dicts have
        scale = blocked_scales(module.packed)
    tensors[f"{name}.weight_scale"] = scale
    if module.bias is not None:
        tensors[f"{name}.bias"] = module.bias
    if module.signs is not None:
        tensors[f"{name}.signs"] = module.signs
    if "rms_norm" in module._modules:
        tensors[f"{name}.rms_norm.weight"] = module.get_buffer("rms_norm.weight")
