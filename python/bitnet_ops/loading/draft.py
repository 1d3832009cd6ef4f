"""The draft head in a model file: read apart from the text model, and checked."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import (
    MATRICES,
    PREFIX,
    DraftConfig,
    draft_config,
)
from bitnet_ops.config.draft_shapes import draft_shapes
from bitnet_ops.formats.sglbitnt import Reader, model_file
from bitnet_ops.loading.model_contents import model_config
from bitnet_ops.models import Decoder, TensorError
from bitnet_ops.nn.packing import PackedWeight, choose_format
from bitnet_ops.nn.storage import LAYOUTS

_REMEDY = "convert the model again"


def read_draft_head(
    file: str | os.PathLike[str] | Reader,
) -> tuple[DraftConfig, dict[str, PackedWeight | Tensor]] | None:
    """The head in the model file, or folder, `file`; None for a model without one.

    Its matrices are canonical PackedWeights of digits, [N, digits * K] (nn/digits.py), its norms
    float32, what they multiply by; in file order, named as there, `mtp.fc.weight` and so on. All
    are views of the mapped file, whose values are checked. Raises SglbitntError,
    UnsupportedModelError, and TensorError for a head that is not whole.
    """
    reader = file if isinstance(file, Reader) else Reader(model_file(Path(file)), check_codes=False)
    draft = draft_config(reader.config)
    if draft is None:
        return None
    check_draft_tensors(reader, model_config(reader), draft)
    found: dict[str, PackedWeight | Tensor] = {}
    for name in draft_shapes(model_config(reader), draft.intermediate_size):
        info, data = reader.tensors[name], reader.tensor(name)
        reader.check_sum(name)
        reader.check_data(name)
        if info.packed:
            columns, scales = info.in_features or 0, reader.scales(name)
            rows = info.shape[0]
            found[name] = PackedWeight(data, scales, rows, columns, group_size=info.group_size)
        else:
            found[name] = data
    return draft, found


def attach_draft_head(
    model: Decoder, file: str | os.PathLike[str] | Reader, weight_format: str
) -> bool:
    """Give `model` the head in its file; whether there is one. Raises as `read_draft_head`.

    weight_format: how its matrices lie in memory. One with more inputs than CPU-specific layouts
    have stays as it is in the file.
    """
    if (found := read_draft_head(file)) is None:
        return False
    draft, tensors = found
    most = LAYOUTS[choose_format(weight_format, 1)]["max_grouped_in_features"]
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedWeight) and tensor.in_features <= most:
            tensors[name] = tensor.repack(weight_format)
    model.set_draft_head(draft, tensors)
    return True


def check_draft_tensors(reader: Reader, model: ModelConfig, draft: DraftConfig) -> None:
    """Raise TensorError unless the file has exactly the tensors of `draft`, in their forms."""
    expected = draft_shapes(model, draft.intermediate_size)
    found = {name for name in reader.tensors if name.startswith(PREFIX)}
    for word, names in (("missing", expected.keys() - found), ("unknown", found - expected.keys())):
        if names:
            raise TensorError(
                f"model: expected the {len(expected)} tensors of a draft head, got "
                f"{len(found)}; {word}: {min(names)}; {_REMEDY}"
            )
    for name, shape in expected.items():
        info, matrix = reader.tensors[name], name.removesuffix(".weight") in MATRICES
        here = (info.shape[0], info.in_features) if info.packed else info.shape
        whole = (shape[0], draft.digits * shape[1]) if matrix else shape
        if info.packed != matrix or here != whole or (matrix and not info.group_size):
            kind = "ternary, in groups," if matrix else "dense"
            form = f"{'ternary' if info.packed else 'dense'} {list(here)}"
            raise TensorError(
                f"model: expected {name} {kind} of shape {list(whole)}, got {form}; {_REMEDY}"
            )
