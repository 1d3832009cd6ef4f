"""Write random checkpoints with the dims of 2B-4T: packed, and the same as plain bfloat16.

Independent of bitnet_ops. The plain one has no quantization_config: vLLM's own bfloat16 path runs
it, on the same shapes. Usage: write_dims.py FOLDER LAYERS VOCABULARY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))
from hf_writer import write_tokenizer  # noqa: E402

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 2560, 6912, 20, 5, 128
SHAPES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NORMS = {
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
    "self_attn.attn_sub_norm": HEADS * DIM,
    "mlp.ffn_sub_norm": INNER,
}
# every byte of four codes 0, 1, 2
BYTES = torch.tensor([b for b in range(256) if all((b >> s) & 3 != 3 for s in (0, 2, 4, 6))])


def config_of(layers, vocabulary):
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])


def unpacked(packed):
    """Codes bfloat16 [rows, columns]: contiguous quarters of the outputs."""
    return torch.cat([((packed >> s) & 3).to(torch.bfloat16) - 1 for s in (0, 2, 4, 6)])


def main():
    folder, layers, vocabulary = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.bfloat16)
    packed = {"model.embed_tokens.weight": table}
    packed["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(layers):
        for name, (rows, columns) in SHAPES.items():
            picks = torch.randint(0, len(BYTES), (rows // 4, columns), generator=generator)
            key = f"model.layers.{layer}.{name}.weight"
            packed[key] = BYTES[picks].to(torch.uint8)
            packed[f"{key}_scale"] = torch.tensor([columns**-0.5], dtype=torch.bfloat16)
        for name, size in NORMS.items():
            packed[f"model.layers.{layer}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    config = config_of(layers, vocabulary)
    quantization = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    }
    write(folder / "packed", {**config, "quantization_config": quantization}, packed)
    plain = {}
    for name, tensor in packed.items():
        if tensor.dtype == torch.uint8:
            plain[name] = unpacked(tensor) * packed[f"{name}_scale"]
        elif not name.endswith("_scale"):
            plain[name] = tensor
    write(folder / "plain", config, plain)


if __name__ == "__main__":
    main()
