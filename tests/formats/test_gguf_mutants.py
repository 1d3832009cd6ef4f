"""Mutants of GGUF files with Prism's types: typed errors of one line, or tensors that decode.

One large file, whose metadata are a model's, and small ones of one matrix and every kind of value,
which a mutant costs a quarter of the time. The walk over arrays of strings, the reader's part in
C++, has a test of its own for sanitizers (csrc/tests/test_gguf_strings.cpp).
"""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np

from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.convert.gguf_config import architecture_of, hf_config
from bitnet_ops.formats import gguf_layouts
from bitnet_ops.formats.gguf import GgufError, Reader
from bonsai import Grouped, gguf_keys, packed
from gguf_bytes import gguf, key

RNG = np.random.default_rng(3)
KINDS = {"Q2_0": 42, "PQ2_0": 142, "PTQ1_0": 143}


def matrix(n: int, k: int) -> Grouped:
    codes = RNG.integers(-1, 2, (n, k)).astype(np.int8)
    return Grouped(codes, RNG.uniform(0, 1, (n, k // 64)).astype(np.float16))


def small(kind: str) -> bytes:
    """A file of one matrix, a vector, and a key of every kind of value."""
    keys = [
        key("a.str", "str", "caf\u00e9"), key("b", "u8", 7), key("c", "bool", True),
        key("d", "f32", 0.5), key("e", "[str]", ["a", "", "\u00fc"]), key("f", "[i32]", [1, -2]),
        key("general.alignment", "u32", 8),
    ]  # fmt: skip
    content = packed(kind, matrix(1, 512))  # long enough to tell Q2_0 of 64 from 128
    tensors = [("n", (2,), 0, bytes(8)), ("w", (1, 512), KINDS[kind], content)]
    return gguf(keys, tensors, alignment=8)


LARGE = gguf(
    gguf_keys(),
    [
        *((f"{kind}.weight", (8, 256), number, packed(kind, matrix(8, 256))) for kind, number in
          KINDS.items()),
        ("norm.weight", (5,), 0, bytes(20)),
    ],
)  # fmt: skip
SEEDS = (LARGE, *(small(kind) for kind in KINDS))
LARGE_OF = 8  # one mutant in so many is of the large file
NUMBERS = [0, 1, 35, 41, 42, 43, 142, 143, 255, 2**31, 2**32 - 1]
TYPES_AT = {
    seed: [i for i in range(len(seed) - 4) if seed[i] in (42, 142, 143) and not any(seed[i+1:i+4])]
    for seed in SEEDS
}  # fmt: skip


def mutant(seed: bytes, generator: random.Random) -> bytearray:
    """A few damaged bytes, numbers of types or lengths, or a file cut, doubled or joined."""
    data, below = bytearray(seed), generator.random
    for _ in range(1 + int(below() * 3)):
        at = int(below() * len(data))
        kind = int(below() * 6)
        if kind == 0:
            data[at] ^= 1 << int(below() * 8)
        elif kind == 1:
            data[at] = (0, 1, 3, 127, 128, 255)[int(below() * 6)]
        elif kind == 2:  # a type: wherever one stands
            at = min(generator.choice(TYPES_AT[seed]), len(data))
            data[at : at + 4] = struct.pack("<I", generator.choice(NUMBERS))
        elif kind == 3:
            size = 1 + int(below() * 40)
            data[at : at + size] = generator.randbytes(size)
        elif kind == 4 and len(data) > 100:
            del data[-1 - int(below() * 64) :]
        else:
            data[at:at] = generator.randbytes((1, 4, 8, 32)[int(below() * 4)])
    return data


def verdict(path: Path, whole: bool = True) -> str:
    """What reading the file at `path` ends with; `whole`: its metadata as a model's, too."""
    try:
        with Reader(path) as reader:
            for name, info in reader.tensors.items():
                if info.type.name in gguf_layouts.TERNARY_TYPES and len(info.shape) == 2:
                    check_matrix(reader, name)
            if whole:
                architecture = architecture_of(reader.metadata)
                config, _ = hf_config(reader.metadata, architecture, 3, True, {})
                ModelConfig.from_hf(config)
    except (GgufError, gguf_layouts.LayoutError, ConvertError, UnsupportedModelError) as error:
        text = str(error)
        assert "expected" in text and "\n" not in text
        return str(getattr(error, "code", "config"))
    return "read"


def check_matrix(reader: Reader, name: str) -> None:
    info = reader.tensors[name]
    data, (n, k) = reader.data(name), info.shape
    decoded = gguf_layouts.decode(info.type.name, data, n, k)
    assert decoded.rows.shape == (n, gguf_layouts.packed_bytes(k))
    assert np.isfinite(decoded.scales).all()
    if info.type.name not in ("I2_S", "TQ1_0", "TQ2_0"):
        assert np.isfinite(gguf_layouts.values(info.type.name, data, n, k)).all()


def test_mutants_of_the_types_of_2026(tmp_path: Path) -> None:
    """3000 here; GGUF_MUTANTS=10000000 makes a campaign of it, GGUF_SEED begins elsewhere."""
    mutants = int(os.environ.get("GGUF_MUTANTS", "3000"))
    generator = random.Random(int(os.environ.get("GGUF_SEED", "2026")))
    path, found = tmp_path / "m.gguf", dict[str, int]()
    for seed in SEEDS:
        path.write_bytes(seed)
        assert verdict(path, seed is LARGE) == "read"
    with path.open("r+b", buffering=0) as file:  # every mutant in the same file: 2x as fast
        for i in range(mutants):
            seed = LARGE if i % LARGE_OF == 0 else SEEDS[1 + i % len(KINDS)]
            data = mutant(seed, generator)
            os.pwrite(file.fileno(), data, 0)
            file.truncate(len(data))
            code = verdict(path, seed is LARGE)
            found[code] = found.get(code, 0) + 1
            if i % 1000000 == 999999:
                print(f"{i + 1} mutants: {found}", flush=True)
    print(f"\n{mutants} mutants: {found}")
    assert mutants / 100 < found["read"] < mutants * 0.9  # both verdicts are exercised
    assert len(found) > 10
