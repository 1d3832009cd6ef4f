"""The converter's proof: the result, through our ops, against its source.

Two comparisons: every ternary weight and scale (exactly, but for ties of the ternarisation), and
the full logits on a text. The reference is transformers where it is installed and can load the
source, otherwise plain_forward.py. Knows the finished folder and the source; must not know how the
one became the other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.convert.hf.checkpoint import Source
from bitnet_ops.convert.hf.merged import MergedSource
from bitnet_ops.convert.hf.plan import Plan
from bitnet_ops.convert.verify.compare import LogitComparison
from bitnet_ops.convert.verify.plain_forward import PlainOracle
from bitnet_ops.convert.verify.texts import text_sequences
from bitnet_ops.convert.verify.transformers_oracle import HfOracle, OracleUnavailable
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.nn.packing import BLOCK

MAX_TOKENS = 256
MAX_SCALE_DIFFERENCE = 1e-6  # relative; a reciprocal and an fp32 mean cost a few 1e-7
MAX_TIED_SHARE = 1e-3  # of a projection's weights: masters on a tie may fall either way

# Our own words, plain English with figures, a list and a line break, so that a tokenizer has work.
SAMPLE_TEXT = """The lighthouse keeper wrote the weather into his book every evening at nine. On
the 14th of March he noted: wind from the north-west, sea rough, two ships passed before noon.
Nobody had asked him to do so, and nobody ever read a page of it while he lived.

When the tower was sold, the new owner found forty-one volumes in a dry cupboard. She took one down,
opened it in the middle, and read: "Fog until ten. Repaired the stairs. Bread, oil, nails." It was
not much of a story; but day after day the same hand had looked at the same water, and what it had
seen was different each time. She put the kettle on, sat down by the window and began to read.
"""


class Oracle(Protocol):
    """A reference: HfOracle or PlainOracle."""

    name: str

    def projection(self, weight_name: str) -> tuple[Tensor, float | Tensor]: ...

    def logits(self, sequences: list[list[int]]) -> list[Tensor]: ...


@dataclass
class Verification:
    """What was compared with what, and how close it is; no `failures` means close enough."""

    oracle: str
    why_not_transformers: str | None
    text: str
    projections: int = 0
    weights: int = 0
    weights_different: int = 0
    scale_relative_difference: float = 0.0
    logits: LogitComparison = field(default_factory=LogitComparison)
    # against the source's own arithmetic, where that leaves activations unrounded; never judged
    floating_activations: LogitComparison | None = None
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, logit figures included."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        floating = self.floating_activations
        return {
            **values,
            "logits": self.logits.to_dict(),
            "floating_activations": None if floating is None else floating.to_dict(),
            "passed": not self.failures,
        }


def verify_conversion(
    source: Source,
    plan: Plan,
    folder: Path,
    *,
    oracle: Oracle | None = None,
    text: Path | None = None,
) -> Verification:
    """Compare the finished `folder` with its source; the result's `failures` says what is wrong.

    `folder` may be the model file itself. `text`: a file to measure logits on, None for a text of
    our own. `oracle` is for tests; None chooses transformers or the plain forward.
    """
    reason = None
    if oracle is None:
        oracle, reason = choose_oracle(source, plan)
    if text is None:
        sequences, label = sample_sequences(source.folder, plan)
    else:
        sequences = text_sequences(source.folder, plan.config, text)
        label = f"text {text.name}"
    result = Verification(oracle.name, reason, label)
    _compare_weights(plan, folder, oracle, result)
    reference, ours = oracle.logits(sequences), our_logits(folder, sequences)
    result.logits = _compared(sequences, reference, ours)
    if plan.scheme.mode == "ternary":
        floating = PlainOracle(source, plan, int8_activations=False).logits(sequences)
        result.floating_activations = _compared(sequences, floating, ours)
    result.failures += result.logits.failures()
    return result


def _compared(
    sequences: list[list[int]], reference: list[Tensor], ours: list[Tensor]
) -> LogitComparison:
    comparison = LogitComparison()
    for ids, expected, found in zip(sequences, reference, ours, strict=True):
        comparison.add(ids, expected, found)
    return comparison


def choose_oracle(source: Source, plan: Plan) -> tuple[Oracle, str | None]:
    """transformers if it can serve, else the plain forward and the reason."""
    if isinstance(source, MergedSource):
        return PlainOracle(source, plan), "an adapter is merged into the masters"
    try:
        return HfOracle(source, plan), None
    except OracleUnavailable as error:
        return PlainOracle(source, plan), str(error)


def sample_sequences(folder: Path, plan: Plan) -> tuple[list[list[int]], str]:
    """Token ids to compare on, and how they were made: a text, or random ids."""
    limit = min(MAX_TOKENS, plan.config.max_position_embeddings)
    vocab = plan.config.vocab_size
    if (folder / "tokenizer.json").is_file():
        from bitnet_ops.generate.tokenizer import Tokenizer

        ids = Tokenizer.from_dir(folder).encode(SAMPLE_TEXT)[:limit]
        if len(ids) > 1 and max(ids) < vocab:
            return [ids], "sample text through tokenizer.json"
    generator = torch.Generator().manual_seed(0)
    length = min(64, limit)
    rows = torch.randint(0, vocab, (3, length), generator=generator)
    return rows.tolist(), "random token ids, seed 0"


def _compare_weights(plan: Plan, folder: Path, oracle: Oracle, result: Verification) -> None:
    with Reader(model_file(folder)) as reader:
        for name, spec in plan.specs.items():
            if spec.kind != "ternary":
                continue
            codes, scale = oracle.projection(name)
            ours = ops.unpack(reader.tensor(name), spec.shape[1])
            different = int((codes != ours).sum())
            relative = _scale_difference(reader, name, codes, scale)
            result.projections += 1
            result.weights += codes.numel()
            result.weights_different += different
            result.scale_relative_difference = max(result.scale_relative_difference, relative)
            _judge_weights(plan, name, different / codes.numel(), relative, result)


def _scale_difference(reader: Reader, name: str, codes: Tensor, expected: float | Tensor) -> float:
    """The largest relative difference of a scale, over all weights that are not zero."""
    ours = reader.scales(name)
    if isinstance(expected, float):
        return float((ours / expected - 1.0).abs().max())
    if ours.dim() == 2:
        ours = ours.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    else:
        ours = ours.reshape(-1, 1)
    used = codes != 0
    ratio = ours.expand(codes.shape)[used] / expected[used]
    return float((ratio - 1.0).abs().max()) if used.any() else 0.0


def _judge_weights(
    plan: Plan, name: str, share: float, relative: float, result: Verification
) -> None:
    allowed = MAX_TIED_SHARE if plan.scheme.mode == "masters" else 0.0
    if share > allowed:
        result.failures.append(f"{share:.3%} of the weights of {name} differ")
    if not relative <= MAX_SCALE_DIFFERENCE:
        result.failures.append(f"the scale of {name} is off by {relative:.3g} of its value")


@torch.inference_mode()
def our_logits(folder: Path, sequences: list[list[int]]) -> list[Tensor]:
    """fp32 logits [T, V] of the converted model, through torch.ops.bitnet."""
    from bitnet_ops.language_model import load
    from bitnet_ops.nn.kv_cache import KVCache

    model = load(folder, head_format="stored").model
    result = []
    for ids in sequences:
        cache = KVCache(model.config, 1, len(ids), torch.float32)
        result.append(model(torch.tensor([ids]), cache)[0])
    return result
