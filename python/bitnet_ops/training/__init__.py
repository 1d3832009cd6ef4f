"""Training with quantisation in the loop, on any device torch knows, and export to what we run.

    model = training.load_for_training("checkpoint/")      # a transformers model on masters
    ...                                                     # any torch training loop
    training.export(model, "deployed/", form="bin", tokenizer="checkpoint/")

`TrainableBitLinear` is the layer people train; `bitnet_ops.BitLinear` is the packed layer that runs
afterwards. `train_draft_head` trains a draft head for a model that has none.
docs/guide/training.md has the whole story. No forward that trains uses inference ops.
"""

from bitnet_ops.training.draft_head import (
    Acceptance,
    DraftHeadWeights,
    measure_acceptance,
    train_draft_head,
)
from bitnet_ops.training.export import export
from bitnet_ops.training.linear import (
    TrainableBitLinear,
    masters_from_codes,
    quantize_activations_ste,
    ternarize_ste,
)
from bitnet_ops.training.model import TrainingError, load_for_training, replace_linears

__all__ = [
    "Acceptance",
    "DraftHeadWeights",
    "TrainableBitLinear",
    "TrainingError",
    "export",
    "load_for_training",
    "masters_from_codes",
    "measure_acceptance",
    "quantize_activations_ste",
    "replace_linears",
    "ternarize_ste",
    "train_draft_head",
]
