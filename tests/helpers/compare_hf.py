"""How close this package comes to Hugging Face transformers, in fp32, on a text cut into chapters.

    python tests/helpers/compare_hf.py tests/data/demo-model --text tests/data/demo-model/val.txt

Needs transformers and accelerate. Prints the loss of both, top-1 agreement and the largest logit
difference, then, for every linear on identical inputs, how many int8 codes and integer sums differ.
Chapters are separated by blank lines; each is read alone as bos + tokens + eos. Everything on the
transformers side is theirs: their tokenizer, their loading, their forward.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when transformers' decorators run

import torch
import torch.nn.functional as F

TERNARY = torch.tensor([-1.0, 0.0, 1.0])


# transformers ------------------------------------------------------------------------------------


def load_hf(folder):
    """The checkpoint in fp32, eager, with its ternary weights repaired where needed and checked."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    for module in model.modules():
        if type(module).__name__ == "AutoBitLinear" and not module.online_quant:
            if module.weight.dtype == torch.uint8:  # transformers 5.9 to 5.12 leave it so
                codes = module.weight.data.view(torch.int8).float()
                module.weight = torch.nn.Parameter(codes, requires_grad=False)
            assert torch.isin(module.weight, TERNARY).all(), "not ternary after loading"
    return model.eval()


def chapters(folder, text):
    """Token ids of every chapter of `text`: bos + tokens + eos."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    parts = text.rstrip("\n").split("\n\n")
    return [tokenizer(part).input_ids + [tokenizer.eos_token_id] for part in parts]


@torch.no_grad()
def hf_logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


def bit_linears(model):
    """{name: module} of the ternary linears of a transformers model."""
    kinds = ("BitLinear", "AutoBitLinear")
    return {n: m for n, m in model.named_modules() if type(m).__name__ in kinds}


def hf_codes(module, x):
    """The int8 codes [T, K] and multipliers [T, 1] of transformers for the inputs x [T, K]."""
    if type(module).__name__ == "BitLinear":
        codes, multiplier = module.activation_quant(x)
        return codes, multiplier
    from transformers.integrations.bitnet import ActQuant

    multiplier = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
    return (ActQuant.apply(x) * multiplier).round().to(torch.int8), multiplier


def hf_weight_scale(module):
    """The factor that multiplies codes, in transformers' own arithmetic."""
    if type(module).__name__ == "BitLinear":
        return 1.0 / module.weight_scale.double().item()
    if not module.online_quant:
        return module.weight_scale.double().item()
    from transformers.integrations.bitnet import WeightQuant

    return WeightQuant.apply(module.weight).abs().max().double().item()


# Ours --------------------------------------------------------------------------------------------


@torch.inference_mode()
def our_logits(model, ids):
    from bitnet_ops.nn.kv_cache import KVCache

    return model(torch.tensor([ids]), KVCache(model.config, 1, len(ids), torch.float32))[0]


# Comparison of logits ----------------------------------------------------------------------------


@dataclass
class LogitFigures:
    """Over all tokens of all chapters; losses in nats per predicted token."""

    tokens: int = 0
    predicted: int = 0
    hf_nats: float = 0.0
    our_nats: float = 0.0
    top1_equal: int = 0
    largest_lead_lost: float = 0.0
    max_logit: float = 0.0
    max_difference: float = 0.0

    def add(self, ids, theirs, ours):
        self.tokens += len(ids)
        self.predicted += len(ids) - 1
        targets = torch.tensor(ids[1:])
        self.hf_nats += F.cross_entropy(theirs[:-1].double(), targets, reduction="sum").item()
        self.our_nats += F.cross_entropy(ours[:-1].double(), targets, reduction="sum").item()
        differs = theirs.argmax(-1) != ours.argmax(-1)
        self.top1_equal += int((~differs).sum())
        if differs.any():
            best = theirs[differs].topk(2).values
            self.largest_lead_lost = max(
                self.largest_lead_lost, (best[:, 0] - best[:, 1]).max().item()
            )
        self.max_logit = max(self.max_logit, theirs.abs().max().item())
        self.max_difference = max(self.max_difference, (theirs - ours).abs().max().item())

    @property
    def loss_difference(self):
        return abs(self.our_nats - self.hf_nats) / self.predicted

    @property
    def top1(self):
        return self.top1_equal / self.tokens

    @property
    def relative_difference(self):
        return self.max_difference / self.max_logit

    def lines(self):
        return [
            f"tokens            {self.tokens} ({self.predicted} predicted)",
            f"loss              transformers {self.hf_nats / self.predicted:.6f}, ours "
            f"{self.our_nats / self.predicted:.6f} nats per token "
            f"(difference {self.loss_difference:.6f})",
            f"top-1 agreement   {100 * self.top1:.3f} % ({self.tokens - self.top1_equal} differ; "
            f"transformers' largest lead there {self.largest_lead_lost:.4f})",
            f"largest logit     {self.max_logit:.4f}, largest difference {self.max_difference:.4f} "
            f"({100 * self.relative_difference:.2f} %)",
        ]


