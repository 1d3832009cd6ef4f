"""A listing bound to a decoder's tensors: what `ops.run_program` runs.

Tensors stay where their modules have them, so values that change in place are seen. A program that
is no longer that of its modules is bound anew by the decoder (nn/tracked.py). It must not know
token ids, owners of caches or sampling.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.blocks.block import names
from bitnet_ops.blocks.listing import KINDS, Listing
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
        caches, request = pool.caches(), batch.request(adapters)
        return ops.run_program(
            x,
            self._handle,
            "\n".join(caches),
            [*caches.values()],
            "\n".join(request),
            [*request.values()],
            self._features,
            pool.layout,
            batch.largest,
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
        block, formats = KINDS[line.kind], set()
        named: tuple[str, ...] = ()
        for keys in block.inputs:
            modules = {name: root.get_submodule(name) for name in names(line, keys)}
            if not _agree(modules.values()):
                return None
            for name, module in modules.items():
                assert isinstance(module, BitLinear)
                _add_projection(name, module, tensors, copied)
                if module.group_size:
                    formats.add(module.activation_format)
                if "sparsity" in line.keys and name == line.name("down"):
                    tensors[f"{name}.columns"] = columns_of(module.packed)
                    copied.append(module.weight)
            named = (*named, *(f"{name}." for name in modules))
        if len(formats) > 1:
            return None
        blocks.append(line.with_keys(activation_format=formats.pop()) if formats else line)
        for name, spec in block.tensors(line, listing.model).items():
            if name.startswith(named) or spec.may_be_ternary:
                continue
            if (dense := _float32(root, name)) is None:
                return None
            tensors[name] = dense
    if (weight := listing.blocks[-1].name("weight")) is not None:
        head = root.get_submodule(weight)
        if type(head) is not HeadWeight:
            return None
        tensors[f"{weight}.weight"] = head.weight
        if head.scale is not None:
            tensors[f"{weight}.scale"] = head.scale
        if head.signs is not None:
            tensors[f"{weight}.signs"] = head.signs
    return Program(replace(listing, blocks=tuple(blocks)), tensors, tuple(copied))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a ternary product and nothing else, but for a bias and a norm inside."""
    if type(module) is not BitLinear or module._modules.keys() - {"rms_norm"}:
        return False
    bias = module.bias
    return module.weight_scale.dtype == _FLOAT32 and (bias is None or bias.dtype == _FLOAT32)


def _agree(modules: Collection[nn.Module]) -> bool:
    """Whether C++ knows projections of the same tokens: plain ones, of one form.

    With scales of groups of one size, or all none, and the same signs, if any.
    """
    if not all(map(_is_plain, modules)):
        return False
    return len({(m.group_size, id(m.signs)) for m in modules}) <= 1


def _float32(root: nn.Module, name: str) -> Tensor | None:
    """The buffer of that name; None where there is none of float32."""
    module, _, own = name.rpartition(".")
    found = root.get_submodule(module)._buffers.get(own)
    return found if found is not None and found.dtype == _FLOAT32 else None


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
