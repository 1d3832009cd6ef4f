"""Random checkpoints with the dimensions of a real model: packed, and the same as plain bfloat16.

Independent of bitnet_ops. The plain one has no quantization_config: an engine's own bfloat16 path
runs it, on the same shapes. The third is a Llama's config.json, for an engine that has no class for
BitNet. Usage: dims.py FOLDER LAYERS VOCABULARY
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))
from hf_writer import write_tokenizer  # noqa: E402


@dataclass(frozen=True)
class Dims:
    """By default those of 2B-4T."""

    layers: int
    vocabulary: int
    hidden: int = 2560
    inner: int = 6912
    heads: int = 20
    kv_heads: int = 5
    linear_class: str = "autobitlinear"

    @property
    def head_dim(self):
        return self.hidden // self.heads


# every byte of four codes 0, 1, 2
BYTES = torch.tensor([b for b in range(256) if all((b >> s) & 3 != 3 for s in (0, 2, 4, 6))])


def config_of(d):
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": d.vocabulary,
        "hidden_size": d.hidden,
        "intermediate_size": d.inner,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }


def packed_config(d):
    quantization = {
        "quant_method": "bitnet",
        "linear_class": d.linear_class,
        "quantization_mode": "offline",
    }
    return {**config_of(d), "quantization_config": quantization}


def packed_tensors(d):
    generator = torch.Generator().manual_seed(0)
    query, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    shapes = {
        "self_attn.q_proj": (query, d.hidden),
        "self_attn.k_proj": (kv, d.hidden),
        "self_attn.v_proj": (kv, d.hidden),
        "self_attn.o_proj": (d.hidden, query),
        "mlp.gate_proj": (d.inner, d.hidden),
        "mlp.up_proj": (d.inner, d.hidden),
        "mlp.down_proj": (d.hidden, d.inner),
    }
    norms = {
        "input_layernorm": d.hidden,
        "post_attention_layernorm": d.hidden,
        "self_attn.attn_sub_norm": query,
        "mlp.ffn_sub_norm": d.inner,
    }
    table = torch.randn(d.vocabulary, d.hidden, generator=generator, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": table}
    tensors["model.norm.weight"] = torch.ones(d.hidden, dtype=torch.bfloat16)
    for layer in range(d.layers):
        for name, (rows, columns) in shapes.items():
            picks = torch.randint(0, len(BYTES), (rows // 4, columns), generator=generator)
            key = f"model.layers.{layer}.{name}.weight"
            tensors[key] = BYTES[picks].to(torch.uint8)
            scale = columns**-0.5 if d.linear_class == "autobitlinear" else columns**0.5
            tensors[f"{key}_scale"] = torch.tensor([scale], dtype=torch.bfloat16)
        for name, size in norms.items():
            key = f"model.layers.{layer}.{name}.weight"
            tensors[key] = torch.ones(size, dtype=torch.bfloat16)
    return tensors


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])


def unpacked(packed):
    """Codes bfloat16 [rows, columns]: contiguous quarters of the outputs."""
    return torch.cat([((packed >> s) & 3).to(torch.bfloat16) - 1 for s in (0, 2, 4, 6)])


def main():
    folder, d = Path(sys.argv[1]), Dims(int(sys.argv[2]), int(sys.argv[3]))
    packed, plain = packed_tensors(d), {}
    write(folder / "packed", packed_config(d), packed)
    for name, tensor in packed.items():
        if tensor.dtype == torch.uint8:
            plain[name] = unpacked(tensor) * packed[f"{name}_scale"]
        elif not name.endswith("_scale"):
            plain[name] = tensor
    write(folder / "plain", config_of(d), plain)
    (folder / "llama").mkdir(exist_ok=True)
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    (folder / "llama" / "config.json").write_text(json.dumps({**config_of(d), **llama}))


if __name__ == "__main__":
    main()
