"""A second opinion on exported GGUF files: llama-cpp-python must read them and answer alike.

A small Llama is trained ternary on a few pages, converted, exported as TQ2_0 and TQ1_0, and run by
llama.cpp: the same token ids of texts, the same greedy continuations, the same best token at nearly
every position of the text. Its arithmetic differs from ours (activations are rounded in blocks of
256, scales are float16), so logits agree to some percent, and a token may differ where the best two
are nearly equal: such a difference is reported, and fails when the lead was large. Tokenizers of
each kind that can be exported are compared with llama.cpp's as well, and random networks of every
architecture that llama.cpp has (a wrong order of rows would be off by 30 % and more).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import unicodedata
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

import bitnet_ops
from bitnet_ops import training
from bitnet_ops.convert.gguf_export import PROBES, export_gguf
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.nn.kv_cache import KVCache

MISSING = 3
MAX_LEAD_LOST = 0.05  # of the largest logit: more than rounding of activations can turn over
MIN_TOP1 = 0.98
MAX_LOGITS_OFF = 0.1  # of the largest, of a random network; rounding of activations costs 2 to 4 %
LENGTH = 64  # tokens of a training sequence
VAL = Path(__file__).resolve().parent.parent / "data" / "demo-model" / "val.txt"
TEXTS = ["Hello world", "  two  spaces\n\nlines\t", "don't 1234 I'll", "Grüße 日本 🙂", "a<s>b</s>"]


def train(folder: Path, steps: int) -> None:
    """A Llama of 2 layers that knows some pages by heart, as a converted model in `folder`."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5,
        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    training.replace_linears(model)
    ids = torch.tensor(text_ids())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - LENGTH, (4,))
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    training.export(model, folder, form="bin", tokenizer=DEMO_DIR)


def text_ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    ids = tokenizer.encode(VAL.read_text(encoding="utf-8")[:3000], add_special_tokens=False).ids
    return list(ids)


class Ours:
    def __init__(self, folder: Path) -> None:
        self.lm = bitnet_ops.load(folder, head_format="stored")

    def logits(self, ids: list[int]) -> torch.Tensor:
        model = self.lm.model
        return model(torch.tensor([ids]), KVCache(model.config, 1, len(ids), torch.float32))[0]

    def tokenize(self, text: str) -> list[int]:
        return self.lm.tokenizer.encode(text)


class Theirs:
    def __init__(self, file: Path) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(
            str(file), n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
        )

    def logits(self, ids: list[int]) -> torch.Tensor:
        self.llama.reset()
        self.llama.eval(ids)
        return torch.tensor(self.llama.scores[: len(ids)])

    def tokenize(self, text: str) -> list[int]:
        return list(self.llama.tokenize(text.encode(), add_bos=True, special=True))