# Comparison of linears on identical inputs -------------------------------------------------------


@dataclass
class LinearFigures:
    """Every linear on the inputs that transformers fed it."""

    linears: int = 0
    codes: int = 0
    codes_different: int = 0
    ties: int = 0  # of those, how many inputs lie within 1e-4 of a code's edge
    sums: int = 0  # of rows whose codes are all equal
    sums_different: int = 0
    worst_remainder: float = 0.0  # how far transformers' float sums lie from integers
    worst_output: float = 0.0  # |y - y_hf| relative to the row's largest |y_hf|

    def lines(self):
        return [
            f"linears           {self.linears} calls on identical inputs",
            f"int8 codes        {self.codes_different} of {self.codes:,} differ, {self.ties} of "
            "these at a rounding tie",
            f"integer sums      {self.sums_different} of {self.sums:,} differ (transformers' float "
            f"sums lie within {self.worst_remainder:.2g} of integers)",
            f"outputs           largest relative difference {self.worst_output:.2g}",
        ]


@torch.no_grad()
def compare_linears(model, tensors, sequences):
    """LinearFigures over `sequences`; `tensors` maps a module's name to (packed weight, scale)."""
    figures, handles = LinearFigures(), []
    for name, module in bit_linears(model).items():

        def hook(module, inputs, output, name=name):
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            _compare_call(figures, module, x, output.reshape(len(x), -1), *tensors[name])

        handles.append(module.register_forward_hook(hook))
    try:
        for ids in sequences:
            hf_logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    return figures


def _compare_call(figures, module, x, output, weight, scale):
    from bitnet_ops import ops

    codes, multiplier = hf_codes(module, x)
    ours, _ = ops.quantize_activations(x)
    differs = ours != codes
    scaled = x.double() * multiplier.double()
    edge = (scaled - scaled.floor() - 0.5).abs() < 1e-4
    figures.linears += 1
    figures.codes += codes.numel()
    figures.codes_different += int(differs.sum())
    figures.ties += int((differs & edge).sum())
    same = ~differs.any(dim=-1)
    exact = output[same].double() * multiplier[same].double() / hf_weight_scale(module)
    sums = ops.gemm(weight, ours[same])
    figures.sums += sums.numel()
    figures.sums_different += int((exact.round().to(torch.int32) != sums).sum())
    figures.worst_remainder = max(figures.worst_remainder, _largest((exact - exact.round()).abs()))
    y = ops.linear(x, weight, torch.tensor([scale]))[same]
    bound = output[same].abs().amax(-1, keepdim=True).clamp(min=1e-30)
    figures.worst_output = max(figures.worst_output, _largest((y - output[same]).abs() / bound))


def _largest(values):
    return values.max().item() if values.numel() else 0.0


def packed_tensors(reader):
    """{module name: (packed weight, scale)} of a formats.sglbitnt.Reader."""
    packed = {n: info for n, info in reader.tensors.items() if info.packed}
    return {n.removesuffix(".weight"): (reader.tensor(n), i.scale) for n, i in packed.items()}


# Command line ------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description="Compare with Hugging Face transformers in fp32.")
    parser.add_argument(
        "checkpoint", help="Hugging Face folder; it is converted to a temporary one"
    )
    parser.add_argument(
        "--text", required=True, help="text file, chapters separated by blank lines"
    )
    parser.add_argument("--linear-chapters", type=int, default=3, help="chapters for the linears")
    parser.add_argument("--output", metavar="FILE", help="also write the figures to FILE, as JSON")
    args = parser.parse_args()

    import transformers

    from bitnet_ops.convert import convert
    from bitnet_ops.formats.sglbitnt import Reader
    from bitnet_ops.language_model import load

    with tempfile.TemporaryDirectory() as temporary:
        converted = Path(temporary) / "model"
        convert(args.checkpoint, converted)
        theirs, ours = load_hf(args.checkpoint), load(converted, head_format="stored").model
        kinds = dict(Counter(type(m).__name__ for m in bit_linears(theirs).values()))
        print(f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, {kinds}")
        sequences = chapters(args.checkpoint, Path(args.text).read_text())
        logits = LogitFigures()
        for ids in sequences:
            logits.add(ids, hf_logits(theirs, ids), our_logits(ours, ids))
        print("\n".join(logits.lines()))
        with Reader(converted / "model.bin") as reader:
            picked = sequences[: args.linear_chapters]
            linears = compare_linears(theirs, packed_tensors(reader), picked)
        print("\n".join(linears.lines()))
    if args.output:
        figures = {"logits": asdict(logits), "linears": asdict(linears)}
        Path(args.output).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
