"""Mutants of a GGUF file with Prism's types: typed errors of one line, or tensors that decode."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np

from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.convert.gguf.config import architecture_of, hf_config
from bitnet_ops.formats import gguf_layouts
from bitnet_ops.formats.gguf import GgufError, Reader
from bonsai import Grouped, gguf_keys, packed
from gguf_bytes import gguf

RNG = np.random.default_rng(3)
MATRIX = Grouped(
    RNG.integers(-1, 2, (8, 256)).astype(np.int8), RNG.uniform(0, 1, (8, 4)).astype(np.float16)
)
KINDS = {"Q2_0": 42, "PQ2_0": 142, "PTQ1_0": 143}
SEED = gguf(
    gguf_keys(),
    [
        *((f"{kind}.weight", (8, 256), number, packed(kind, MATRIX)) for kind, number in
          KINDS.items()),
        ("norm.weight", (5,), 0, bytes(20)),
    ],
)  # fmt: skip
NUMBERS = [0, 1, 35, 41, 42, 43, 142, 143, 255, 2**31, 2**32 - 1]


def mutant(generator: random.Random) -> bytes:
    """A few damaged bytes, numbers of types or lengths, or a file cut, doubled or joined."""
    data = bytearray(SEED)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(data))
        kind = generator.randrange(6)
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            data[at] = generator.choice([0, 1, 3, 127, 128, 255])
        elif kind == 2:  # a type: wherever one stands
            places = [i for i in range(len(data) - 4) if data[i] in (42, 142, 143)]
            at = generator.choice(places or [at])
            data[at : at + 4] = struct.pack("<I", generator.choice(NUMBERS))
        elif kind == 3:
            size = generator.randint(1, 40)
            data[at : at + size] = generator.randbytes(size)
        elif kind == 4 and len(data) > 100:
            del data[-generator.randint(1, 64) :]
        else:
            data[at:at] = generator.randbytes(generator.choice([1, 4, 8, 32]))
    return bytes(data)


def verdict(path: Path) -> str:
    try:
        with Reader(path) as reader:
            for name, info in reader.tensors.items():
                if info.type.name in gguf_layouts.TERNARY_TYPES and len(info.shape) == 2:
                    data, (n, k) = reader.data(name), info.shape
                    decoded = gguf_layouts.decode(info.type.name, data, n, k)
                    assert decoded.rows.shape == (n, gguf_layouts.packed_bytes(k))
                    assert np.isfinite(decoded.scales).all()
                    assert np.isfinite(gguf_layouts.values(info.type.name, data, n, k)).all() or (
                        info.type.name in ("I2_S", "TQ1_0", "TQ2_0")
                    )
            config, _ = hf_config(reader.metadata, architecture_of(reader.metadata), 3, True, {})
            ModelConfig.from_hf(config)
    except (GgufError, gguf_layouts.LayoutError, ConvertError, UnsupportedModelError) as error:
        text = str(error)
        assert "expected" in text and "\n" not in text
        return str(getattr(error, "code", "config"))
    return "read"


def test_mutants_of_the_types_of_2026(tmp_path: Path) -> None:
    """3000 here; GGUF_MUTANTS=10000000 makes a campaign of it."""
    generator, path = random.Random(2026), tmp_path / "m.gguf"
    path.write_bytes(SEED)
    assert verdict(path) == "read"
    mutants, found = int(os.environ.get("GGUF_MUTANTS", "3000")), {}
    for _ in range(mutants):
        path.write_bytes(mutant(generator))
        code = verdict(path)
        found[code] = found.get(code, 0) + 1
    print(f"\n{mutants} mutants: {found}")
    assert mutants / 100 < found["read"] < mutants * 0.9  # both verdicts are exercised
    assert len(found) > 10
