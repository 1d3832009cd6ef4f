"""For the tests of the load cache and of conversion: a small model, a cache, what was loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.sglbitnt import Reader, Writer
from bitnet_ops.generate.engine import Limits
from bitnet_ops.language_model import LanguageModel, load


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    dummy.write("tiny", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def tokens(lm: LanguageModel) -> list[int]:
    return lm.engine.generate([[1, 2, 3]], limits=Limits(12))[0].token_ids


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


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
