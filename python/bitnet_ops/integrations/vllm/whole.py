"""A whole decoder in one op, behind vLLM's interface of a model and over its paged KV cache.

vLLM schedules, samples and keeps the cache; `Decoder.step_states` reads and writes that cache in
place. On one rank. Contract: vllm 0.32.0 model_executor/models/interfaces_base.py. It must not know
where weights come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from bitnet_ops.config import ModelConfig
from bitnet_ops.integrations.checkpoint import CheckpointError
from bitnet_ops.integrations.vllm.kv_layer import KVLayer
from bitnet_ops.integrations.vllm.seeds import wind_back_by_state
from bitnet_ops.models.decoder import Decoder
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.storage import DEFAULT_HEAD_FORMAT, check_head_format

HEAD_OPTION = "bitnet_head_format"  # of --additional-config


def float32_default(function: Callable) -> Callable:
    """vLLM loads with the model's dtype as torch's default; scales and angles are float32."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return called


class WholeDecoder(nn.Module):
    """What vLLM asks of a model; a sub-class loads the weights into `decoder`.

    Args:
        config: the architecture.
        vllm_config: vLLM's.
    """

    def __init__(self, config: ModelConfig, vllm_config: Any) -> None:
        super().__init__()
        check_parallel(vllm_config.parallel_config)
        _check_drafts(vllm_config)
        self.config, self.dtype = config, vllm_config.model_config.dtype
        options = vllm_config.additional_config or {}
        self.head_format = options.get(HEAD_OPTION, DEFAULT_HEAD_FORMAT)
        check_head_format(self.head_format)
        self.kv = KVLayer(config, vllm_config, "model.layers.0.kv")
        self.decoder: Decoder | None = None
        wind_back_by_state(CPUModelRunner)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embedded tokens f32 [tokens, hidden]."""
        return self._loaded().model.embed_tokens.embed(input_ids.long())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states f32 [tokens, hidden] after the last norm; the KV cache is written."""
        if inputs_embeds is not None:
            raise ValueError("bitnet: expected token ids, got embeddings: not supported")
        decoder, metadata = self._loaded(), get_forward_context().attn_metadata
        if metadata is None:  # vLLM tries how much memory a step needs, without a cache
            return torch.zeros(len(input_ids), self.config.hidden_size, dtype=torch.float32)
        m = metadata[self.kv.name]
        n = m.num_actual_tokens
        batch = StepBatch(
            token_ids=input_ids[:n].long(),
            positions=positions[:n],
            slot_mapping=m.slot_mapping,
            query_start_loc=m.query_start_loc,
            seq_lens=m.seq_lens,
            block_table=m.block_table,
            logit_rows=torch.arange(n),
            state_steps=self._state_steps(metadata),
        )
        # vLLM takes the head's product apart from the step, on the rows that it wants.
        states = decoder.step_states(batch, self.kv)
        if n == len(input_ids):
            return states
        return torch.cat([states, states.new_zeros(len(input_ids) - n, states.shape[1])])

    def _state_steps(self, metadata: Any) -> Tensor | None:
        """`StepBatch.state_steps`: of a model without recurrent layers None."""
        return None

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits f32 [rows, vocabulary]."""
        return self._loaded().head(hidden_states)

    def _loaded(self) -> Decoder:
        if self.decoder is None:
            raise _nothing_loaded()
        return self.decoder


def check_parallel(parallel: Any) -> None:
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if sizes != (1, 1):
        raise CheckpointError(
            f"bitnet: expected tensor- and pipeline-parallel size 1, got {sizes[0]} and "
            f"{sizes[1]}; the whole decoder is one op, and BitNet's sub-norms span all ranks: use "
            "more threads instead; Llama- and Qwen-type models run split in vLLM's own classes"
        )


def _check_drafts(vllm_config: Any) -> None:
    asked = getattr(vllm_config, "speculative_config", None)
    if asked is not None:
        raise CheckpointError(
            f"bitnet: expected no --speculative-config, got {getattr(asked, 'method', asked)!r}; "
            "drafts are not verified in vLLM: leave it out, or use bitnet-ops serve, which drafts "
            "by itself"
        )


def _nothing_loaded() -> CheckpointError:
    return CheckpointError(
        "bitnet: expected a checkpoint's weights, got none; --load-format dummy is not supported: "
        "use `bitnet-ops dummy`, or --model-impl transformers"
    )
