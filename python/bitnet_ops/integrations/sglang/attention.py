"""Our paged attention over SGLang's own pool, for any model of plain decoder layers.

Keys and values are written and read where SGLang has them, a slot being a block of one position;
torch_native gathers those of every request first. What our op does not do (logit caps, cross
attention, other pools) goes to torch_native, and so do SGLang's layers with a sliding window, which
may have pools of their own. Loaded when a backend is made.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.integrations import paged


class BitnetAttentionBackend(TorchNativeAttnBackend):
    """torch_native, but for the causal attention of plain decoders."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        # of the forward in hand: where its queries begin, and the slots of its requests
        self._where: tuple[Tensor, Tensor, Tensor] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        self._where = None
        if mode.is_target_verify() or not (mode.is_decode() or mode.is_extend()):
            return
        starts = torch.arange(len(lengths) + 1)
        if not mode.is_decode():
            starts = paged.query_starts(forward_batch.extend_seq_lens)
        table = self.req_to_token_pool.req_to_token[:, : int(lengths.max())]
        self._where = starts, lengths, table.index_select(0, forward_batch.req_pool_indices)

    def _applies(self, layer: Any, k: Tensor | None, save_kv_cache: bool) -> bool:
        return (
            self._where is not None
            and save_kv_cache
            and k is not None
            and layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and layer.qk_head_dim == layer.v_head_dim
            and layer.sliding_window_size in (None, -1)
            and not layer.logit_cap
            and not self.use_sliding_window_kv_pool
            and self.token_to_kv_pool.get_key_buffer(layer.layer_id).dtype in paged.POOL_DTYPES
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, slots: Tensor) -> Tensor:
        assert self._where is not None
        pool, head_dim = self.token_to_kv_pool, layer.qk_head_dim
        keys = pool.get_key_buffer(layer.layer_id).unsqueeze(1)
        values = pool.get_value_buffer(layer.layer_id).unsqueeze(1)
        shape = (-1, layer.tp_k_head_num, head_dim)
        ops.paged_cache_update(keys, values, k.view(shape), v.view(shape), slots)
        heads = q.reshape(-1, layer.tp_q_head_num, head_dim)
        out = ops.paged_attention(heads, keys, values, *self._where, layer.scaling)
        return out.view(len(out), -1)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if not self._applies(layer, k, save_kv_cache):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch.out_cache_loc)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if not self._applies(layer, k, save_kv_cache):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch.out_cache_loc)