def greedy(model: Ours | Theirs, ids: list[int], count: int) -> list[int]:
    """The `count` best next tokens, one after the other."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[-count:]


def compare(ours: Ours, theirs: Theirs, prompts: list[list[int]], count: int) -> list[str]:
    """Prints the figures; returns what failed."""
    failures = [
        f"token ids of {t!r} differ" for t in TEXTS if ours.tokenize(t) != theirs.tokenize(t)
    ]
    equal = 0
    for prompt in prompts:
        a, b = greedy(ours, prompt, count), greedy(theirs, prompt, count)
        equal += a == b
        if a != b:
            at = next(i for i in range(count) if a[i] != b[i])
            lead = relative_lead(ours.logits([*prompt, *a[:at]])[-1])
            print(f"  a continuation differs at token {at}, where our lead is {lead:.2%}")
            if lead > MAX_LEAD_LOST:
                failures.append(f"a greedy token differs at a lead of {lead:.2%}")
    if equal < 0.9 * len(prompts):
        failures.append(f"only {equal} of {len(prompts)} continuations are equal")
    ids = text_ids()[:400]
    a_logits, b_logits = ours.logits(ids), theirs.logits(ids)
    top1 = float((a_logits.argmax(-1) == b_logits.argmax(-1)).float().mean())
    largest = float((a_logits - b_logits).abs().max() / a_logits.abs().max())
    if top1 < MIN_TOP1:
        failures.append(f"top-1 agreement {top1:.3f}, at least {MIN_TOP1} expected")
    print(
        f"  {len(TEXTS)} texts tokenised; {equal} of {len(prompts)} greedy continuations of "
        f"{count} tokens equal; top-1 {top1:.1%} of {len(ids)} positions; largest logit "
        f"difference {largest:.2%} of the largest logit"
    )
    return failures


def compare_tokenizers(model: Path, folder: Path) -> list[str]:
    """The tokenizers that test_gguf_tokenizer.py makes, in the vocabulary of a file of ours."""
    import llama_cpp
    import test_gguf_tokenizer as tests

    made = {name: tests.trained(name) for name in tests.ORIGINALS}
    made["sentencepiece"] = tests.rebuilt(
        {**tests.SENTENCEPIECE, "tokenizer.ggml.add_bos_token": False}
    )
    failures = []
    for name, tokenizer in made.items():
        shutil.copytree(model, folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        file = folder / f"{name}.gguf"
        export_gguf(folder / name, file, type="tq2_0")
        llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        texts = [*tests.TEXTS, *PROBES, *tests.CORPUS.split("\n\n")[:40]]
        texts = [text for text in texts if text and "\0" not in text]
        # llama.cpp leaves NFC out, so both are given composed characters
        if isinstance(tokenizer.normalizer, NFC):
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        other = [
            text
            for text in texts
            if tokenizer.encode(text, add_special_tokens=False).ids
            != list(llama.tokenize(text.encode(), add_bos=False, special=True))
        ]
        print(f"tokenizer {name}: the ids of {len(texts) - len(other)} of {len(texts)} texts equal")
        failures += [f"tokenizer {name}: other ids for {text[:60]!r}" for text in other]
    return failures


def compare_architectures(folder: Path) -> list[str]:
    """test_gguf_import.py's random networks: logits, whose leads are too small to choose tokens."""
    import llama_cpp
    import test_gguf_import as tests

    failures = []
    for family, architecture in tests.ALL:
        if architecture.startswith("bitnet-"):
            continue  # bitnet.cpp's own
        place = folder / family.name
        place.mkdir()
        network = tests.make_network(family)
        data = tests.model_file(family, network, architecture, "I2_S")
        model = tests.converted(place, data)
        export_gguf(model, place / "x.gguf", type="tq2_0")
        llama = llama_cpp.Llama(
            str(place / "x.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False
        )
        ids = torch.randint(2, 258, (24,), generator=torch.Generator().manual_seed(0)).tolist()
        llama.eval(ids)
        theirs, ours = torch.tensor(llama.scores[: len(ids)]), tests.run(model, ids)
        off = float((ours - theirs).abs().max() / ours.abs().max())
        print(f"architecture {architecture} ({family.name}): logits {off:.1%} of the largest off")
        if off > MAX_LOGITS_OFF:
            failures.append(f"{family.name}: logits {off:.1%} off")
    return failures


def relative_lead(logits: torch.Tensor) -> float:
    best = logits.topk(2).values
    return float((best[0] - best[1]) / logits.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a converted Llama to use, or to leave here")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--tokens", type=int, default=32, help="of every continuation")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama_cpp is not installed: pip install llama-cpp-python (it compiles llama.cpp)")
        return MISSING
    import llama_cpp

    print(f"llama-cpp-python {llama_cpp.__version__}, bitnet-ops {bitnet_ops.__version__}")
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = args.model or Path(name) / "model"
        if not folder.exists():
            train(folder, args.steps)
        ours, ids = Ours(folder), text_ids()
        prompts = [[0, *ids[at : at + 12]] for at in range(0, 500, 50)]
        for kind in ("tq2_0", "tq1_0"):
            report = export_gguf(folder, Path(name) / f"{kind}.gguf", type=kind)
            print(f"{kind}: {report.output_bytes} bytes, scales {report.largest_rounding:.2g} off")
            theirs = Theirs(Path(name) / f"{kind}.gguf")
            failures += compare(ours, theirs, prompts, args.tokens)
        failures += compare_tokenizers(folder, Path(name))
        failures += compare_architectures(Path(name))
    print("\n".join([f"FAILED: {f}" for f in failures]) or "proved")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
