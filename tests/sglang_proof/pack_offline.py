"""Write the demo model (bf16 masters, "online") as a packed "offline" autobitlinear checkpoint.

Independent of bitnet_ops on purpose: safetensors, torch and the byte-by-byte packer of
tests/helpers/hf_writer.py, so that a packing mistake of the project cannot cancel out.
Usage: pack_offline.py SOURCE DESTINATION
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

import torch
from safetensors.torch import load_file, save_file

from hf_writer import pack_quarters

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def ternarised(master):
    """bf16 master -> (packed uint8 [M/4, K], absmean f32 [1]), as transformers' WeightQuant."""
    weight = master.float()
    scale = weight.abs().mean().clamp(min=1e-5)
    codes = (weight * (1.0 / scale)).round().clamp(-1, 1).to(torch.int8)
    return torch.from_numpy(pack_quarters(codes.numpy())), scale.reshape(1)


def pack_checkpoint(source, destination):
    destination.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"].update(linear_class="autobitlinear", quantization_mode="offline")
    # float32, so that a run in float32 compares nothing but the arithmetic of the two programs.
    config["torch_dtype"] = "float32"
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            packed, scale = ternarised(tensor)
            tensors[name], tensors[f"{name}_scale"] = packed, scale
        else:
            tensors[name] = tensor.float()
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(config, indent=2))
    for name in COPIED:
        shutil.copy(source / name, destination / name)
    packed_count = sum(tensor.dtype == torch.uint8 for tensor in tensors.values())
    print(f"wrote {destination}: {packed_count} packed matrices of {len(tensors)} tensors")


if __name__ == "__main__":
    pack_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
