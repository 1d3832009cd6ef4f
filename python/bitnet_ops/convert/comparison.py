"""The converter's proof: the result, through our ops, against its source.

Two comparisons: every ternary weight and scale (exactly, but for ties of the ternarisation), and
the full logits on a text. The reference is transformers where it is installed and can load the
source, otherwise the plain forward of forward.py. How the one became the other is not looked at.

Bounds of logits and their reason: rounding activations to int8 turns a last-bit difference into a
whole step now and then, so two right fp32 forwards of a trained model agree in loss and argmax but
only to some percent in single logits; a wrong row order or scale is off by 100 %. A model of random
or hardly trained weights has flat logits and magnifies more: where a bound is broken, the plain
forward says how far the last bits of its own input carry, and twice that is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.scheme import Storage
from bitnet_ops.convert.draft_proof import DraftComparison, compare_draft
from bitnet_ops.convert.errors import reject
from bitnet_ops.convert.forward import PictureRows, Prompt
from bitnet_ops.convert.gguf_source import GgufSource
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.oracles import (
    GgufOracle,
    HfOracle,
    OracleUnavailable,
    PlainOracle,
    tower_features,
)
from bitnet_ops.convert.source import Plan, Source
from bitnet_ops.convert.ternary import damage, implausible, implausible_dense
from bitnet_ops.convert.tower import Tower
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.generate.prompt import PromptRows, split_prompt
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.loading.weights import load_model
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.packing import BLOCK, spread_scales
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.weights import PREFIX, load_tower, shapes

PIECE_TOKENS = 512  # of a text; a plain forward's attention is quadratic
MAX_TEXT_TOKENS = 4096
MAX_SAMPLE_TOKENS = 256
MAX_SCALE_DIFFERENCE = 1e-6  # relative; a reciprocal and an fp32 mean cost a few 1e-7
MAX_TIED_SHARE = 1e-3  # of a projection's weights: masters on a tie may fall either way
MAX_RELATIVE_DIFFERENCE = 0.1  # of the largest logit; two right forwards reach 0.04 at worst
MIN_TOP1 = 0.95  # on a few hundred tokens; 0.99 and more over thousands
NUDGE = 2.0**-17  # of embedded values: what a float32 forward's roundings amount to, at most
# of the largest value of a row of an image: float32 sums in another order reach 1e-6, and the
# smallest mistake of the maths is above this
MAX_TOWER_DIFFERENCE = 1e-4
# of the largest logit of a prompt with images; in a model of random weights, which magnifies
# more than a trained one, 16-bit activations reach 4e-4 and wrong positions 6e-2
MAX_IMAGE_DIFFERENCE = 1e-2
TOWER_GRIDS = [(4, 6), (2, 8), (10, 14)]  # rows and columns of patches
IMAGE_WORDS = 12  # of the text before each image and behind the last
MAX_LOSS_DIFFERENCE = 0.02  # nats per token on a few hundred tokens; 0.001 over ten thousand

# Our own words, plain English with figures, a list and a line break, so that a tokenizer has work.
SAMPLE_TEXT = """The lighthouse keeper wrote the weather into his book every evening at nine. On
the 14th of March he noted: wind from the north-west, sea rough, two ships passed before noon.
Nobody had asked him to do so, and nobody ever read a page of it while he lived.

