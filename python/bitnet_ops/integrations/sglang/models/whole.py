"""BitnetOpsForCausalLM: a converted model of any family, in SGLang, in one op a forward.

The config.json that the launcher writes (`sglang/serving.py`) names this class, or that of hybrids,
and a model.bin. Weights are loaded as `bitnet_ops.load` loads them; keys and values lie in SGLang's
own pool, recurrent states in its slots, so its scheduler, prefix cache and chunked prompts work as
ever. Loaded by SGLang's registry only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from bitnet_ops.integrations import paged
from bitnet_ops.integrations.checkpoint import CheckpointError, check_activation_dtype
from bitnet_ops.integrations.sglang.hybrid import pin_nothing
from bitnet_ops.integrations.sglang.serving import head_format, model_file
from bitnet_ops.integrations.states import EngineStates, Track, run_tracked
from bitnet_ops.loading.weights import load_model
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import StepBatch


class _Head:
    """The output head as SGLang's logits processor takes one that has no `weight`.

    No module, for SGLang would look for its parameters, and for what to do after loading.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.quant_method = decoder, self

    def apply(self, layer: object, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits f32 [rows, V] of hidden states [rows, hidden]."""
        del layer, bias
        return self.decoder.head(x)


class BitnetOpsForCausalLM(nn.Module):
    """The decoder of bitnet_ops behind SGLang's interface of a model; one rank."""

    # SGLang's loader is to look for our file, not for a checkpoint's; it is read by load_weights.
    allow_patterns_overrides = ["model.bin"]
    fall_back_to_pt_during_load = False

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        del prefix
        parallel = get_parallel()
        if parallel.tp_size > 1 or parallel.pp_size > 1:
            raise CheckpointError(
                "bitnet: expected tensor- and pipeline-parallel size 1, got "
                f"{parallel.tp_size} and {parallel.pp_size}; a converted model runs on one rank: "
                "serve the Hugging Face checkpoint of a Llama-type model instead, or run the whole "
                "model several times with --dp 2"
            )
        self.config, self.quant_config = config, quant_config
        self.dtype = torch.get_default_dtype()
        check_activation_dtype(self.dtype)
        self.logits_processor = LogitsProcessor(config)
        self._head: _Head | None = None  # of the loaded model
        self._pools: tuple[Any, paged.EnginePool] | None = None

    @property
    def decoder(self) -> Decoder:
        assert self._head is not None, "load_weights comes first"
        return self._head.decoder

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the model file that config.json names; SGLang's iterator is not asked."""
        del weights
        file = model_file(self.config)
        decoder = load_model(file, self.dtype, head_format=head_format(self.config))
        self._head = _Head(decoder)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
    ) -> Any:
        """Logits as SGLang's logits processor returns them; K and V enter SGLang's pool."""
        if input_embeds is not None:
            raise ValueError(
                "bitnet: expected token ids, got input_embeds; a converted model takes none"
            )
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return LogitsProcessorOutput(next_token_logits=torch.empty(0, self.config.vocab_size))
        pool = self._pool()
        hidden = bool(forward_batch.return_logprob and not mode.is_decode())
        hidden |= bool(forward_batch.capture_hidden_mode.need_capture())
        batch = _batch(input_ids, positions, forward_batch, all_rows=hidden)
        step = self.decoder.step_states if hidden else self.decoder.step
        if pool.recurrent is None:
            rows = step(batch, pool)
        else:
            rows = run_tracked(step, batch, pool, pool.recurrent, _tracks(forward_batch))
        if hidden:
            return self.logits_processor(input_ids, rows, self._head, forward_batch)
        return LogitsProcessorOutput(next_token_logits=rows)

    def _pool(self) -> paged.EnginePool:
        """SGLang's K and V of all layers, which become one tensor each before the first write."""
        owner = get_attn_backend().token_to_kv_pool
        owner = getattr(owner, "full_kv_pool", owner)  # of a hybrid's layers of attention
        if self._pools is None or self._pools[0] is not owner:
            stacked: list[Tensor] = []
            for name in ("k_buffer", "v_buffer"):
                whole = paged.stack_layers(getattr(owner, name))
                setattr(owner, name, list(whole.unbind(0)))
                stacked.append(paged.in_blocks(whole, 1))
            owner._init_data_ptrs_and_strides()
            self._pools = owner, paged.EnginePool(stacked[0], stacked[1], self._states())
        return self._pools[1]

    def _states(self) -> EngineStates | None:
        """SGLang's slots of recurrent states, if the model has any."""
        if self.decoder.config.delta_net is None:
            return None
        pool = get_attn_backend().req_to_token_pool.mamba_pool
        (inputs,) = pool.mamba_cache.conv
        return EngineStates(self.decoder.config, pool.mamba_cache.temporal, inputs)


