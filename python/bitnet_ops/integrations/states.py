"""An engine's own slots of recurrent states as the ops of this project take them.

Engines that serve hybrids keep a tensor [layers, slots, ...] of each kind of state, and copy whole
slots: what a slot's numbers mean is the model's matter alone. So the step reads and writes its own
layout there, in place. It must not import an engine, nor know how slots are given out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.hybrid import DeltaNet
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_config import kept_of
from bitnet_ops.nn.kv_pool import PagedPool

_SLOTS_OF = "recurrent", "inputs"  # what is kept of drafts needs no memory where there are none


class EngineStates:
    """The states of a hybrid's layers, read and written where the engine has them.

    Args:
        config: of the model, which has Gated DeltaNet layers.
        recurrent: float32 [layers, slots, ...], value_heads * value_dim * key_dim numbers a slot.
        inputs: float32 [layers, slots, ...], (kernel - 1) * channels numbers a slot.
    The numbers of a layer and slot lie together, in any order of their dimensions; layers and slots
    have any strides. Raises ValueError for other tensors. Attribute `tensors`: views of them as
    `ops.run_program` takes them, [slots, layers, ...].
    """

    def __init__(self, config: ModelConfig, recurrent: Tensor, inputs: Tensor) -> None:
        kept = kept_of(config)
        given = dict(zip(_SLOTS_OF, (recurrent, inputs), strict=True))
        self.tensors: dict[str, Tensor] = {}
        for name, (buffer, layers) in kept.items():
            if buffer.per != "sequence":
                continue
            shape = buffer.shape if buffer.rows is None else (buffer.rows, *buffer.shape)
            if name in given:
                self.tensors[name] = slot_memory(name, given[name], layers, shape)
            elif buffer.rows == 0:
                self.tensors[name] = torch.empty(recurrent.shape[1], layers, *shape)
            else:
                raise ValueError(
                    f"EngineStates: expected a model that keeps {_SLOTS_OF}, got one with {name!r}"
                )
        if not self.tensors:
            raise ValueError("EngineStates: expected a model with recurrent layers, got none")
        if recurrent.shape[1] != inputs.shape[1]:
            raise ValueError(
                f"EngineStates: expected as many slots of inputs as of states, "
                f"{recurrent.shape[1]}, got {inputs.shape[1]}"
            )

    @property
    def slots(self) -> int:
        return len(self.tensors["recurrent"])

    def copy(self, source: int, target: int) -> None:
        """Slot `target` becomes a copy of slot `source`."""
        for tensor in self.tensors.values():
            tensor[target].copy_(tensor[source])


def slot_memory(name: str, tensor: Tensor, layers: int, shape: Sequence[int]) -> Tensor:
    """float32 [layers, slots, ...] as [slots, layers, *shape] over the same memory.

    Raises ValueError for another dtype, count of layers or size, and for numbers of a slot that do
    not lie together.
    """
    size = math.prod(shape)
    if tensor.dtype != torch.float32:
        raise ValueError(
            f"states: expected {name} of float32, got {tensor.dtype}; recurrent states of fewer "
            "bits are not implemented: choose float32 for them"
        )
    inner = math.prod(tensor.shape[2:])
    if tensor.dim() < 3 or tensor.shape[0] != layers or inner != size:
        raise ValueError(
            f"states: expected {name} [{layers}, slots, ...] with {size} numbers in a layer of a "
            f"slot, got {list(tensor.shape)}; the engine and the model file disagree"
        )
    reach = 1
    for stride, length in sorted(zip(tensor.stride()[2:], tensor.shape[2:], strict=True)):
        if length != 1 and stride != reach:
            raise ValueError(
                f"states: expected the numbers of a slot of {name} side by side, got strides "
                f"{list(tensor.stride())} of {list(tensor.shape)}"
            )
        reach *= length
    inside = torch.empty(tuple(shape), device="meta").stride()
    strides = (tensor.stride(1), tensor.stride(0), *inside)
    return tensor.as_strided((tensor.shape[1], layers, *shape), strides)


def sizes_of(net: DeltaNet) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of a layer of a slot as engines write them: of the convolution's inputs
    [channels, kernel - 1], of the state [value heads, value_dim, key_dim].
    """
    return (net.channels, net.kernel - 1), (net.value_heads, net.value_dim, net.key_dim)


def slot_bytes(net: DeltaNet) -> int:
    """Bytes of a slot, all layers together."""
    return 4 * len(net.layers) * sum(math.prod(shape) for shape in sizes_of(net))


