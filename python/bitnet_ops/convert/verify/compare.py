"""How close two sets of logits are, and whether that is as close as two right implementations come.

Bounds and their reason: rounding activations to int8 turns a last-bit difference into a whole step
now and then, so two right fp32 forwards of a trained model agree in loss and argmax but only to
some percent in single logits; a wrong row order or scale is off by 100 %. It must not know models
or files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_RELATIVE_DIFFERENCE = 0.1  # of the largest logit; two right forwards reach 0.04 at worst
MIN_TOP1 = 0.95  # on a few hundred tokens; 0.99 and more over thousands
MAX_LOSS_DIFFERENCE = 0.02  # nats per token on a few hundred tokens; 0.001 over ten thousand


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

    def failures(self) -> list[str]:
        """One sentence for every bound that is broken; NaN breaks all of them."""
        failures = [] if self.finite else ["non-finite logits"]
        if not self.relative <= MAX_RELATIVE_DIFFERENCE:
            failures.append(
                f"a logit off by {self.relative:.3g} of the largest "
                f"(at most {MAX_RELATIVE_DIFFERENCE})"
            )
        if not self.top1 >= MIN_TOP1:
            failures.append(f"top-1 agreement {self.top1:.4f} (at least {MIN_TOP1})")
        if not self.loss_difference <= MAX_LOSS_DIFFERENCE:
            failures.append(
                f"losses {self.loss_difference:.4g} nats per token apart "
                f"(at most {MAX_LOSS_DIFFERENCE})"
            )
        return failures


def _perplexity(loss_sum: float, predicted: int) -> float:
    """exp of the mean loss, kept finite for JSON."""
    return math.exp(min(loss_sum / max(predicted, 1), 700.0))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the next-token losses: logits [T, V] against the T - 1 ids that follow."""
    return F.cross_entropy(logits[:-1].double(), targets, reduction="sum")
