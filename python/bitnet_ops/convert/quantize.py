"""`quantize`: master weights -> ternary, after a look at whether they were trained to be.

Here are the look, the decision and the packed Hugging Face folder (autobitlinear offline), written
tensor by tensor; the .bin is `convert`'s. It must not know the command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitnet_ops.config.scheme import Storage
from bitnet_ops.convert.checkpoint import Checkpoint, copy_tokenizer
from bitnet_ops.convert.comparison import text_sequences
from bitnet_ops.convert.errors import reject, said_by
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.oracles import PlainOracle
from bitnet_ops.convert.plan import scale_name
from bitnet_ops.convert.progress import Progress
from bitnet_ops.convert.report import ConvertReport
from bitnet_ops.convert.ternary import check_finite, from_masters
from bitnet_ops.convert.write import building, check_destination, convert
from bitnet_ops.errors import counted
from bitnet_ops.formats.destination import MODEL_FOLDER, TOKENIZER_FILES, folder_kind
from bitnet_ops.formats.safetensors_stream import write_safetensors
from bitnet_ops.nn.packing import absmean_scale, pack_hf

_WEIGHTS, _WRITTEN_BY = "model.safetensors", "bitnet-ops quantize"
# form -> what `force` may replace
_KINDS = {
    "bin": MODEL_FOLDER,
    "packed": folder_kind(
        {"config.json", _WEIGHTS, *TOKENIZER_FILES},
        _WEIGHTS,
        lambda head: f'"written_by":"{_WRITTEN_BY}"'.encode() in head,
    ),
}
FORMS = tuple(_KINDS)


@dataclass
class QuantizeReport:
    """What was found in the masters and what was written."""

    statistics: MastersStatistics
    text: TextMeasurement | None
    forced: bool
    declared: bool  # config.json says that these are masters for b1.58
    conversion: ConvertReport | None = None  # of form "bin"

    @property
    def trained(self) -> bool:
        """What the measurement says where there is one, otherwise config or statistic."""
        if self.text is not None:
            return self.text.trained
        return self.declared or self.statistics.trained

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        text = None if self.text is None else vars(self.text)
        return {
            "trained": self.trained,
            "forced": self.forced,
            "declared": self.declared,
            "statistics": self.statistics.to_dict(),
            "text": text,
            "conversion": None if self.conversion is None else self.conversion.to_dict(),
        }

    def lines(self) -> list[str]:
        """For people, one fact a line."""
        result = [self.statistics.line()]
        if self.text is not None:
            result.append(self.text.line())
        if not self.trained:
            result.append("forced: nothing shows that these masters were trained to be ternary")
        return result + ([] if self.conversion is None else self.conversion.lines())


@said_by("quantize")
def quantize(
    src_dir: str | Path,
    dst: str | Path,
    *,
    form: str = "bin",
    text: str | Path | None = None,
    assume_trained: bool = False,
    verify: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Ternarise the masters in the folder `src_dir` into the new folder `dst`.

    Args:
        src_dir: Hugging Face folder of a causal model with bf16, fp16 or fp32 weights; it needs no
            quantization_config.
        dst: folder to create.
        form: "bin" (model.bin, as `convert`), or "packed" (a Hugging Face folder as
            microsoft/bitnet-b1.58-2B-4T: autobitlinear offline).
        text: a UTF-8 file; the losses on it, masters rounded and unrounded, decide then.
        assume_trained: go on although nothing shows that the masters were trained to be ternary.
        verify, force, progress: as of `convert`; with "bin".
    Raises ConvertError: "not-trained" for masters that show no training for b1.58, "packed-source",
        and as `convert`. Nothing is left at `dst` then.
    """
    if form not in FORMS:
        raise ValueError(f"quantize: expected form one of {', '.join(FORMS)}, got {form!r}")
    checkpoint, target = Checkpoint(src_dir), Path(dst)
    unmarked = checkpoint.config.get("quantization_config") is None
    source = HfSource(checkpoint, assume_online=unmarked)
    plan = source.plan
    declared = not plan.scheme.assumed
    if plan.scheme.storage is not Storage.MASTERS:
        reject(
            "packed-source",
            "master weights",
            f"{plan.scheme.linear_class} {plan.scheme.quantization_mode}, ternary already",
            "`bitnet-ops convert` is for these",
        )
    check_destination(source.path, target, _KINDS[form], force=force)
    report = QuantizeReport(_statistics(source, progress), None, assume_trained, declared)
    if text is not None:
        report.text = _measure(source, Path(text))
    if not report.trained and not assume_trained:
        _reject_untrained(report)
    if form == "bin":
        report.conversion = convert(
            src_dir,
            target,
            verify=verify,
            force=force,
            assume_online=not declared,
            masters={k: v for k, v in report.to_dict().items() if k != "conversion"},
            progress=progress,
        )
    else:
        with building(target, _KINDS[form], force=force) as folder:
            _write_packed(source, folder, progress)
    return report


