"""What programs write beside the weights of a model, none of which changes the model.

    write(folder, "mlx-lm")        the files of one writer, next to a checkpoint that is there
    write_index(folder)            the index of its safetensors

Names and forms are those of mlx-lm 0.32 (`save_model`, `save`), transformers 5 (`save_pretrained`
of models, tokenizers and processors; the Trainer), mistral-common, PrismML's packages, llama.cpp's
tools and macOS. It must never import bitnet_ops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOWER = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
STATE = {"global_step": 10, "log_history": [{"loss": 1.5, "step": 10}]}
# writer -> file -> its contents: text, bytes, or JSON
FILES: dict[str, dict[str, Any]] = {
    "transformers": {
        "special_tokens_map.json": SPECIAL, "added_tokens.json": {"<extra>": 999},
        "vocab.json": {"a": 0}, "merges.txt": "#version: 0.2\n", "vocab.txt": "a\n",
        "tokenizer.model": b"\x0a\x05<unk>", "preprocessor_config.json": TOWER,
        "video_preprocessor_config.json": TOWER, "modelcard.json": {},
        "processor_config.json": {"image_processor": TOWER}, "README.md": "by us",
        ".gitattributes": "*.safetensors filter=lfs\n", "LICENSE": "MIT", "NOTICE.txt": "by them",
    },
    "trainer": {
        "trainer_state.json": STATE, "training_args.bin": b"PK\x03\x04",
        "scheduler.pt": b"PK", "rng_state.pth": b"PK", "all_results.json": {"loss": 1.5},
        "checkpoint-10/model.safetensors": b"not read", "runs/events.out": b"\x00",
    },
    "mistral": {
        "params.json": {"dim": 64}, "tekken.json": {"config": {}},
        "consolidated.safetensors": b"the same weights once more",
        "original/consolidated.00.pth": b"PK", "original/params.json": {"dim": 64},
    },
    "prism": {
        "hadamard.json": {"prism.hadamard.version": 1}, "runtime/artifact.py": "raise SystemExit\n",
        "SHA256SUMS": "0" * 64 + "  model.safetensors\n", "assets/logo.png": b"\x89PNG",
    },
    "llama.cpp": {
        "imatrix.dat": b"\x00" * 8, "mmproj-model-F16.gguf": b"GGUF", "imatrix.gguf": b"GGUF",
    },
    "macOS": {
        ".DS_Store": b"\x00\x00\x00\x01Bud1", "._config.json": b"\x00\x05\x16\x07",
        "._model.safetensors": b"\x00\x05\x16\x07", "._model.gguf": b"\x00\x05\x16\x07",
        ".cache/huggingface/download/config.json.metadata": "0\n",
    },
    "mlx-lm": {"README.md": "---\nlibrary_name: mlx\n---\n"},
}  # fmt: skip


def write(folder: Path, writer: str) -> None:
    """The files of FILES, and of mlx-lm the index that it writes whatever the number of files."""
    for name, contents in FILES[writer].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(contents, bytes):
            path.write_bytes(contents)
        else:
            path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    if writer == "mlx-lm":
        write_index(folder, total_parameters=12345)


def write_index(folder: Path, **metadata: int) -> None:
    """As mlx-lm's `save_model`, whose `total_parameters` transformers does not write."""
    files = sorted(path for path in folder.glob("model*.safetensors"))
    weight_map, total = dict[str, str](), 0
    for path in files:
        total += path.stat().st_size
        with safe_open(path, framework="numpy") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    index = {"metadata": {"total_size": total, **metadata},
             "weight_map": dict(sorted(weight_map.items()))}  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
