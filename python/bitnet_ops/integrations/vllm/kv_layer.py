"""The KV cache of a whole model as one vLLM layer, and what vLLM wants to know of a backend for it.

vLLM allocates a cache for each layer that registers itself; this one registers for the whole model,
with the heads of all decoder layers beside each other, so that one op can be given the cache of
all of them. vLLM keeps blocks, tables, prefix caching and eviction. Contract: vllm 0.32.0
v1/attention/backend.py. It must not know weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from bitnet_ops.config import ModelConfig
from bitnet_ops.integrations.checkpoint import CheckpointError
from bitnet_ops.nn.kv_config import kept_of
from bitnet_ops.nn.kv_pool import PagedPool, best_layout

DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class StepMetadata:
    """Where the tokens of a step stand; tensors as ops.run_program takes them."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class StepMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Hands on what vLLM knows of a batch."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        m = common_attn_metadata
        n, tokens = m.num_reqs, m.num_actual_tokens
        return StepMetadata(
            tokens,
            m.query_start_loc[: n + 1],
            m.seq_lens[:n],
            m.block_table_tensor[:n],
            m.slot_mapping[:tokens],
        )


class StepBackend(AttentionBackend):
    """A backend without attention of its own: ops.run_program does all of it."""

    supported_dtypes = list(DTYPES)
    supported_kv_cache_dtypes = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "BITNET_STEP"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("bitnet: the whole decoder is one op, no layer attends by itself")

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class KVLayer(nn.Module, AttentionLayerBase, PagedPool):
    """Registers with vLLM under `name`, and views the memory that it gets as the op's pools.

    Attributes: key_pool, value_pool [layers, blocks, block_size, kv_heads, head_dim], once vLLM has
    bound memory. Nobody else reads it, so it lies in panels where they are possible. beside: what
    a step writes besides, by name: the states of a hybrid.
    """

    beside: Mapping[str, Tensor] = {}

    def __init__(self, config: ModelConfig, vllm_config: Any, name: str) -> None:
        super().__init__()
        self.config, self.name = config, name
        self.kv_cache = torch.tensor([])
        self.dtype = kv_cache_dtype_str_to_dtype(
            vllm_config.cache_config.cache_dtype, vllm_config.model_config
        )
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"bitnet: expected a KV cache of float32 or bfloat16, got {self.dtype}; leave "
                "--kv-cache-dtype at auto or bfloat16"
            )
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StepBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        c = self.config
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=kept_of(c)["key"].layers * c.num_key_value_heads,
            head_size=c.head_dim,
            dtype=self.dtype,
        )

    def caches(self) -> dict[str, Tensor]:
        return {**super().caches(), **self.beside}

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """kv_cache [blocks, layers * kv_heads, block_size, 2 head_dim], contiguous."""
        self.kv_cache = kv_cache
        keys, values = pools_of(kv_cache, self.config)
        self._caches = {"key": keys, "value": values}
        self.layout = best_layout(kv_cache.dtype, kv_cache.shape[2], self.config.head_dim)


def pools_of(kv_cache: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Key and value pools over vLLM's cache: in a block, of each head, all keys, then all values.

    vLLM's own CPU attention divides the memory of a block the same way.
    """
    keys, layers = kept_of(config)["key"]
    heads, dim = keys.shape
    blocks, _, block_size, _ = kv_cache.shape
    split = kv_cache.view(blocks, layers, heads, 2, block_size, dim)
    keys, values = split.permute(3, 1, 0, 4, 2, 5)
    return keys, values