When the tower was sold, the new owner found forty-one volumes in a dry cupboard. She took one down,
opened it in the middle, and read: "Fog until ten. Repaired the stairs. Bread, oil, nails." It was
not much of a story; but day after day the same hand had looked at the same water, and what it had
seen was different each time. She put the kettle on, sat down by the window and began to read.
"""


_Ids = Sequence["int | PromptRows"]  # a prompt as ours


@dataclass
class LogitComparison:
    """Figures over all tokens of all sequences; losses in nats per predicted token."""

    tokens: int = 0
    max_abs_logit: float = 0.0
    max_abs_difference: float = 0.0
    top1_agreeing: int = 0
    largest_lead_lost: float = 0.0  # the reference's lead at positions where the argmax differs
    loss_reference_sum: float = 0.0
    loss_ours_sum: float = 0.0
    predicted: int = 0
    finite: bool = True

    def add(self, ids: list[int], reference: Tensor, ours: Tensor) -> None:
        """Count one sequence: token ids and both logits f32 [T, V]."""
        self.finite = self.finite and bool(torch.isfinite(ours).all())
        self.tokens += len(ids)
        self.max_abs_logit = max(self.max_abs_logit, float(reference.abs().max()))
        difference = float((reference - ours).abs().max())
        self.max_abs_difference = max(self.max_abs_difference, difference)
        self._add_top1(reference, ours)
        if len(ids) > 1:
            targets = torch.tensor(ids[1:])
            self.predicted += len(targets)
            self.loss_reference_sum += float(_loss(reference, targets))
            self.loss_ours_sum += float(_loss(ours, targets))

    def _add_top1(self, reference: Tensor, ours: Tensor) -> None:
        agrees = reference.argmax(-1) == ours.argmax(-1)
        self.top1_agreeing += int(agrees.sum())
        if not agrees.all():
            best = reference[~agrees].topk(2).values
            lead = float((best[:, 0] - best[:, 1]).max())
            self.largest_lead_lost = max(self.largest_lead_lost, lead)

    def to_dict(self) -> dict[str, float | int]:
        """The figures, with the derived ones, JSON-ready."""
        return {
            "tokens": self.tokens,
            "max_abs_logit": self.max_abs_logit,
            "max_abs_logit_difference": self.max_abs_difference,
            "relative_logit_difference": self.relative,
            "top1_agreement": self.top1,
            "largest_lead_at_disagreement": self.largest_lead_lost,
            "loss_reference": self.loss_reference_sum / max(self.predicted, 1),
            "loss_ours": self.loss_ours_sum / max(self.predicted, 1),
            "perplexity_reference": _perplexity(self.loss_reference_sum, self.predicted),
            "perplexity_ours": _perplexity(self.loss_ours_sum, self.predicted),
        }

    @property
    def relative(self) -> float:
        """The largest difference of a logit, relative to the reference's largest."""
        return self.max_abs_difference / max(self.max_abs_logit, 1e-30)

    @property
    def top1(self) -> float:
        """The share of positions where both choose the same token."""
        return self.top1_agreeing / max(self.tokens, 1)

    @property
    def loss_difference(self) -> float:
        """Absolute difference of the losses, nats per token."""
        return abs(self.loss_ours_sum - self.loss_reference_sum) / max(self.predicted, 1)

    def failures(self, noise: LogitComparison | None = None) -> list[str]:
        """One sentence for every bound that is broken; NaN breaks all of them.

        noise: of two right forwards of this model; twice that is allowed.
        """
        n = noise or LogitComparison()
        maximum = max(MAX_RELATIVE_DIFFERENCE, 2 * n.relative)
        minimum = MIN_TOP1 if noise is None else min(MIN_TOP1, 1 - 2 * (1 - n.top1))
        apart = max(MAX_LOSS_DIFFERENCE, 2 * n.loss_difference)
        failures = [] if self.finite else ["non-finite logits"]
        if not self.relative <= maximum:
            failures.append(
                f"a logit off by {self.relative:.3g} of the largest (at most {maximum:.3g})"
            )
        if not self.top1 >= minimum:
            failures.append(f"top-1 agreement {self.top1:.4f} (at least {minimum:.4g})")
        if not self.loss_difference <= apart:
            failures.append(
                f"losses {self.loss_difference:.4g} nats per token apart (at most {apart:.3g})"
            )
        return failures


