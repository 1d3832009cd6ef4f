"""Networks of hf_writer with neurons whose gate and up rows are all zero, as the 2B-4T has them.

There they are 9,870 of 207,360: 329 of the 6912 of every layer, the same ones in all. It must never
import bitnet_ops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import hf_writer

INTER, DEAD = 6912, 329  # of a layer; times 30 layers


def published(base: str, name: str, **changes: Any) -> hf_writer.Family:
    """A family of few features, but with the published number of neurons."""
    sizes = {"hidden": 128, "inter": INTER, "heads": 2, "kv_heads": 1, "head_dim": 64}
    return dataclasses.replace(hf_writer.FAMILIES[base], name=name, **{**sizes, **changes})


def places(family: hf_writer.Family, count: int = DEAD, seed: int = 0) -> np.ndarray:
    """Random places of dead neurons, ascending; the first and the last neuron are among them."""
    rng = np.random.default_rng(seed)
    inside = 1 + rng.choice(family.inter - 2, count - 2, replace=False)
    return np.sort(np.concatenate([[0], inside, [family.inter - 1]]))


def with_dead(family: hf_writer.Family, dead: list[np.ndarray]) -> dict[str, Any]:
    """The family's network with the dead neurons of each layer planted.

    Rows of zeros in gate alone, in up alone, and columns of zeros in down are planted too, in the
    first layer: they do not make a neuron dead.
    """
    network = hf_writer.make_network(family)
    for layer, planted in enumerate(dead):
        for name in ("gate", "up"):
            projection = network[f"model.layers.{layer}.mlp.{name}_proj"]
            matrix = projection["masters" if "masters" in projection else "codes"]
            matrix[planted] = 0
            alive = np.setdiff1d(np.arange(family.inter), planted)
            if layer == 0:
                matrix[alive[3 if name == "gate" else 5]] = 0
    down = network["model.layers.0.mlp.down_proj"]
    down["masters" if "masters" in down else "codes"][:, 7] = 0
    return network