def _reject_untrained(report: QuantizeReport) -> None:
    if report.text is not None:
        reject(
            "not-trained",
            "a model that is no worse with its weights rounded to ternary",
            report.text.line(),
            "rounding a model that was not trained for it destroys it; --assume-trained goes on",
        )
    reject(
        "not-trained",
        "masters trained for b1.58, whose weights pile up at the rounding threshold",
        report.statistics.line(),
        "--text FILE measures the loss instead, --assume-trained goes on",
    )


def _measure(source: HfSource, text: Path) -> TextMeasurement:
    unrounded = UnroundedOracle(source, int8_activations=False)
    sequences = text_sequences(source.path, source.plan.config, text)
    return measure_text(PlainOracle(source), unrounded, sequences)


def _statistics(source: HfSource, progress: Progress | None) -> MastersStatistics:
    names = source.plan.ternary
    result = MastersStatistics()
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), f"statistics of {name}")
        masters = source.tensor(name)
        check_finite(name, masters)
        result.tensors.append(measure_tensor(name, masters))
    return result


# The packed Hugging Face folder -------------------------------------------------------------------


def _write_packed(source: HfSource, folder: Path, progress: Progress | None) -> None:
    plan, checkpoint = source.plan, source.checkpoint
    if plan.config.delta_net is not None:
        found = "layers of Gated DeltaNet, whose tensors are turned here"
        reject("packed-form", "layers of attention alone", found, "use --form bin")
    if plan.renamed or not plan.config.as_transformers:
        found = "norms that transformers' class of this architecture does not have"
        reject("packed-form", "an architecture of transformers", found, "use --form bin")
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, spec in plan.specs.items():
        if spec.kind == "dense":
            forms[name] = (_DTYPES[checkpoint.tensors[name].dtype], spec.shape)
            continue
        rows, columns = spec.shape
        if rows % 4:
            found = f"{rows} in {name}"
            reject("rows", "outputs in fours, four of which share a byte", found, "use --form bin")
        forms[name] = (torch.uint8, (rows // 4, columns))
        forms[scale_name(name)] = (torch.float32, (1,))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, (name, spec) in enumerate(plan.specs.items()):
            if progress is not None:
                progress(done, len(plan.specs), name)
            if spec.kind == "dense":
                yield name, source.dense(name)
                continue
            codes, scale, _ = from_masters(name, source.tensor(name), plan.scheme)
            yield name, pack_hf(codes)
            yield scale_name(name), torch.tensor([scale], dtype=torch.float32)

    write_safetensors(folder / _WEIGHTS, forms, tensors(), written_by=_WRITTEN_BY)
    quantization = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": None,
    }
    text = json.dumps({**checkpoint.config, "quantization_config": quantization}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    copy_tokenizer(source.path, folder)


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# Full-precision weights ---------------------------------------------------------------------------

WINDOW = 0.05  # half width of the window around the threshold, in units of the absmean
MIN_EXCESS = 1.02  # of the pooled statistic
MIN_SIGMA = 4.0  # standard errors above 1
_CHUNK = 1 << 22
_BF16_STEP = 2.0**-8  # bf16 values lie 2^-8 to 2^-7 of their size apart


@dataclass(frozen=True)
class TensorStatistics:
    """One projection's masters; shares of its weights, `scale` is the absmean."""

    name: str
    weights: int
    scale: float
    zero_share: float  # that ternarise to 0
    kurtosis: float  # 3 for a normal distribution
    distance: float  # |W - ternary(W)|^2 / |W|^2
    near: int  # weights within WINDOW of the threshold
    beside: int  # weights in the two halves beside that window, together as wide

    @property
    def excess(self) -> float:
        return self.near / max(self.beside, 1)


def measure_tensor(name: str, masters: Tensor) -> TensorStatistics:
    """The statistics of one matrix, in pieces; bf16 and fp16 values are spread over their step.

    Without the spreading the coarse grid of bf16 would put a few per cent more or fewer values into
    a window, by where its edges fall.
    """
    scale = float(absmean_scale(masters)) or 1.0  # of zeros alone
    generator = torch.Generator().manual_seed(0)
    step = 0.0 if masters.dtype == torch.float32 else _BF16_STEP
    near = beside = zeros = 0
    square = fourth = error = 0.0
    for piece in masters.detach().reshape(-1).split(_CHUNK):
        u = piece.abs().double() / scale
        ternary = u.round().clamp(max=1)
        zeros += int((ternary == 0).sum())
        square += float(u.square().sum())
        fourth += float(u.pow(4).sum())
        error += float((u - ternary).square().sum())
        if step:
            u *= 1 + step * (torch.rand(u.shape, generator=generator, dtype=u.dtype) - 0.5)
        distance = (u - 0.5).abs()
        near += int((distance < WINDOW).sum())
        beside += int(((distance >= WINDOW) & (distance < 2 * WINDOW)).sum())
    count = masters.numel()
    square = max(square, 1e-150)  # its square is a number, too
    return TensorStatistics(
        name, count, scale, zeros / count, count * fourth / square**2, error / square, near, beside
    )


@dataclass
class MastersStatistics:
    """All projections of a model; `excess` pools them, which weighs each by its size."""

    tensors: list[TensorStatistics] = field(default_factory=list)

    @property
    def excess(self) -> float:
        return sum(t.near for t in self.tensors) / max(self._beside, 1)

    @property
    def standard_error(self) -> float:
        """Of the excess, if weights were drawn independently."""
        near = max(sum(t.near for t in self.tensors), 1)
        return self.excess * math.sqrt(1 / near + 1 / max(self._beside, 1))

    @property
    def _beside(self) -> int:
        return sum(t.beside for t in self.tensors)

    @property
    def trained(self) -> bool:
        """Whether the pile-up at the threshold is there; without it nothing speaks for training."""
        above = self.excess - 1
        return above >= MIN_EXCESS - 1 and above >= MIN_SIGMA * self.standard_error

    def mean(self, field_name: str) -> float:
        """The mean of a field of the tensors, weighed by their size."""
        total = sum(t.weights for t in self.tensors)
        return sum(getattr(t, field_name) * t.weights for t in self.tensors) / max(total, 1)

    def line(self) -> str:
        """The statistics in one sentence."""
        return (
            f"excess at the threshold {self.excess:.3f} +- {self.standard_error:.3f} (1 in "
            f"ordinary weights; at least {MIN_EXCESS} and {MIN_SIGMA:g} errors above 1 asked for), "
            f"{100 * self.mean('zero_share'):.1f} % zeros, kurtosis {self.mean('kurtosis'):.2f}, "
            f"distance to ternary {self.mean('distance'):.3f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every tensor included."""
        rows = [{**dataclasses.asdict(t), "excess": t.excess} for t in self.tensors]
        means = {key: self.mean(key) for key in ("zero_share", "kurtosis", "distance")}
        return {
            "excess": self.excess,
            "standard_error": self.standard_error,
            "trained": self.trained,
            **means,
            "tensors": rows,
        }


# The measurement ----------------------------------------------------------------------------------


class UnroundedOracle(PlainOracle):
    """The plain forward on masters as they are: no ternary rounding."""

    name = "plain fp64 forward, masters unrounded"

    def projection(self, weight_name: str) -> tuple[Tensor, float | Tensor]:
        return self._read(weight_name).float(), 1.0


@dataclass(frozen=True)
class TextMeasurement:
    """Losses on a text, nats per token: masters rounded to ternary, and unrounded."""

    tokens: int
    loss_ternary: float
    loss_unrounded: float

    @property
    def trained(self) -> bool:
        """A model that was trained through the rounding is no worse for it."""
        return self.loss_ternary <= self.loss_unrounded

    def line(self) -> str:
        return (
            f"loss on the text ({counted(self.tokens, 'token')}): {self.loss_ternary:.4f} nats per "
            f"token rounded to ternary, {self.loss_unrounded:.4f} unrounded"
        )


def measure_text(
    ternary: PlainOracle, unrounded: PlainOracle, sequences: list[list[int]]
) -> TextMeasurement:
    """Both losses on `sequences` of token ids."""
    losses = [_loss(oracle.logits(sequences), sequences) for oracle in (ternary, unrounded)]
    return TextMeasurement(sum(map(len, sequences)), *losses)


def _loss(logits: Iterable[Tensor], sequences: list[list[int]]) -> float:
    total, count = 0.0, 0
    for rows, ids in zip(logits, sequences, strict=True):
        total += float(F.cross_entropy(rows[:-1], torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return total / max(count, 1)
