"""Loading that must not warn, and a model file written anew in another version."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from bitnet_ops.formats.sglbitnt import Reader, Writer
from bitnet_ops.language_model import LanguageModel, load


def load_without_warning(*args: Any, **options: Any) -> LanguageModel:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(*args, **options)


def rewritten(source: Path, target: Path, version: int) -> Path:
    """The model file `source` in another version of the format, as `target`."""
    reader = Reader(source)
    names = list(reader.tensors)
    with Writer(target, reader.config, len(names), names, version=version) as writer:
        for name, info in reader.tensors.items():
            if info.packed:
                assert info.scale is not None and info.in_features is not None
                writer.add_packed(name, reader.tensor(name), info.scale, info.in_features)
            else:
                writer.add_dense(name, reader.tensor(name))
    return target
