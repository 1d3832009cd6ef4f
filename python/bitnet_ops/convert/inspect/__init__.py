"""What `bitnet-ops inspect` shows: what a model file or folder holds, tensor by tensor; totals.

Reads and checks all of it; runs no model. It must not know kinds of files, nor their bytes:
sources.py hands out what is in them; nor how it is shown.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.convert.inspect.sources import Contents, open_source


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything about the model at `path` as plain numbers and strings.

    Keys: file, kind, bytes, model_type, bitnet_ops (the config's private block or None), tensors
    (a list: name, format, shape, scale, scales, minus, zero, plus, nbytes, sha256), totals and
    remarks.
    Shapes are logical, [N, K]; where nothing gives K it is 4 times the row bytes, and a remark says
    so. `scale` is a tensor's only one; where there are more, `scales` has their shape, smallest and
    largest. Raises SglbitntError, GgufError or ConvertError for a file that is damaged.
    """
    source = open_source(path)
    rows = [_row(source, name) for name in source.entries]
    return {
        "file": str(source.path),
        "kind": source.kind,
        "bytes": source.nbytes,
        "model_type": source.config.get("model_type"),
        "bitnet_ops": source.config.get(PRIVATE_BLOCK),
        "tensors": rows,
        "totals": _totals(rows),
        "remarks": source.remarks,
    }


def _row(source: Contents, name: str) -> dict[str, Any]:
    entry, scales = source.entries[name], source.scales(name)
    single = scales is not None and scales.numel() == 1
    several = None
    if scales is not None and not single:
        several = {
            "shape": list(scales.shape),
            "min": float(scales.min()),
            "max": float(scales.max()),
        }
    counts = source.counts(name) or (None, None, None)
    return {
        "name": name,
        "format": entry.format,
        "shape": list(entry.shape),
        "scale": float(scales) if scales is not None and single else None,
        "scales": several,
        **dict(zip(("minus", "zero", "plus"), counts, strict=True)),
        "nbytes": entry.nbytes,
        "sha256": hashlib.sha256(source.memory(name)).hexdigest(),
    }


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    packed = [row for row in rows if row["zero"] is not None]
    dense = [row for row in rows if row["zero"] is None]
    weights = sum(math.prod(row["shape"]) for row in packed)
    parameters = sum(math.prod(row["shape"]) for row in dense)
    packed_bytes = sum(row["nbytes"] for row in packed)
    dense_bytes = sum(row["nbytes"] for row in dense)
    return {
        "tensors": len(rows),
        "packed_tensors": len(packed),
        "dense_tensors": len(dense),
        "ternary_weights": weights,
        "dense_parameters": parameters,
        "packed_bytes": packed_bytes,
        "dense_bytes": dense_bytes,
        "share_zero": _ratio(sum(row["zero"] for row in packed), weights),
        "bits_per_ternary_weight": _ratio(8 * packed_bytes, weights),
        "bits_per_parameter": _ratio(8 * (packed_bytes + dense_bytes), weights + parameters),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