def _perplexity(loss_sum: float, predicted: int) -> float:
    """exp of the mean loss, kept finite for JSON."""
    return math.exp(min(loss_sum / max(predicted, 1), 700.0))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the next-token losses: logits [T, V] against the T - 1 ids that follow."""
    return F.cross_entropy(logits[:-1].double(), targets, reduction="sum")


class Oracle(Protocol):
    """A reference: HfOracle or PlainOracle."""

    name: str

    def projection(self, weight_name: str) -> tuple[Tensor, float | Tensor]: ...

    def logits(self, sequences: list[list[int]]) -> list[Tensor]: ...


@dataclass
class TowerComparison:
    """A tower for images: its tensors, and its rows for three images of noise.

    oracle: None where transformers cannot serve, for `why_not_transformers`; tensors are compared
    all the same. relative_difference: the largest of a row's values, relative to the largest value.
    """

    tensors: int = 0
    tensors_different: int = 0
    oracle: str | None = None
    why_not_transformers: str | None = None
    rows: int = 0
    relative_difference: float = 0.0
    # of a prompt of words and these images, without roundings to 8 bits
    logits: LogitComparison = field(default_factory=LogitComparison)

    def to_dict(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "logits": self.logits.to_dict()}

    def failures(self) -> list[str]:
        """One sentence for every bound that is broken; NaN breaks them."""
        found = []
        if not (self.logits.finite and self.logits.relative <= MAX_IMAGE_DIFFERENCE):
            found.append(
                f"a logit of a prompt with images off by {self.logits.relative:.3g} of the largest "
                f"(at most {MAX_IMAGE_DIFFERENCE:.3g})"
            )
        if self.tensors_different:
            found.append(f"{self.tensors_different} of {self.tensors} tensors of the tower differ")
        if not self.relative_difference <= MAX_TOWER_DIFFERENCE:
            found.append(
                f"a row of an image off by {self.relative_difference:.3g} of the largest value "
                f"(at most {MAX_TOWER_DIFFERENCE:.3g})"
            )
        return found


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
    tower: TowerComparison | None = None  # where there is one
    draft: DraftComparison | None = None  # likewise
    # of the plain forward and itself with a nudged input, where a usual bound was broken
    noise: LogitComparison | None = None
    damage: list[str] = field(default_factory=list)  # of the source; among the failures
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, logit figures included."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in values.items():
            if isinstance(value, LogitComparison):
                values[name] = value.to_dict()
            elif isinstance(value, TowerComparison | DraftComparison):
                values[name] = value.to_dict()
        return {**values, "passed": not self.failures}


def verify_conversion(
    source: Source, folder: Path, *, oracle: Oracle | None = None, text: Path | None = None
) -> Verification:
    """Compare the finished model in `folder` with its source; `failures` says what is wrong.

    `folder` may be the model file itself. `text`: a file to measure logits on, None for a text of
    our own. `oracle` is for tests; None chooses transformers or a plain forward.
    """
    reason, file, plan = None, model_file(folder), source.plan
    if oracle is None:
        oracle, reason = choose_oracle(source)
    tokenizer = source.tokenizer_folder or file.parent
    if text is None:
        sequences, label = sample_sequences(tokenizer, plan)
    else:
        sequences, label = text_sequences(tokenizer, plan.config, text), f"text {text.name}"
    result = Verification(oracle.name, reason, label)
    _compare_weights(source, file, oracle, result)
    reference, ours = oracle.logits(sequences), our_logits(file, sequences)
    if not all(bool(torch.isfinite(logits).all()) for logits in reference):
        result.damage.append("the source's own logits are not finite")
    result.logits = _compared(sequences, reference, ours)
    if result.logits.failures():
        plain = oracle if isinstance(oracle, PlainOracle) else plain_oracle(source)
        undisturbed = reference if plain is oracle else plain.logits(sequences)
        result.noise = _compared(sequences, undisturbed, plain.logits(sequences, NUDGE))
    _compare_unrounded(source, file, sequences, ours, result)
    result.draft = compare_draft(source.draft, file)
    if result.draft is not None:
        result.failures += result.draft.failures()
    result.failures += [*result.damage, *result.logits.failures(result.noise)]
    return result


def _compare_unrounded(
    source: Source,
    file: Path,
    sequences: list[list[int]],
    ours: list[Tensor],
    result: Verification,
) -> None:
    """With activations that are not rounded: the source's own arithmetic, and images in prompts.

    Rounding to 8 bits would hide wrong positions of images, so ours rounds to 16.
    """
    texts = [] if source.plan.scheme.rounds_activations else sequences
    if not texts and source.tower is None:
        return
    prompts = list[Prompt](texts)
    if source.tower is not None:
        result.tower, theirs, own = compare_tower(source.tower, file)
        expected, given = _with_images(source.tower.config, sequences[0], theirs, own)
        prompts.append(expected)
    floating = plain_oracle(source, int8_activations=False).logits(prompts)
    if texts:
        result.floating_activations = _compared(texts, floating[: len(texts)], ours)
    if result.tower is not None:
        found = our_logits(file, [given], "int16_group")
        ids = list(split_prompt(given, source.plan.config.hidden_size)[0])
        result.tower.logits = _compared([ids], floating[len(texts) :], found)
        result.failures += result.tower.failures()


def _with_images(
    config: VisionConfig, words: list[int], theirs: list[Tensor], ours: list[Tensor]
) -> tuple[Prompt, _Ids]:
    """A prompt with images between words, for the plain forward and for us, with rows of each."""
    start, end = config.vision_start_token_id, config.vision_end_token_id
    expected: list[int | PictureRows] = []
    found: list[int | PromptRows] = []
    grids = [(height // 2, width // 2) for height, width in TOWER_GRIDS]
    for i, (grid, rows, own) in enumerate(zip(grids, theirs, ours, strict=True)):
        before = [*words[IMAGE_WORDS * i : IMAGE_WORDS * (i + 1)], start]
        expected += [*before, PictureRows(rows, *grid), end]
        found += [*before, PromptRows(own, config.image_token_id, None, grid), end]
    return [*expected, *words[:IMAGE_WORDS]], [*found, *words[:IMAGE_WORDS]]


def compare_tower(tower: Tower, file: Path) -> tuple[TowerComparison, list[Tensor], list[Tensor]]:
    """The tower of a source with the one in the model file that was made of it, in float32.

    And the rows of three images by the reference and by ours; ours twice without a reference.
    """
    result = TowerComparison()
    with Reader(file, check_codes=False) as reader:
        for name in shapes(tower.config):
            stored, given = reader.tensor(PREFIX + name), tower.read(name)
            result.tensors += 1
            result.tensors_different += not torch.equal(stored, given.to(stored.dtype))
    generator = torch.Generator().manual_seed(0)
    counts = [height * width for height, width in TOWER_GRIDS]
    pixels = torch.rand(sum(counts), tower.config.patch_features, generator=generator) * 2 - 1
    twice = pixels.view(-1, 3, 1, tower.config.patch_size**2).repeat(1, 1, 2, 1).flatten(1)
    loaded = load_tower(file)
    assert loaded is not None
    with torch.inference_mode():
        ours = list(loaded(pixels, TOWER_GRIDS))
    try:
        result.oracle, expected = tower_features(tower, twice, TOWER_GRIDS)
    except OracleUnavailable as error:
        result.why_not_transformers = str(error)
        return result, ours, ours
    found, reference = torch.cat(ours), torch.cat(expected)
    result.rows = len(found)
    largest = float(reference.abs().max())
    result.relative_difference = float((found - reference).abs().max()) / max(largest, 1e-30)
    return result, expected, ours


def _compared(
    sequences: list[list[int]], reference: list[Tensor], ours: list[Tensor]
) -> LogitComparison:
    comparison = LogitComparison()
    for ids, expected, found in zip(sequences, reference, ours, strict=True):
        comparison.add(ids, expected, found)
    return comparison


def choose_oracle(source: Source) -> tuple[Oracle, str | None]:
    """transformers if it can serve, else a plain forward and the reason."""
    if isinstance(source, GgufSource):
        return plain_oracle(source), "a GGUF file is not its to read"
    assert isinstance(source, HfSource)
    if source.adapter is not None:
        return plain_oracle(source), "an adapter is merged into the masters"
    try:
        return HfOracle(source), None
    except OracleUnavailable as error:
        return plain_oracle(source), str(error)


def plain_oracle(source: Source, *, int8_activations: bool = True) -> PlainOracle:
    """A plain forward over a source of any kind."""
    if isinstance(source, GgufSource):
        return GgufOracle(source, int8_activations=int8_activations)
    return PlainOracle(source, int8_activations=int8_activations)


def sample_sequences(folder: Path, plan: Plan) -> tuple[list[list[int]], str]:
    """Token ids to compare on, and how they were made: a text, or random ids."""
    limit = min(MAX_SAMPLE_TOKENS, plan.config.max_position_embeddings)
    vocab = plan.config.vocab_size
    if (folder / "tokenizer.json").is_file():
        ids = Tokenizer.from_dir(folder).encode(SAMPLE_TEXT)[:limit]
        if len(ids) > 1 and max(ids) < vocab:
            return [ids], "sample text through tokenizer.json"
    generator = torch.Generator().manual_seed(0)
    length = min(64, limit)
    rows = torch.randint(0, vocab, (3, length), generator=generator)
    return rows.tolist(), "random token ids, seed 0"


def text_sequences(folder: Path, config: ModelConfig, text: Path) -> list[list[int]]:
    """The first MAX_TEXT_TOKENS tokens of the UTF-8 file `text`, in pieces that fit the context.

    Raises ConvertError: no tokenizer.json in `folder`, no readable text, fewer than two tokens, or
    a tokenizer with more ids than the model.
    """
    if not (folder / "tokenizer.json").is_file():
        reject("text-tokenizer", f"tokenizer.json in {folder}", "none", "a text needs a tokenizer")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reject("text-file", f"a UTF-8 text file {text}", str(error))
    ids = Tokenizer.from_dir(folder).encode(content)[:MAX_TEXT_TOKENS]
    if len(ids) < 2:
        reject("text-file", f"some words in {text}", f"{len(ids)} tokens")
    if max(ids) >= config.vocab_size:
        found = f"id {max(ids)}"
        reject("text-tokenizer", f"token ids below vocab_size {config.vocab_size}", found)
    size = min(PIECE_TOKENS, config.max_position_embeddings)
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


def _compare_weights(source: Source, file: Path, oracle: Oracle, result: Verification) -> None:
    plan, warnings = source.plan, list[str]()
    with Reader(file) as reader:
        for name in plan.ternary:
            codes, scale = oracle.projection(name)
            group = reader.tensors[name].group_size or BLOCK
            scale = scale if isinstance(scale, float) else _larger_of_groups(scale, group)
            ours, scales = ops.unpack(reader.tensor(name), codes.shape[1]), reader.scales(name)
            if scales.dim() == 2:
                scales = spread_scales(scales, group, codes.shape[1])
            elif len(scales) > 1:
                scales = scales.unsqueeze(1)
            if plan.scheme.storage is Storage.GGUF:  # every value to the last bit
                different = int((ours.float() * scales != codes.float() * scale).sum())
            else:
                different = int((codes != ours).sum())
            relative = _scale_difference(scales, codes, scale)
            result.projections += 1
            result.weights += codes.numel()
            result.weights_different += different
            result.scale_relative_difference = max(result.scale_relative_difference, relative)
            if warning := implausible(name, ours, source.unwritten_rows(name)):
                warnings.append(warning)
            _judge_weights(plan, name, different / codes.numel(), relative, result)
        for name in set(plan.specs) - set(plan.ternary):
            if not reader.tensors[name].packed:
                tensor = reader.tensor(name)
                if warning := implausible_dense(name, tensor, plan.config.family.norm_offset):
                    warnings.append(warning)
    result.damage = damage(warnings)


def _larger_of_groups(scale: Tensor, size: int) -> Tensor:
    """Every weight's scale [N, K] as the conversion means it: a group's largest, if all are near.

    Where the magnitudes of a group lie further apart than that they stay, and will differ.
    """
    n, k = scale.shape
    groups = F.pad(scale, (0, -k % size)).view(n, -1, size)
    largest = groups.amax(2, keepdim=True)
    near = ((groups == 0) | (largest - groups <= largest / 128)).all(2, keepdim=True)
    merged = torch.where(near & (groups != 0), largest, groups)
    return merged.view(n, -1)[:, :k]


def _scale_difference(ours: Tensor, codes: Tensor, expected: float | Tensor) -> float:
    """The largest relative difference of a scale, over all weights that are not zero."""
    used = codes != 0
    if isinstance(expected, float):  # of zeros alone, everybody has another
        return float((ours / expected - 1.0).abs().max()) if used.any() else 0.0
    ratio = ours.expand(codes.shape)[used] / expected[used]
    return float((ratio - 1.0).abs().max()) if used.any() else 0.0


def _judge_weights(
    plan: Plan, name: str, share: float, relative: float, result: Verification
) -> None:
    allowed = MAX_TIED_SHARE if plan.scheme.storage is Storage.MASTERS else 0.0
    if share > allowed:
        result.failures.append(f"{share:.3%} of the weights of {name} differ")
    if not relative <= MAX_SCALE_DIFFERENCE:
        result.failures.append(f"the scale of {name} is off by {relative:.3g} of its value")


@torch.inference_mode()
def our_logits(
    file: Path, prompts: Sequence[_Ids], activation_format: str | None = None
) -> list[Tensor]:
    """fp32 logits [T, V] of the converted model, through torch.ops.bitnet."""
    model = load_model(file, head_format="stored")
    if activation_format is not None:
        model.set_activation_format(activation_format)
    result = []
    for prompt in prompts:
        ids, runs = split_prompt(prompt, model.config.hidden_size)
        count = len(ids)
        cache = KVCache(model.config, 1, count, torch.float32)
        cache.prepare(count)
        slot = cache.slots[0]  # -1: the model keeps no states
        state = (slot, 0, 0) if slot >= 0 else None
        step = SequenceStep(ids, 0, cache.blocks[0], count, state=state)
        if runs is not None:
            step = step._replace(axes=runs.positions(0, count), rows=runs.rows(0, count))
        result.append(model.step(StepBatch.of([step], cache.pool.block_size), cache.pool))
    return result
