"""The shapes of the synthetic models: what their config.json would say.

In a file of its own, because the command line lists the names without importing torch.
"""

from __future__ import annotations

from typing import Any

# 16384 positions, more than the originals have, so that long contexts can be measured; no result
# depends on the number.
_COMMON = {"max_position_embeddings": 16384, "rms_norm_eps": 1e-5}
BONSAI = ("bonsai-1.7b", "bonsai-4b", "bonsai-8b")
BONSAI2 = ("bonsai2-2b", "bonsai2-4b", "bonsai2-9b", "bonsai2-27b")
BONSAI2_DRAFT = ("bonsai2-2b-draft", "bonsai2-9b-draft")
# Models whose ternary matrices have a scale for every 128 weights of a row.
GROUPED = (*BONSAI, *BONSAI2, *BONSAI2_DRAFT)


def _bonsai(
    layers: int,
    hidden: int,
    intermediate: int,
    *,
    heads: int,
    tied: bool,
    theta: float = 1e6,
    original: int = 8192,
) -> dict[str, Any]:
    """Qwen3 with YaRN by 4, on whatever the length."""
    return {
        "model_type": "qwen3",
        "vocab_size": 151669,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": original,
        },
        "max_position_embeddings": 4 * original,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "tie_word_embeddings": tied,
    }


def _bonsai2(
    layers: int,
    hidden: int,
    intermediate: int,
    *,
    heads: int,
    kv_heads: int,
    value_heads: int,
    tied: bool,
    block: int = 1024,
) -> dict[str, Any]:
    """Qwen3.5's hybrid: Gated DeltaNet, every fourth layer attention; all inputs rotated."""
    widths = sorted({hidden, heads * 256, value_heads * 128, intermediate})
    rotation = {"blocks": {str(width): block for width in widths}}
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "layer_types": [
            "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 262144,
        "bos_token_id": 248044,
        "eos_token_id": 248046,
        "tie_word_embeddings": tied,
        "bitnet_ops": {"format_version": 1, "rotation": rotation},
    }


def _llama(
    layers: int,
    hidden: int,
    intermediate: int,
    *,
    heads: int,
    kv_heads: int,
    vocab: int,
    theta: float,
    head_dim: int | None = None,
    eps: float = 1e-5,
) -> dict[str, Any]:
    """Llama with a head of its own."""
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "rope_theta": theta,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **_COMMON,
        "rms_norm_eps": eps,
    }


def _with_tower(
    config: dict[str, Any], depth: int, hidden: int, intermediate: int
) -> dict[str, Any]:
    """A hybrid with its tower for images: heads of 64 or 72 features, 48 x 48 positions."""
    vision = {
        "depth": depth,
        "hidden_size": hidden,
        "num_heads": 16,
        "intermediate_size": intermediate,
        "out_hidden_size": config["hidden_size"],
        "num_position_embeddings": 2304,
        "image_token_id": 248056,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
    }
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    return {
        **config,
        "rope_parameters": {**config["rope_parameters"], **sections},
        "bitnet_ops": {**config["bitnet_ops"], "vision": vision},
    }


def _with_head(config: dict[str, Any], intermediate: int) -> dict[str, Any]:
    """A model with a draft head, whose inputs are not rotated, as grafts are."""
    draft = {"intermediate_size": intermediate, "origin": "random numbers"}
    block = config.get("bitnet_ops", {"format_version": 1})
    return {**config, "bitnet_ops": {**block, "draft_head": draft}}


def _tiny_images() -> dict[str, Any]:
    """A hybrid of four layers that reads images; its tower's MLP is no multiple of 32."""
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 56,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "image_token_id": 326,
        "vision_start_token_id": 327,
        "vision_end_token_id": 328,
    }
    return {
        **_bonsai2(4, 64, 128, heads=2, kv_heads=1, value_heads=4, tied=True),
        "vocab_size": 331,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "bitnet_ops": {"format_version": 1, "vision": vision},
    }


_BONSAI2_2B = _bonsai2(24, 2048, 6144, heads=8, kv_heads=2, value_heads=16, tied=True)
_BONSAI2_9B = _bonsai2(32, 4096, 12288, heads=16, kv_heads=4, value_heads=32, tied=False)

