"""An engine's own paged KV cache as the ops of this project take it.

Engines keep keys and values in a tensor a layer, in blocks of theirs. Here these become the pools
[layers, blocks, block_size, KV, D] of `ops.run_program`, and an engine's book-keeping becomes a
`StepBatch`. It must not import an engine, nor know models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops.integrations.states import EngineStates, state_steps
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import PagedPool

POOL_DTYPES = (torch.float32, torch.bfloat16)  # what engines store without scales of their own


class EnginePool(PagedPool):
    """Keys and values of all layers, read and written where the engine has them.

    key_pool, value_pool: float32 or bfloat16 [layers, blocks, block_size, KV, D] with any strides
    but a contiguous D. What `Decoder.step` asks of a pool, besides: no scales. recurrent: the
    states of a hybrid, whose pools of keys and values are those of its layers of attention.
    """

    def __init__(
        self, key_pool: Tensor, value_pool: Tensor, recurrent: EngineStates | None = None
    ) -> None:
        self.recurrent = recurrent
        states = recurrent.tensors if recurrent is not None else {}
        self._caches = {"key": key_pool, "value": value_pool, **states}

    @property
    def block_size(self) -> int:
        return self.key_pool.shape[2]


def stack_layers(layers: Sequence[Tensor]) -> Tensor:
    """One tensor [layers, ...] of zeros in the shape of an engine's tensors, one a layer.

    The caller hands `result[i]` back to the engine in the place of `layers[i]`, before anything is
    written: contents are not copied, so that what no token reaches stays without memory. Tensors
    that lie in one such tensor already are taken as they are. Raises ValueError unless all are
    alike, and for a dtype that the ops do not take.
    """
    first = layers[0]
    if any(x.shape != first.shape or x.dtype != first.dtype for x in layers):
        shapes = sorted({f"{x.dtype} {list(x.shape)}" for x in layers})
        raise ValueError(f"stack_layers: expected layers of one shape and dtype, got {shapes}")
    if first.dtype not in POOL_DTYPES:
        raise ValueError(
            f"stack_layers: expected a KV cache of float32 or bfloat16, got {first.dtype}; choose "
            "another KV cache dtype"
        )
    if _stacked(layers):
        size, strides = (len(layers), *first.shape), (first.numel(), *first.stride())
        return first.as_strided(size, strides)
    return torch.zeros((len(layers), *first.shape), dtype=first.dtype)


def _stacked(layers: Sequence[Tensor]) -> bool:
    first = layers[0]
    storage, step = first.untyped_storage().data_ptr(), first.numel()
    return all(
        x.is_contiguous()
        and x.untyped_storage().data_ptr() == storage
        and x.storage_offset() == first.storage_offset() + i * step
        for i, x in enumerate(layers)
    )


def in_blocks(pool: Tensor, block_size: int) -> Tensor:
    """[layers, slots, KV, D] -> [layers, blocks, block_size, KV, D]; slots divide by it."""
    return pool.unflatten(1, (-1, block_size))


def query_starts(new_tokens: Tensor) -> Tensor:
    """Where the tokens of each sequence begin, int64 [sequences + 1], of how many each has."""
    ends = new_tokens.to(torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def batch_of(
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    all_rows: bool = False,
    state_slots: Tensor | None = None,
    largest: int = 0,
) -> StepBatch:
    """New tokens of sequences, which begin at `starts`; logits of the last one each, or of all.

    state_slots: of a hybrid, the slot of each sequence's states. largest: as of StepBatch.
    """
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=block_table,
        logit_rows=torch.arange(len(token_ids)) if all_rows else starts[1:] - 1,
        state_steps=None if state_slots is None else state_steps(state_slots),
        largest=largest,
    )
