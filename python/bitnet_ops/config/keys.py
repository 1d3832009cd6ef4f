"""The keys of a config.json that are known, by what they can change.

A key that no list has may change what the model computes, so whoever reads a decoder's config
rejects it by its name, and null says nothing. That strictness is for the object that describes the
decoder. Beside it stand keys of a tower, of sampling or of another library's run: see `flat` in
hybrid.py for those of an outer object, which are passed over.
"""

from __future__ import annotations

from typing import Any

PRIVATE_BLOCK = "bitnet_ops"

# key -> (values that leave the maths as implemented, what the key would switch on).
MATHS: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((False,), "biases in the attention projections"),
    "mlp_bias": ((False,), "biases in the MLP projections"),
    "use_bias": ((False,), "biases in the projections"),
    "qkv_bias": ((False,), "biases in the attention projections"),
    "use_qk_norm": ((False,), "norms on queries and keys"),
    "qk_norm": ((False,), "norms on queries and keys"),
    "qk_layernorm": ((False,), "norms on queries and keys"),
    "use_rms_norm": ((False,), "an RMSNorm inside every linear layer"),
    "use_sliding_window": ((False,), "sliding-window attention in this architecture"),
    "attention_chunk_size": ((), "chunked attention"),
    "no_rope_layers": (([],), "layers without rotary embedding"),
    "partial_rotary_factor": ((1, 1.0), "rotary embedding of a part of each head"),
    "rotary_pct": ((1, 1.0), "rotary embedding of a part of each head"),
    "position_embedding_type": (("rope", "rotary", "absolute"), "another position embedding"),
    "attn_logit_softcapping": ((), "soft-capped attention scores"),
    "final_logit_softcapping": ((), "soft-capped logits"),
    "logit_scale": ((1, 1.0), "scaled logits"),
    "logits_scaling": ((1, 1.0), "scaled logits"),
    "embedding_multiplier": ((1, 1.0), "scaled embeddings"),
    "scale_emb": ((1, 1.0), "scaled embeddings"),
    "residual_multiplier": ((1, 1.0), "a scaled residual stream"),
    "scale_depth": ((1, 1.0), "a scaled residual stream"),
    "attention_multiplier": ((), "another attention scale"),
    "query_pre_attn_scalar": ((), "another attention scale"),
    "num_experts": ((0, 1), "a mixture of experts"),
    "num_local_experts": ((0, 1), "a mixture of experts"),
    "n_routed_experts": ((0, 1), "a mixture of experts"),
    "is_encoder_decoder": ((False,), "an encoder"),
    "add_cross_attention": ((False,), "cross-attention"),
    "group_size": ((), "one scale per group of weights"),
    "sparse_config": ((), "sparse attention"),
    "use_bidirectional_attention": ((False,), "attention to later tokens"),
    "is_causal": ((True,), "attention to later tokens"),
    "rope_interleaved": ((False,), "another order of the rotary pairs"),
    "use_mrope": ((False,), "positions of images"),
}

# Describes the file, its training or a run of another library; never the forward pass.
HARMLESS = frozenset(
    """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _name_or_path attention_dropout attn_dropout attn_implementation
    bad_words_ids begin_suppress_tokens bos_token bos_token_id chunk_size_feed_forward
    classifier_dropout eos_token gradient_checkpointing is_llama_config keys_to_ignore_at_inference
    max_new_tokens mup_denominator pad_token transformers.js_config use_return_dict
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout_prob id2label initializer_range is_decoder label2id length_penalty max_length
    min_length model_max_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
) | frozenset(  # more of generation, and of a tower for images that a text-only config has kept
    """_from_model_config assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    cache_config cache_implementation compile_config constraints continuous_batching_config
    disable_compile dola_layers encoder_repetition_penalty epsilon_cutoff eta_cutoff force_words_ids
    generation_config guidance_scale is_assistant low_memory max_matching_ngram_size max_time
    min_new_tokens min_p num_assistant_tokens num_assistant_tokens_schedule output_logits
    penalty_alpha prefill_chunk_size prompt_lookup_num_tokens renormalize_logits sequence_bias
    stop_strings target_lookbehind token_healing top_h watermarking_config
    image_token_id language_model_only video_token_id vision_config vision_end_token_id
    vision_start_token_id
    """.split()
)
READ = frozenset(
    """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta
    rope_parameters rope_scaling max_position_embeddings
    original_max_position_embeddings tie_word_embeddings layer_types
    quantization_config weight_bits input_bits sliding_window max_window_layers
    """.split()
) | {PRIVATE_BLOCK}
REMARKS = {
    "auto_map": "code shipped with a checkpoint is never run",
    "bd_size": "a block-diffusion model: it is run as an ordinary causal model, left to right, "
    "which is not how it was trained",
    "mask_token_id": "only block-diffusion decoding uses it, which is not implemented",
}