# microsoft/bitnet-b1.58-2B-4T
_2B_4T = {
    "model_type": "bitnet",
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "hidden_act": "relu2",
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": True,
    **_COMMON,
}
# for tests: grouped queries, K that is no multiple of 128, N that fills no tile
_TINY = {
    "model_type": "bitnet",
    "vocab_size": 331,
    "hidden_size": 192,
    "intermediate_size": 456,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "relu2",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    **_COMMON,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "2b-4t": _2B_4T,
    # 1bitLLM/bitnet_b1_58-large: 16 heads of 96, an untied head, SiLU
    "0.7b": {
        "model_type": "bitnet",
        "vocab_size": 32002,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **_COMMON,
    },
    # prism-ml/Ternary-Bonsai; the originals have no bos, which the dummy's tokenizer needs
    "bonsai-1.7b": _bonsai(28, 2048, 6144, heads=16, tied=True),
    "bonsai-4b": _bonsai(36, 2560, 9728, heads=32, theta=5e6, tied=True),
    "bonsai-8b": _bonsai(36, 4096, 12288, heads=32, original=16384, tied=False),
    # prism-ml/Ternary-Bonsai-2; blocks of the rotation as published for the 27B, and for the others
    # the largest up to it that divides every width. Their bos is again the tokenizer's need.
    "bonsai2-2b": _BONSAI2_2B,
    "bonsai2-4b": _bonsai2(
        32, 2560, 9216, heads=16, kv_heads=4, value_heads=32, tied=True, block=512
    ),
    "bonsai2-9b": _BONSAI2_9B,
    "bonsai2-27b": _bonsai2(64, 5120, 17408, heads=24, kv_heads=4, value_heads=48, tied=False),
    # the same with the tower that reads images
    "bonsai2-2b-images": _with_tower(_BONSAI2_2B, 24, 1024, 4096),
    "bonsai2-9b-images": _with_tower(_BONSAI2_9B, 27, 1152, 4304),
    # tiiuae/Falcon3-7B-1.58bit: heads of 256
    "falcon3-7b": _llama(
        28, 3072, 23040, heads=12, kv_heads=4, vocab=131072, theta=1000042.0, head_dim=256, eps=1e-6
    ),
    # HF1BitLLM/Llama3-8B-1.58-100B-tokens
    "llama3-8b": _llama(32, 4096, 14336, heads=32, kv_heads=8, vocab=128256, theta=500000.0),
    # the dimensions by which earlier kernels for these models were judged (no published model has
    # them as ternary weights): Llama-2-7B's, and a layer of 2048 with an MLP of 5632 (TinyLlama's),
    # 24 of them
    "llama2-7b": _llama(32, 4096, 11008, heads=32, kv_heads=32, vocab=32000, theta=10000.0),
    "2048x24": _llama(24, 2048, 5632, heads=32, kv_heads=4, vocab=32000, theta=10000.0),
    # openbmb/BitCPM-CANN: the Llama class of the 3B, minicpm of the 0.5B; their LongRoPE has one
    # divisor for each frequency, which costs nothing, and is left out
    "bitcpm-3b": _llama(
        32, 2560, 10240, heads=32, kv_heads=2, vocab=73448, theta=10000.0, head_dim=128
    ),
    "bitcpm-0.5b": {
        **_llama(24, 1024, 4096, heads=16, kv_heads=2, vocab=73448, theta=10000.0),
        "model_type": "minicpm",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
    },
    # for tests: a hybrid with a tower for images
    "tiny-images": _tiny_images(),
    "tiny": _TINY,
    # the same, and larger ones, with a draft head; the width of the MLP of a head is a
    # multiple of 64
    "tiny-draft": _with_head(_TINY, 448),
    "2b-4t-draft": _with_head(_2B_4T, 6912),
    "bonsai2-2b-draft": _with_head(_BONSAI2_2B, 6144),
    "bonsai2-9b-draft": _with_head(_BONSAI2_9B, 12288),
}
