"""Activations of ternary weights with scales of groups: each format against floating ones.

    python -m benchmarks.compare_activations CHECKPOINT TEXT [--heavy F] [--chapters N] [--json]

CHECKPOINT is a folder with masters of transformers' BitNetForCausalLM (tests/data/demo-model).
Its projections are ternarised by groups of 128 weights, by the mean of a group's magnitudes. The
reference is transformers' model in float32 over these weights, which rounds no activations; ours
runs the same codes and scales with every activation format. --heavy F multiplies the gain of one
feature in 256 of every norm before projections by F, in both: activations get heavy tails, as large
models have them. That is another function, whose text is worse; what counts is how near each format
comes to it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare_heads import Figures
from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.models import build, expected_tensors
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.packing import BLOCK, PackedWeight
from bitnet_ops.nn.storage import ACTIVATION_FORMATS


def ternarised(masters: Tensor) -> tuple[Tensor, Tensor]:
    """F [N, K] -> codes int8 [N, K] and float16 numbers [N, groups], by absmean of each group."""
    n, k = masters.shape
    padded = torch.nn.functional.pad(masters.float(), (0, -k % BLOCK)).view(n, -1, BLOCK)
    counts = torch.nn.functional.pad(torch.ones(k), (0, -k % BLOCK)).view(-1, BLOCK).sum(1)
    scale = (padded.abs().sum(2) / counts).clamp(min=1e-5).half().float()
    codes = (padded / scale.unsqueeze(2)).round().clamp(-1, 1)
    return codes.view(n, -1)[:, :k].to(torch.int8), scale


def dense_of(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.float() * scale.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]


def network_of(folder: Path) -> Any:
    """transformers' model over the checkpoint's tensors, without any quantisation of its own."""
    import transformers
    from safetensors.torch import load_file

    about = json.loads((folder / "config.json").read_text())
    about.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(**about)
    network = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    state = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    missing, unknown = network.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unknown:
        raise SystemExit(f"checkpoint: expected the tensors of {about['model_type']}, got others")
    network.tie_weights()
    return network


def make_heavy(network: Any, factor: float) -> None:
    """One feature in 256 of what projections read times `factor`."""
    for layer in network.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm,
                     layer.self_attn.attn_sub_norm, layer.mlp.ffn_sub_norm):  # fmt: skip
            norm.weight.data[3::256] *= factor


@torch.inference_mode()
def compare(folder: Path, text: str, heavy: float, chapters: int) -> dict[str, dict[str, float]]:
    network = network_of(folder)
    if heavy != 1:
        make_heavy(network, heavy)
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    state, tensors = dict(network.state_dict()), {}
    for name, spec in expected_tensors(config).items():
        tensor = state[name]
        if spec.kind == "ternary":
            codes, scale = ternarised(tensor)
            state[name].copy_(dense_of(codes, scale))
            n, k = codes.shape
            packed = PackedWeight(ops.pack(codes), scale, n, k, group_size=BLOCK)
            tensors[name] = packed.repack()
        else:
            tensors[name] = tensor.clone()
    network.load_state_dict(state)
    model = build(config, tensors)
    tokenizer = Tokenizer.from_dir(folder)
    parts = text.rstrip("\n").split("\n\n")[: chapters or None]
    figures = {name: Figures() for name in ("float", *ACTIVATION_FORMATS)}
    for part in parts:
        ids = tokenizer.encode(part)[: config.max_position_embeddings]
        if len(ids) < 2:
            continue
        exact = network(torch.tensor([ids])).logits[0]
        figures["float"].add(exact, exact, ids)
        for form in ACTIVATION_FORMATS:
            model.set_activation_format(form)
            cache = KVCache(config, 1, len(ids), torch.float32)
            figures[form].add(exact, model(torch.tensor([ids]), cache)[0], ids)
    rows = {name: found.as_dict() for name, found in figures.items()}
    for row in rows.values():
        row["perplexity"] = float(torch.tensor(row["loss_nats"]).exp())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--heavy", type=float, default=1.0)
    parser.add_argument("--chapters", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    rows = compare(args.checkpoint, text, args.heavy, args.chapters)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        print(name, *(f"{key} {value:.6g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