class BitnetOpsHybridForCausalLM(BitnetOpsForCausalLM):
    """The same under a name of its own, by which SGLang keeps states for it."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        pin_nothing()


def _state_slots(indices: Tensor | None) -> Tensor | None:
    """Where SGLang's numbers of slots lie in its pool, unless there are none."""
    if indices is None:
        return None
    return get_attn_backend().req_to_token_pool.translate_mamba_indices(indices)


def _tracks(fb: Any) -> list[Track]:
    """The states that a forward is to keep beside those of its requests.

    Of a decoding step behind its token; of a prompt behind its last whole chunk, or where another
    prompt has parted from it.
    """
    slots = _state_slots(fb.mamba_track_indices)
    if slots is None or fb.mamba_track_mask is None:
        return []
    lengths = fb.seq_lens
    if not fb.forward_mode.is_decode():
        if (aligned := fb.mamba_track_aligned_lens()) is None:
            return []
        lengths = fb.extend_prefix_lens + aligned
    wanted = zip(fb.mamba_track_mask.tolist(), lengths.tolist(), slots.tolist(), strict=True)
    return [
        Track(i, length, slot)
        for i, (asked, length, slot) in enumerate(wanted)
        if asked and slot >= 0  # below 0: the request has left since it was asked
    ]


# of SGLang's sampling_info: what it does to logits, or reads of them, beside taking the largest
_OTHER_USES = (
    *("logit_bias", "grammar_mask", "has_custom_logit_processor", "watermark_enabled"),
    *("acc_additive_penalties", "acc_scaling_penalties", "return_sampling_masks"),
)


def _takes_largest(info: Any, return_logprob: bool) -> bool:
    """Whether nothing but each row's largest logit is wanted, which spares most of a large head."""
    if info is None or not info.is_all_greedy or return_logprob:
        return False
    penalties = info.penalizer_orchestrator
    if penalties is not None and penalties.is_required:
        return False
    if any(grammar is not None for grammar in info.grammars or ()):
        return False
    values = (getattr(info, name, None) for name in _OTHER_USES)
    nothing = (v is None or v is False or (isinstance(v, list) and not any(v)) for v in values)
    return all(nothing)


def _batch(input_ids: Tensor, positions: Tensor, fb: Any, *, all_rows: bool) -> StepBatch:
    """SGLang's forward as a StepBatch over slots: blocks of one position."""
    mode, lengths = fb.forward_mode, fb.seq_lens
    requests = get_attn_backend().req_to_token_pool
    table = requests.req_to_token
    longest = int(lengths.max())
    slots = table[:, :longest].index_select(0, fb.req_pool_indices)
    starts = torch.arange(len(lengths) + 1)
    if not mode.is_decode():
        if mode.is_target_verify() or not mode.is_extend():
            raise ValueError(
                f"bitnet: expected prompts or single tokens, got {mode}; speculative decoding is "
                "not supported for a converted model"
            )
        starts = paged.query_starts(fb.extend_seq_lens)
    where = input_ids, positions, fb.out_cache_loc
    states = None
    if hasattr(requests, "get_mamba_indices"):
        states = _state_slots(requests.get_mamba_indices(fb.req_pool_indices))
    return paged.batch_of(
        *where,
        starts,
        lengths,
        slots,
        all_rows=all_rows,
        state_slots=states,
        largest=0 if all_rows else int(_takes_largest(fb.sampling_info, fb.return_logprob)),
    )


EntryClass = [BitnetOpsForCausalLM, BitnetOpsHybridForCausalLM]
