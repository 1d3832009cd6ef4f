"""A tiny checkpoint of a family, converted, beside its oracle.

The oracle is transformers in fp32, and a float64 forward where transformers does not compute what
this package computes. `python tests/helpers/measured_family.py` prints the rows of
docs/reference/families.md.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when transformers' decorators run

import torch  # noqa: E402

import compare_hf  # noqa: E402
import forward_fp64  # noqa: E402
import hf_writer  # noqa: E402
from hf_families import CASES  # noqa: E402

TOKENS = 256


@dataclass
class Row:
    """One line of the table; differences are relative to the largest logit of the oracle.

    `clear`: on a prompt that keeps clear of rounding ties, where only fp32 rounding is left;
    `exact`: the same against the float64 forward; `top1`: argmax agreement over random tokens.
    """

    name: str
    row: str
    checkpoints: str
    recognised: str
    oracle: str
    clear: float
    exact: float
    top1: float
    weights_different: int

    def line(self):
        cells = (
            self.row, self.checkpoints, self.recognised, "yes", self.oracle, f"{self.clear:.1e}",
            f"{self.exact:.1e}", f"{100 * self.top1:.1f} %",
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


class Measured:
    """One family converted, its oracle beside it."""

    def __init__(self, case, folder):
        from bitnet_ops.convert import convert
        from bitnet_ops.language_model import load

        self.case, self.family = case, case.family
        self.network = hf_writer.make_network(case.family)
        self.source = hf_writer.write_checkpoint(
            folder / "source", case.family, network=self.network
        )
        self.report = convert(self.source, folder / "out", verify=True, **case.options)
        self.result = folder / "out"
        self.lm = load(self.result, head_format="stored")
        twin = self.source
        if case.twin is not None:
            network = self.network if case.fold is None else case.fold(self.network)
            twin = hf_writer.write_checkpoint(folder / "twin", case.twin, network=network)
        self.hf = compare_hf.load_hf(twin)
        if case.adjust is not None:
            case.adjust(self.hf)

    def row(self):
        case, family = self.case, self.family
        ids, margin = forward_fp64.clear_prompt_of(family.name, family)
        assert margin > 2e-5, "no prompt can tell a wrong model from a tie"
        exact, _ = forward_fp64.forward(family, self.network, ids)
        ours = compare_hf.our_logits(self.lm.model, ids)
        long = torch.randint(0, family.vocab, (TOKENS,), generator=torch.Generator().manual_seed(1))
        theirs, long_ours = (
            self.theirs(long.tolist()),
            compare_hf.our_logits(self.lm.model, long.tolist()),
        )
        return Row(
            family.name, case.row, case.checkpoints, case.recognised, self.oracle,
            relative(ours, self.theirs(ids)), relative(ours, exact),
            (theirs.argmax(-1) == long_ours.argmax(-1)).double().mean().item(),
            self.report.verification["weights_different"],
        )  # fmt: skip

    @property
    def oracle(self):
        import transformers

        name = f"transformers {transformers.__version__}"
        if self.case.twin is not None:
            name += ", tensors renamed" if self.case.fold is None else ", factors folded"
        if self.family.dense_ternary:
            name += " (floating activations)"
        return name

    def theirs(self, ids):
        return compare_hf.hf_logits(self.hf, ids)


def relative(a, b):
    """The largest difference of logits, relative to the largest of b."""
    return ((a.double() - b.double()).abs().max() / b.abs().max()).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES.values():
        with tempfile.TemporaryDirectory() as folder:
            print(Measured(case, Path(folder)).row().line(), flush=True)