def state_steps(slots: Tensor) -> Tensor:
    """`StepBatch.state_steps` int64 [sequences, 3] of slots [sequences], without drafts."""
    steps = slots.new_zeros((len(slots), 3), dtype=torch.int64)
    steps[:, 0] = slots
    return steps


# States on the way --------------------------------------------------------------------------------


class Track(NamedTuple):
    """The state of a sequence behind its first `length` positions, which is to go to `slot`."""

    sequence: int
    length: int
    slot: int


class Step(NamedTuple):
    """A part of a batch; which rows of the batch's logits it gives; what is due behind it."""

    batch: StepBatch
    rows: Tensor
    tracks: list[Track]


def steps_of(batch: StepBatch, tracks: Sequence[Track]) -> list[Step]:
    """The batch as one step, or as two where states are wanted behind tokens that are not the last.

    A step leaves a sequence with the state behind its last token. So sequences whose track lies
    inside are cut there: their first tokens make a step of their own, all else is the second. A
    token's result depends on neither. Raises ValueError for a track that is not behind one of its
    sequence's new tokens, and for two of one sequence.
    """
    begins, lengths = batch.query_start_loc, batch.seq_lens
    new = begins.diff()
    starts = lengths - new
    cuts = new.clone()  # new tokens of the first step
    seen: set[int] = set()
    for track in tracks:
        first, last = int(starts[track.sequence]), int(lengths[track.sequence])
        if not first < track.length <= last or track.sequence in seen:
            raise ValueError(
                f"steps_of: expected one track of sequence {track.sequence}, behind {first + 1} to "
                f"{last} positions, got {track.length}"
                + (" beside another" if track.sequence in seen else "")
            )
        seen.add(track.sequence)
        cuts[track.sequence] = track.length - first
    inside = cuts < new
    if not bool(inside.any()):
        return [Step(batch, torch.arange(len(batch.logit_rows)), list(tracks))]
    owners = torch.repeat_interleave(torch.arange(len(new)), new)
    offsets = torch.arange(len(owners)) - begins[:-1].repeat_interleave(new)
    early = inside[owners] & (offsets < cuts[owners])
    due = [[t for t in tracks if bool(inside[t.sequence]) == first] for first in (True, False)]
    members = torch.nonzero(inside)[:, 0], torch.arange(len(new))
    ends = starts + cuts, lengths
    parts = []
    for tokens, sequences, end, own in zip((early, ~early), members, ends, due, strict=True):
        parts.append(_part(batch, tokens, owners, sequences, end, own))
    return parts


def _part(
    batch: StepBatch, taken: Tensor, owners: Tensor, sequences: Tensor, ends: Tensor,
    tracks: list[Track],
) -> Step:  # fmt: skip
    """The step of the tokens where `taken` is true, all of `sequences`, which end at `ends`."""
    counts = torch.bincount(owners[taken], minlength=len(ends))[sequences]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    where = taken.cumsum(0) - 1  # of a token in the part
    wanted = taken[batch.logit_rows]
    names = batch.adapters
    part = replace(
        batch,
        token_ids=batch.token_ids[taken],
        positions=batch.positions[..., taken],
        slot_mapping=batch.slot_mapping[taken],
        query_start_loc=starts,
        seq_lens=ends[sequences].to(batch.seq_lens.dtype),
        block_table=batch.block_table[sequences],
        logit_rows=where[batch.logit_rows[wanted]],
        adapters=tuple(names[i] for i in sequences.tolist()) if names else (),
        state_steps=None if batch.state_steps is None else batch.state_steps[sequences],
    )
    return Step(part, torch.nonzero(wanted)[:, 0], tracks)


def run_tracked(
    step: Callable[[StepBatch, PagedPool], Tensor],
    batch: StepBatch,
    pool: PagedPool,
    states: EngineStates,
    tracks: Sequence[Track],
) -> Tensor:
    """The rows f32 [rows, n] that `step` gives of a batch, with the states of `tracks` kept.

    step: `Decoder.step` or `Decoder.step_states`. batch: with state_steps, without drafts.
    """
    assert batch.state_steps is not None
    found: list[tuple[Tensor, Tensor]] = []
    slots = batch.state_steps[:, 0].tolist()
    for part in steps_of(batch, tracks):
        found.append((part.rows, step(part.batch, pool)))
        for track in part.tracks:
            states.copy(slots[track.sequence], track.slot)
    if len(found) == 1:
        return found[0][1]
    result = torch.empty(len(batch.logit_rows), found[0][1].shape[1])
    for rows, values in found:
        result[rows] = values
    return result
