"""Measure what converting a model of a real one's size costs: peak memory and MB/s.

    python -m benchmarks.measure_convert 2b-4t|llama3-8b offline|online [--layers N] [--folder DIR]
Writes a sharded checkpoint of random weights with real tensor sizes (fewer layers if asked), runs
`bitnet-ops convert` in a process of its own and prints JSON: the peak resident size against
3 x the largest tensor + 200 MB, throughput, and the limits it is to be seen against (one core's
unpacking or ternarising, one core's copy, the disk's write); by the clock, and by CPU time, which
other work on the machine does not slow down.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bitnet_ops import ops
from bitnet_ops.nn.packing import unpack_hf

MIB = 1 << 20
# (hidden, inner, layers, heads, KV heads, tied head)
SHAPES = {
    "2b-4t": (2560, 6912, 30, 20, 5, True),
    "llama3-8b": (4096, 14336, 32, 32, 8, False),
}


def config_of(model: str) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, tied = SHAPES[model]
    bitnet = model == "2b-4t"
    return {
        "model_type": "bitnet" if bitnet else "llama",
        "architectures": ["BitNetForCausalLM" if bitnet else "LlamaForCausalLM"],
        "hidden_act": "relu2" if bitnet else "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def layer_shapes(c: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


class Checkpoint:
    """Shards in `folder`, one a layer and one for the rest; `largest` in bytes."""

    def __init__(self, folder: Path, config: dict[str, Any], mode: str) -> None:
        self.folder, self.config, self.mode = folder, config, mode
        self.largest = self.total = 0
        self.weight_map: dict[str, str] = {}
        generator = torch.Generator().manual_seed(1)
        self.noise = (torch.randn(1 << 22, generator=generator) * 0.02).bfloat16()
        codes = torch.randint(0, 3, (4, 1 << 20), generator=generator, dtype=torch.uint8)
        self.codes = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6

    def write(self) -> None:
        c = self.config
        for layer in range(c["num_hidden_layers"]):
            self._shard(f"layer-{layer:02d}.safetensors", self._layer(f"model.layers.{layer}."))
        rest = {"model.embed_tokens.weight": self._masters(c["vocab_size"], c["hidden_size"])}
        rest["model.norm.weight"] = torch.ones(c["hidden_size"], dtype=torch.bfloat16)
        if not c["tie_word_embeddings"]:
            rest["lm_head.weight"] = self._masters(c["vocab_size"], c["hidden_size"])
        self._shard("rest.safetensors", rest)
        quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear",
                        "quantization_mode": self.mode}  # fmt: skip
        (self.folder / "config.json").write_text(
            json.dumps({**c, "torch_dtype": "bfloat16", "quantization_config": quantization})
        )
        index = {"metadata": {}, "weight_map": self.weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def _layer(self, prefix: str) -> dict[str, torch.Tensor]:
        c, out = self.config, {}
        norms = {"input_layernorm": c["hidden_size"], "post_attention_layernorm": c["hidden_size"]}
        if c["model_type"] == "bitnet":
            norms["self_attn.attn_sub_norm"] = c["hidden_size"]
            norms["mlp.ffn_sub_norm"] = c["intermediate_size"]
        for name, size in norms.items():
            out[f"{prefix}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name, (n, k) in layer_shapes(c).items():
            if self.mode == "online":
                out[f"{prefix}{name}.weight"] = self._masters(n, k)
            else:
                out[f"{prefix}{name}.weight"] = _filled(self.codes, n // 4, k)
                out[f"{prefix}{name}.weight_scale"] = torch.tensor([1.5], dtype=torch.bfloat16)
        return out

    def _masters(self, n: int, k: int) -> torch.Tensor:
        return _filled(self.noise, n, k)

    def _shard(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.folder / file)
        self.weight_map.update(dict.fromkeys(tensors, file))
        self.largest = max(self.largest, *(t.nbytes for t in tensors.values()))
        self.total += sum(t.nbytes for t in tensors.values())


def _filled(block: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """[n, k] of repeated random data: the cost of a conversion does not depend on it."""
    return block.repeat(-(-n * k // len(block)))[: n * k].view(n, k)


def cost_of(command: list[str]) -> tuple[float, int]:
    """CPU seconds and the peak resident size in bytes, as /usr/bin/time -v reports them."""
    done = subprocess.run(["/usr/bin/time", "-v", *command], capture_output=True, text=True)
    found = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    cpu = re.findall(r"(?:User|System) time \(seconds\): ([\d.]+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(done.stderr)
    return sum(map(float, cpu)), int(found[1]) * 1024


def limits(mode: str, folder: Path) -> dict[str, float]:
    """Source MB/s of one core's own work and of the disk, without the converter."""
    torch.set_num_threads(1)
    n, k = 8192, 4096
    masters = (torch.randn(n, k) * 0.02).bfloat16()
    codes, _ = ops.quantize_weights(masters)
    packed = torch.zeros(n // 4, k, dtype=torch.uint8)
    if mode == "online":
        source, work = masters, lambda: ops.pack(ops.quantize_weights(masters)[0])
    else:
        source, work = packed, lambda: ops.pack(unpack_hf(packed, n))
    best = min(_seconds(work) for _ in range(5))
    copy = min(_seconds(masters.clone) for _ in range(5))
    blob = bytes(256 * MIB)

    def write() -> None:
        with open(folder / "blob", "wb") as file:
            file.write(blob)
            os.fsync(file.fileno())

    started = time.perf_counter()
    write()
    disk = time.perf_counter() - started
    return {"one_core_mb_per_cpu_s": source.nbytes / best / 1e6,
            "copy_mb_per_cpu_s": masters.nbytes / copy / 1e6,
            "disk_write_mb_per_s": len(blob) / disk / 1e6}  # fmt: skip


def _seconds(work: Any) -> float:
    """CPU seconds of the process: other work on the machine does not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("mode", choices=("offline", "online"))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary one)")
    args = parser.parse_args()
    config = config_of(args.model)
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    folder = Path(tempfile.mkdtemp(prefix="measure-convert-", dir=args.folder))
    try:
        (folder / "source").mkdir()
        checkpoint = Checkpoint(folder / "source", config, args.mode)
        checkpoint.write()
        convert = [sys.executable, "-m", "bitnet_ops", "convert"]
        cpu, peak = cost_of([*convert, str(folder / "source"), str(folder / "out")])
        report = json.loads((folder / "out" / "report.json").read_text())
        allowed = 3 * checkpoint.largest + 200 * MIB
        print(json.dumps({
            "model": args.model, "mode": args.mode, "layers": config["num_hidden_layers"],
            "source_mb": checkpoint.total / 1e6, "result_mb": report["output_bytes"] / 1e6,
            "largest_tensor_mb": checkpoint.largest / 1e6,
            "peak_rss_mb": peak / 1e6, "allowed_mb": allowed / 1e6, "within": peak <= allowed,
            "seconds_convert": report["seconds"], "cpu_seconds_process": round(cpu, 2),
            "source_mb_per_s": checkpoint.total / 1e6 / report["seconds"],
            "source_mb_per_cpu_s": checkpoint.total / 1e6 / cpu,
            **limits(args.mode, folder),
        }, indent=1))  # fmt: skip
        return 0 if peak <= allowed else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
