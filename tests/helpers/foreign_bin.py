"""A second writer of SGLBITNT version 1, as a converter of others would be: hf_writer's networks.

Written from FORMAT.md and the description of the earlier writer (section 12): dense tensors widened
to float32, scales that multiply, config.json as it stands, every tensor of the checkpoint kept. It
must not import bitnet_ops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import sglbitnt_bytes
from hf_writer import FAMILIES, Family, config_dict, make_network, write_tokenizer

KINDS = ("bitnet-offline", "bitnet-offline-untied", "llama-bitlinear")


def scale_of(family: Family, stored: float) -> np.float32:
    """The multiplying scale, float32."""
    return np.float32(1.0) / np.float32(stored) if family.reciprocal else np.float32(stored)


def f32(name: str, values: Any) -> bytes:
    values = np.asarray(values, dtype="<f4")
    return sglbitnt_bytes.tensor(name.encode(), 1, values.shape, values.tobytes())


@functools.cache
def records(kind: str) -> Mapping[str, bytes]:
    """name -> record: of every tensor, and of the copies that such a writer keeps."""
    family = FAMILIES[kind]
    network, out = make_network(family), {}
    for name, value in network.items():
        if not isinstance(value, dict):
            out[f"{name}.weight"] = f32(f"{name}.weight", value)
            continue
        codes = value["codes"]
        rows = b"".join(sglbitnt_bytes.pack_row(row) for row in codes.tolist())
        stored = value["stored_scale"]
        out[f"{name}.weight"] = sglbitnt_bytes.tensor(
            f"{name}.weight".encode(),
            0,
            (codes.shape[0], len(rows) // codes.shape[0]),
            rows,
            scale=float(scale_of(family, stored)),
        )
        out[f"{name}.weight_scale"] = f32(f"{name}.weight_scale", [stored])
    if family.tied:
        out["lm_head.weight"] = f32("lm_head.weight", network["model.embed_tokens"])
    return out


def write(
    folder: Path,
    kind: str,
    *,
    config: Mapping[str, Any] = {},
    without: tuple[str, ...] = (),
    other: Mapping[str, bytes] = {},
    copies: bool = True,
) -> Path:
    """A folder with model.bin and a tokenizer.

    `config` and `without`: keys of the config to add and to leave out; `other`: records in the
    place of the right ones, or more of them; `copies`: keep what repeats other tensors.
    """
    family = FAMILIES[kind]
    keys = {k: v for k, v in config_dict(family).items() if k not in without} | dict(config)
    kept = dict(records(kind)) | dict(other)
    if not copies:
        tied = {"lm_head.weight"} if family.tied else set()
        kept = {n: r for n, r in kept.items() if not n.endswith("_scale") and n not in tied}
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(sglbitnt_bytes.file(*kept.values(), config=keys))
    write_tokenizer(folder, family.vocab)
    return folder
