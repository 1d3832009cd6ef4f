"""The checkpoints that are served, written in processes of their own.

checkpoints.py pack SOURCE FOLDER           the demo model as a packed "offline" autobitlinear
checkpoints.py kinds FOLDER TOKENS KV_DTYPE tiny checkpoints and our own engine's tokens
checkpoints.py folder MODEL FOLDER HEAD     what the engine's launcher makes of a converted model
checkpoints.py hybrid FOLDER CASE           a tiny hybrid as published, CASE-hf, and converted
checkpoints.py answers MODEL RESULT PROMPTS TOKENS    our own engine's greedy tokens of lists of ids
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

CANDIDATES = [f"{text} {i}" for text in ("What is", "two ranks", "fox") for i in range(20)]
PROMPTS = 4
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def pack(source, destination):
    """Independent of bitnet_ops on purpose: safetensors, torch and the byte-by-byte packer of
    tests/helpers/hf_writer.py, so that a packing mistake of the project cannot cancel out.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from hf_writer import pack_quarters

    source, destination = Path(source), Path(destination)
    destination.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"].update(linear_class="autobitlinear", quantization_mode="offline")
    # float32, so that a run in float32 compares nothing but the arithmetic of the two programs.
    config["torch_dtype"] = "float32"
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = weight = tensor.float()
        if name.endswith("_proj.weight"):  # as transformers' WeightQuant
            scale = weight.abs().mean().clamp(min=1e-5)
            codes = (weight * (1.0 / scale)).round().clamp(-1, 1).to(torch.int8)
            tensors[name] = torch.from_numpy(pack_quarters(codes.numpy()))
            tensors[f"{name}_scale"] = scale.reshape(1)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(config, indent=2))
    for name in COPIED:
        shutil.copy(source / name, destination / name)


def kinds(folder, count, kv_dtype, *names):
    """Per kind the Hugging Face folder NAME, the converted NAME-bin, and NAME.json in the form of
    oracle.py: our own engine's greedy tokens of float32 activations, with the lead of each. The
    prompts are those whose smallest lead is largest: two programs round differently.
    """
    import torch

    import bitnet_ops
    import hf_writer
    from bitnet_ops.convert import convert

    llama = hf_writer.FAMILIES["llama-autobitlinear"]
    qwen3 = {"model_type": "qwen3", "qk_norm": True, "eps": 1e-6, "theta": 1e6, "heads": 4}
    families = {
        "bitnet": hf_writer.FAMILIES["bitnet-offline"],
        "llama": llama,
        "qwen3": dataclasses.replace(llama, name="qwen3-autobitlinear", **qwen3),
        "bonsai": None,  # groups of 128 weights, YaRN, ternary embedding and head
    }
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in names:
        if families[name] is not None:
            hf_writer.write_checkpoint(folder / name, families[name])
        else:
            import bonsai

            bonsai.write_unpacked(folder / name, bonsai.make(tied=False))
            hf_writer.write_tokenizer(folder / name, bonsai.VOCAB)
        convert(folder / name, folder / f"{name}-bin")
        options = {"head_format": "stored", "kv_dtype": getattr(torch, kv_dtype)}
        model = bitnet_ops.load(folder / f"{name}-bin", **options)
        found = cases(model, int(count))
        (folder / f"{name}.json").write_text(json.dumps({"cases": found}))


def hybrid(folder, case):
    """Unrotated ones as safetensors, rotated ones as an MLX package; of "rotated" a GGUF file."""
    import gguf_models
    import hf_writer
    import hybrids
    from bitnet_ops.convert import convert

    folder, made = Path(folder), hybrids.make(case)
    folder.mkdir(exist_ok=True)
    for name in (f"{case}-hf", f"{case}-bin", f"{case}-gguf"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write = hybrids.write_mlx if made.sizes.block else hybrids.write_unpacked
    write(folder / f"{case}-hf", made)
    hf_writer.write_tokenizer(folder / f"{case}-hf", made.sizes.vocab)
    convert(folder / f"{case}-hf", folder / f"{case}-bin")
    if case == "rotated":
        tokenizer = gguf_models.byte_tokenizer(made.sizes.vocab)
        own = {"more": tokenizer, "tokenizer__ggml__eos_token_id": None}
        hybrids.write_gguf(folder / f"{case}-gguf", made, **own)


def answers(model, result, prompts, count):
    import torch

    import bitnet_ops

    lm = bitnet_ops.load(model, head_format="stored", kv_dtype=torch.bfloat16)
    options = {"max_new_tokens": int(count), "ignore_eos": True}
    made = lm.generate_batch(json.loads(prompts), **options)
    Path(result).write_text(json.dumps([list(one.token_ids) for one in made]))


def cases(model, count):
    done = model.generate_batch(CANDIDATES, max_new_tokens=count, ignore_eos=True, logprobs=2)
    found = []
    for prompt, answer in zip(CANDIDATES, done, strict=True):
        tops = [one.top_logprobs for one in answer.logprobs]
        leads = [round(first[1] - second[1], 4) for first, second in tops]
        case = {"prompt": prompt, "prompt_ids": model.tokenizer.encode(prompt)}
        found.append({**case, "tokens": list(answer.token_ids), "leads": leads})
    return sorted(found, key=lambda case: -min(case["leads"]))[:PROMPTS]


def folder(model, destination, head):
    from bitnet_ops.conversions import resolve

    engine = os.environ["BITNET_PROOF_ENGINE"]
    serving = importlib.import_module(f"bitnet_ops.integrations.{engine}.serving")
    shutil.rmtree(destination, ignore_errors=True)
    Path(destination).mkdir()
    # vLLM is told the format of the head by an option of its own
    words = [head] if engine == "sglang" else []
    serving.write_folder(resolve(model).file, Path(destination), *words)


if __name__ == "__main__":
    made = {"pack": pack, "kinds": kinds, "folder": folder, "hybrid": hybrid, "answers": answers}
    made[sys.argv[1]](*sys.argv[2:])
