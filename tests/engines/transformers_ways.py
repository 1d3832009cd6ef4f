"""transformers with and without this package on one random BitNet checkpoint: tokens/s and memory.

    scripts/prove_transformers [--layers 6] [--vocab 32000] [--ways ...] ...

Each way runs in a process of its own, greedily, on the same prompt: transformers' own packed class
(which unpacks at every call, compiled), the same with its weights unpacked to bfloat16 once,
accelerate, that with an int8 head, and this package's own model. Logits of the last prompt token
are compared with those of unpacked weights, and tokens with those of the packed class: how many
agree until the first that differs. Random weights leave near ties, so bfloat16 may differ early.
`--keep FOLDER` keeps checkpoint and results, so that the ways can be run one by one (`--ways`), and
the table shows all that were. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import dims
import torch

# Name -> its output head, where transformers' own does not stay.
WAYS = {"packed": None, "unpacked": None, "accelerate": None, "accelerate-int8-head": "int8",
        "own": "int8"}  # fmt: skip


def unpacked(model: Any) -> Any:
    """Its BitLinears as AutoBitLinears with bfloat16 codes: no unpacking while it runs."""
    from transformers.integrations.bitnet import AutoBitLinear, BitLinear, unpack_weights

    for name, module in list(model.named_modules()):
        if isinstance(module, BitLinear):
            layer = AutoBitLinear(module.in_features, module.out_features, bias=False)
            codes = unpack_weights(module.weight, torch.bfloat16)
            layer.weight = torch.nn.Parameter(codes, requires_grad=False)
            layer.weight_scale = (1 / module.weight_scale.float()).bfloat16()
            model.set_submodule(name, layer)
    return model


def run(way: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the prompt and of a token, the peak of resident memory, logits."""
    ids = torch.arange(3, 3 + args.prompt).unsqueeze(0) % args.vocab
    torch.set_num_threads(args.threads)
    if way == "own":
        return run_own(folder, ids, args)
    from transformers import AutoModelForCausalLM

    import bitnet_ops

    options: dict[str, Any] = {}
    if way.startswith("accelerate"):
        options["quantization_config"] = bitnet_ops.BitnetOpsConfig(head=WAYS[way])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    if way == "unpacked":
        model = unpacked(model)
    with torch.inference_mode():
        model(ids)  # first calls compile and allocate
        begun = time.perf_counter()
        out = model(ids, use_cache=True)
        prompt_s = time.perf_counter() - begun
        logits, times, tokens = out.logits[0, -1].float(), [], []
        for _ in range(args.tokens):
            begun = time.perf_counter()
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            times.append(time.perf_counter() - begun)
            tokens.append(int(token))
    return figures(way, prompt_s, times, logits, tokens)


def run_own(folder: Path, ids: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    import bitnet_ops
    from bitnet_ops.nn.kv_cache import KVCache

    lm = bitnet_ops.load(folder, head_format=WAYS["own"])
    times, tokens = [], []
    with torch.inference_mode():
        for _ in range(2):
            cache = KVCache(lm.config, 1, args.prompt + args.tokens)
            begun = time.perf_counter()
            out = lm.model(ids, cache, 1)
            prompt_s = time.perf_counter() - begun
        logits = out[0, -1].float()
        for _ in range(args.tokens):
            begun = time.perf_counter()
            token = out[:, -1:].argmax(-1)
            out = lm.model(token, cache, 1)
            times.append(time.perf_counter() - begun)
            tokens.append(int(token))
    return figures("own", prompt_s, times, logits, tokens)


def figures(
    way: str, prompt_s: float, times: list[float], logits: torch.Tensor, tokens: list[int]
) -> dict[str, Any]:
    """Seconds, logits, and GiB of memory: the peak since the start, and what it holds at the end.

    Of tokens the median and the fastest: where these differ by much, another process had the cores,
    and torch's small operations waited for their own threads. Pages of a mapped checkpoint count
    for the peak; what is held is anonymous memory.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    status = Path("/proc/self/status").read_text()
    held = int(status.split("RssAnon:")[1].split()[0]) / 2**20
    token_s = sorted(times)[len(times) // 2]
    return {"way": way, "prompt_s": prompt_s, "token_s": token_s, "fastest_s": min(times),
            "peak_gib": peak,
            "held_gib": held, "logits": logits.tolist(), "tokens": tokens}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"layers": 6, "hidden": 2560, "inner": 6912, "heads": 20, "kv-heads": 5,
                          "vocab": 32000, "prompt": 64, "tokens": 16}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS], help="those to run")
    parser.add_argument("--keep", type=Path, help="a folder for checkpoint and results")
    parser.add_argument("--run", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args.run[0], Path(args.run[1]), args)))
        return 0
    import transformers

    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, "
          f"torch {torch.__version__}, transformers {transformers.__version__}; "
          f"{args.layers} layers of {args.hidden} / {args.inner}, vocabulary {args.vocab}"
          )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model.safetensors").exists():
            d = dims.Dims(args.layers, args.vocab, args.hidden, args.inner, args.heads,
                          args.kv_heads, "bitlinear")  # fmt: skip
            dims.write(folder, dims.packed_config(d), dims.packed_tensors(d))
        for way in args.ways:
            result = measured(way, str(folder))
            (folder / f"result-{way}.json").write_text(json.dumps(result))
        files = [folder / f"result-{way}.json" for way in WAYS]
        print_table([json.loads(f.read_text()) for f in files if f.exists()], args.prompt)
    return 0


def print_table(rows: list[dict[str, Any]], prompt: int) -> None:
    """One line a way; logits beside those of unpacked weights, where these were run."""
    found = {row["way"]: torch.tensor(row["logits"]) for row in rows}
    texts = {row["way"]: row["tokens"] for row in rows}
    print("| way | prompt tokens/s | decode tokens/s (fastest) | GiB held | peak GiB "
          "| logits, cosine | tokens as packed |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        near = "-"
        if "unpacked" in found:
            ours, reference = found[row["way"]], found["unpacked"]
            near = f"{torch.cosine_similarity(ours, reference, dim=0).item():.4f}"
        same = "-"
        if "packed" in texts:
            pairs = zip(texts[row["way"]], texts["packed"], strict=True)
            same = f"{len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))}"
        print(f"| {row['way']} | {prompt / row['prompt_s']:.1f} | {1 / row['token_s']:.2f} "
              f"({1 / row['fastest_s']:.2f}) | "
              f"{row['held_gib']:.2f} | {row['peak_gib']:.2f} | {near} | {same} |")  # fmt: skip


def measured(way: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--run", way, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"transformers_ways: {way} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
