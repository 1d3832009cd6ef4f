"""Other programs on the tests' fixtures: mlx-lm on MLX packages, llama.cpp on GGUF files.

    python tests/cross_readers/prove.py --mlx ENV/bin/python --xllamacpp ENV/bin/python

Optional, no part of the suite: each flag names the interpreter of an environment of its own (`pip
install 'mlx[cpu]' mlx-lm`; `pip install xllamacpp`). The fixtures are those of tests/helpers, whose
writers share no code with the package. If a second program reads in them what we read, then they
are of the published form and not of our idea of it. Compared are the other program, transformers in
fp32 on the unpacked values (MiniCPM: a float64 forward), and the converted model. Their arithmetic
rounds activations in other blocks or not at all, so figures agree to some percent; a wrong order of
codes, rows or a missing scaling is off by far more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
for place in ("tests/helpers", "tests/convert"):
    sys.path.insert(0, str(ROOT / place))

import bonsai  # noqa: E402
import compare_hf  # noqa: E402
import forward_fp64  # noqa: E402
import hybrids  # noqa: E402
from bitnet_ops.convert import convert  # noqa: E402
from bitnet_ops.loading.weights import load_model  # noqa: E402
from bitnet_ops.nn.kv_cache import KVCache  # noqa: E402
from gguf_models import byte_tokenizer  # noqa: E402

# How far, of the largest logit, and how many most probable tokens must be the same.
BOUNDS = 0.1, 0.85  # random networks, whose leads are small
# Activations of 8 bits, over eight layers of which six carry states: rounding alone, in a float64
# forward that shares no code, moves the largest of hybrids.make("plain") by .12 and leaves 84.7 %;
# this package .14 and 84.7 %, and .032 beside that forward.
INT8_STATES = 0.2, 0.75
# Of 16 bits: 6e-4 and all. The mistakes that tests/models/test_hybrid.py plants move .02 and more.
INT16_STATES = 2e-3, 0.98


def prompts_of(vocab: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab, (3, 24))


@torch.inference_mode()
def ours(folder: Path, prompts: np.ndarray, activation_format: str = "auto") -> torch.Tensor:
    model = load_model(folder / "model.bin")
    model.set_activation_format(activation_format)
    rows = []
    for ids in torch.from_numpy(prompts):
        cache = KVCache(model.config, 1, len(ids), torch.float32)
        rows.append(model(ids[None], cache)[0])
    return torch.stack(rows)


def transformers_on(folder: Path, prompts: np.ndarray) -> torch.Tensor:
    model = compare_hf.load_hf(folder)
    return torch.stack([compare_hf.hf_logits(model, ids) for ids in prompts.tolist()])


def worker(python: str, script: str, source: Path, prompts: np.ndarray) -> torch.Tensor:
    given, out = (source.with_suffix(f".{name}.json") for name in ("prompts", "out"))
    given.write_text(json.dumps(prompts.tolist()))
    file = Path(__file__).with_name(script)
    command = [python, str(file), str(source), str(given), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script} ended with {done.returncode}: {done.stderr[-2000:]}")
    rows = json.loads(out.read_text())
    width = next(len(row) for prompt in rows for row in prompt if row is not None)
    nothing = [float("nan")] * width
    return torch.tensor([[row or nothing for row in prompt] for prompt in rows])


def line(
    name: str,
    theirs: torch.Tensor,
    reference: torch.Tensor,
    bounds: tuple[float, float] = BOUNDS,
) -> str | None:
    """Prints the figures; what failed, if anything did."""
    if theirs.shape != reference.shape:
        return f"{name}: {list(theirs.shape)} values, {list(reference.shape)} expected"
    said = ~theirs.isnan().any(-1)
    theirs, reference = theirs[said], reference[said]
    off = float((theirs - reference).abs().max() / reference.abs().max())
    top1 = float((theirs.argmax(-1) == reference.argmax(-1)).float().mean())
    print(f"{name}: {off:.1e} of the largest off, top-1 {top1:.1%}", flush=True)
    return None if off < bounds[0] and top1 >= bounds[1] else f"{name}: {off:.2g}, top-1 {top1:.1%}"


def prove_mlx(python: str, folder: Path) -> list[str | None]:
    failures = []
    for tied in (True, False):
        made, name = bonsai.make(tied), f"mlx {'tied' if tied else 'untied'}"
        package = bonsai.write_mlx(folder / name.replace(" ", "-"), made)
        merged = bonsai.write_unpacked(folder / f"{package.name}-merged", made, merged=True)
        convert(package, folder / f"{package.name}-out")
        prompts = prompts_of(bonsai.VOCAB)
        exact = transformers_on(merged, prompts)
        theirs = worker(python, "mlx_worker.py", package, prompts)
        failures.append(line(f"{name}: mlx-lm, transformers", theirs, exact))
        found = ours(folder / f"{package.name}-out", prompts)
        failures.append(line(f"{name}: this package, transformers", found, exact))
    return [*failures, *prove_mlx_hybrids(python, folder)]


def prove_mlx_hybrids(python: str, folder: Path) -> list[str | None]:
    """Rotated packages, tied and not, of both schemas; and one of the first generation."""
    failures = []
    models = [(hybrids.WIDE["untied"], 2), (hybrids.WIDE["tied"], 1), ("plain", 2)]
    for sizes, schema in models:
        made = hybrids.make(sizes)
        kind = f"rotated {'tied' if made.sizes.tied else 'untied'}" if made.signs else "plain"
        name = f"hybrid {kind}, schema {schema}"
        package = hybrids.write_mlx(folder / name.replace(" ", "-"), made, schema=schema)
        out = folder / f"{package.name}-out"
        convert(package, out)
        prompts = prompts_of(made.sizes.vocab)
        exact = transformers_of(made, prompts)
        theirs = worker(python, "mlx_worker.py", package, prompts)
        failures.append(line(f"{name}: mlx-lm, transformers", theirs, exact))
        failures += our_hybrid(name, out, prompts, exact, torch.clone)
    return failures


def our_hybrid(
    name: str,
    folder: Path,
    prompts: np.ndarray,
    exact: torch.Tensor,
    of: Callable[[torch.Tensor], torch.Tensor],
) -> list[str | None]:
    """`of` logits by this package, with activations of 8 bits and of 16: what rounding moves."""
    return [
        line(f"{name}: this package, {form}, transformers",
             of(ours(folder, prompts, form)), exact, bounds)
        for form, bounds in (("int8_group", INT8_STATES), ("int16_group", INT16_STATES))
    ]  # fmt: skip


@torch.no_grad()
def transformers_of(made: hybrids.Hybrid, prompts: np.ndarray) -> torch.Tensor:
    return hybrids.transformers_model(made)(torch.from_numpy(prompts)).logits


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, 1:].double().log_softmax(-1).float()


def prove_llama(python: str, folder: Path) -> list[str | None]:
    failures = []
    for tied in (True, False):
        made, name = bonsai.make(tied), f"Q2_0 of 64, {'tied' if tied else 'untied'}"
        file = folder / f"q2-{tied}.gguf"
        file.write_bytes(bonsai.gguf_file(made, "Q2_0", byte_tokenizer(bonsai.VOCAB)))
        unpacked = bonsai.write_unpacked(folder / f"q2-{tied}-unpacked", made)
        convert(file, folder / f"q2-{tied}-out", tokenizer="none")
        prompts = prompts_of(bonsai.VOCAB)
        exact = log_probabilities(transformers_on(unpacked, prompts))
        theirs = worker(python, "llama_worker.py", file, prompts)
        failures.append(line(f"{name}: llama.cpp, transformers", theirs, exact))
        found = log_probabilities(ours(folder / f"q2-{tied}-out", prompts))
        failures.append(line(f"{name}: this package, transformers", found, exact))
    return [*failures, *prove_minicpm(python, folder), *prove_llama_hybrids(python, folder)]


def prove_llama_hybrids(python: str, folder: Path) -> list[str | None]:
    """Unrotated ones; the rotation is PrismML's fork's alone."""
    failures = []
    for kind in ("Q2_0", "F16"):
        made, name = hybrids.make("plain"), f"hybrid {kind}"
        file = folder / f"hybrid-{kind}.gguf"
        keys = byte_tokenizer(made.sizes.vocab)
        file.write_bytes(
            hybrids.gguf_file(made, kind, more=keys, tokenizer__ggml__eos_token_id=None)
        )
        out = folder / f"{file.stem}-out"
        convert(file, out, tokenizer="none")
        prompts = prompts_of(made.sizes.vocab)
        exact = log_probabilities(transformers_of(made, prompts))
        theirs = worker(python, "llama_worker.py", file, prompts)
        failures.append(line(f"{name}: llama.cpp, transformers", theirs, exact))
        failures += our_hybrid(name, out, prompts, exact, log_probabilities)
    return failures


def prove_minicpm(python: str, folder: Path) -> list[str | None]:
    """The factors and the tensors beside, against a float64 forward."""
    import test_scaled_families as tests

    family, network, data = tests.minicpm_gguf()
    file, prompts = folder / "minicpm.gguf", prompts_of(family.vocab)
    file.write_bytes(data)
    convert(file, folder / "minicpm-out")
    exact = torch.stack([forward_fp64.forward(family, network, ids)[0] for ids in prompts.tolist()])
    exact = log_probabilities(exact)
    theirs = worker(python, "llama_worker.py", file, prompts)
    found = log_probabilities(ours(folder / "minicpm-out", prompts))
    return [
        line("minicpm TQ2_0: llama.cpp, float64", theirs, exact),
        line("minicpm TQ2_0: this package, float64", found, exact),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mlx", metavar="PYTHON", help="with mlx and mlx-lm")
    parser.add_argument("--xllamacpp", metavar="PYTHON", help="with xllamacpp")
    args = parser.parse_args()
    if not (args.mlx or args.xllamacpp):
        parser.error("expected --mlx or --xllamacpp, got neither; each names an interpreter")
    torch.set_num_threads(1)
    failures: list[str | None] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.mlx:
            failures += prove_mlx(args.mlx, Path(folder))
        if args.xllamacpp:
            failures += prove_llama(args.xllamacpp, Path(folder))
    failed = [failure for failure in failures if failure is not None]
    print("\n".join([f"FAILED: {failure}" for failure in failed]) or "proved")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
