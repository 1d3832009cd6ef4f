"""Synthetic models with the shapes of real ones, for benchmarks and tests of speed and loading.

    model = dummy.decoder("2b-4t")          # in memory, within seconds
    dummy.write("2b-4t", "my-dummy/")       # the same as a directory; or: bitnet-ops dummy NAME DST

Weights are random ternary codes, about 40 % of them 0, with scales and norms that keep activations
near 1: every kernel sees what a real model gives it, and the text means nothing. The same name and
seed give the same model on one release of torch.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import KEY as DRAFT
from bitnet_ops.config.draft import DraftConfig, draft_config
from bitnet_ops.config.draft_shapes import draft_shapes
from bitnet_ops.config.hybrid import ROTATION
from bitnet_ops.dummy import tokenizer as dummy_tokenizer
from bitnet_ops.dummy.configs import CONFIGS, GROUPED
from bitnet_ops.formats import destination, sglbitnt
from bitnet_ops.loading.weight_choice import Matrices
from bitnet_ops.loading.weights import repack_all
from bitnet_ops.models import Decoder, TensorSpec, build, expected_tensors
from bitnet_ops.nn.digits import DIGITS, digit_group
from bitnet_ops.nn.packing import BLOCK, PackedWeight, packed_row_bytes
from bitnet_ops.nn.storage import DEFAULT_HEAD_FORMAT
from bitnet_ops.vision.weights import KEY as VISION
from bitnet_ops.vision.weights import PREFIX, shapes, vision_config

if TYPE_CHECKING:
    from bitnet_ops.convert.progress import Progress

_NONZERO = 0.6  # share of the codes that are -1 or +1
_EMBEDDING_STD = 0.02
# Random data are cut from a pool at random places, which is as fast as memory. Its length has no
# common divisor with a row's, so that no two rows are alike even where it goes round.
_POOL = (1 << 23) + 9


def config(name: str) -> ModelConfig:
    """The config of the synthetic model `name`, one of CONFIGS; ValueError for another."""
    return ModelConfig.from_hf(_config_json(name))


def _config_json(name: str) -> dict[str, Any]:
    if name not in CONFIGS:
        raise ValueError(f"dummy: expected a name among {', '.join(CONFIGS)}, got {name!r}")
    return CONFIGS[name]


def decoder(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    weight_format: str = "auto",
    head_format: str = DEFAULT_HEAD_FORMAT,
    seed: int = 0,
) -> Decoder:
    """The model `name`, built in memory (2b-4t: 1.2 GB).

    `dtype` as `models.build` takes it, `weight_format` as `repack_all`: "auto" is "2bit".
    """
    made = repack_all(tensors(name, seed), weight_format)
    return build(config(name), made, dtype, check_values=False, head_format=head_format)


def draft_head(name: str, seed: int = 0) -> tuple[DraftConfig, dict[str, Tensor | PackedWeight]]:
    """The head of a model that has one, as `loading.draft.read_draft_head` gives that of a file.

    Raises ValueError for a model without one.
    """
    draft = draft_config(_config_json(name))
    if draft is None:
        raise ValueError(f"dummy: expected a model with a draft head, got {name!r}")
    pool = _pool(expected_tensors(config(name)), seed)
    shapes = draft_shapes(config(name), draft.intermediate_size)
    return draft, {tensor: _draft_tensor(shape, pool) for tensor, shape in shapes.items()}


def matrices(name: str) -> Matrices:
    """What the choice of a weight format needs to know of the model `name`."""
    specs, grouped = expected_tensors(config(name)).values(), name in GROUPED
    ternary = [s for s in specs if s.kind == "ternary" or (grouped and s.may_be_ternary)]
    return Matrices(
        tuple((spec.shape[0], spec.shape[1]) for spec in ternary), BLOCK if grouped else 0
    )


def write(
    name: str,
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model `name` as `directory`/model.bin, with a tokenizer; returns the file.

    `force`: replace `directory` if it holds an earlier result; `progress`: called as progress(done,
    total, tensor_name) before each tensor. Raises destination.DestinationError
    for one that is there, sglbitnt.SglbitntError for what the file system rejects.
    """
    model_config = config(name)
    source = {"bitnet_ops": {"format_version": 1}, **_config_json(name)}
    if (vision := vision_config(source)) is not None:  # every key, as a conversion has it
        source["bitnet_ops"] = {**source["bitnet_ops"], VISION: vision.to_json()}
    if (draft := draft_config(source)) is not None:
        source["bitnet_ops"] = {**source["bitnet_ops"], DRAFT: draft.to_dict()}
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    with destination.new_folder(target, replace=force) as folder:
        specs, grouped = expected_tensors(model_config), name in GROUPED
        _write_model(folder / sglbitnt.MODEL_FILE, source, specs, seed, grouped, progress)
    return target / sglbitnt.MODEL_FILE


def _write_model(
    file: Path,
    source: dict[str, Any],
    specs: dict[str, TensorSpec],
    seed: int,
    grouped: bool,
    progress: Progress | None = None,
) -> None:
    pool, vision, draft = _pool(specs, seed), vision_config(source), draft_config(source)
    tower = {} if vision is None else shapes(vision)
    head = {}
    if draft is not None:
        head = draft_shapes(ModelConfig.from_hf(source), draft.intermediate_size)
    names = [*specs, *(PREFIX + name for name in tower), *head]
    with sglbitnt.Writer(file, source, len(names), names) as writer:
        for done, (tensor_name, spec) in enumerate(specs.items()):
            if progress is not None:
                progress(done, len(names), tensor_name)
            _add(writer, tensor_name, _tensor(tensor_name, spec, pool, grouped))
        for name, shape in tower.items():
            writer.add_dense(PREFIX + name, _tower_tensor(name, shape, pool))
        if draft is not None:  # the same numbers as of `draft_head`, whatever lies before them
            pool = _pool(specs, seed)
        for name, shape in head.items():
            _add(writer, name, _draft_tensor(shape, pool))
    dummy_tokenizer.write(file.parent, source)


def _add(writer: sglbitnt.Writer, name: str, tensor: Tensor | PackedWeight) -> None:
    if isinstance(tensor, PackedWeight):
        parts = tensor.weight, tensor.scale, tensor.in_features, tensor.group_size
        writer.add_packed(name, *parts)
    else:
        writer.add_dense(name, tensor)


def tensors(name: str, seed: int = 0) -> dict[str, Tensor | PackedWeight]:
    """Every tensor of the model `name`, as `models.build` takes them."""
    specs = expected_tensors(config(name))
    pool = _pool(specs, seed)
    return {n: _tensor(n, spec, pool, name in GROUPED) for n, spec in specs.items()}


def _pool(specs: dict[str, TensorSpec], seed: int) -> _Pool:
    largest = max(math.prod(spec.shape) for spec in specs.values())
    return _Pool(seed, min(_POOL, largest | 1))


# (middle, half the width) of what is neither a norm nor a matrix: memories of a Gated DeltaNet from
# one token to hundreds, taps as torch draws them
_UNIFORM = {"A_log": (0.0, 3.0), "dt_bias": (-3.0, 2.0), "conv1d.weight": (0.0, 0.5)}


def _tensor(name: str, spec: TensorSpec, pool: _Pool, grouped: bool) -> Tensor | PackedWeight:
    if spec.kind == "ternary" or (grouped and spec.may_be_ternary):
        n, k = spec.shape
        # The sum of K products with activations near 1 comes out near 1.
        scale = torch.tensor([(_NONZERO * k) ** -0.5])
        if not grouped:
            return PackedWeight(pool.packed(n, k), scale, n, k)
        scales = scale * pool.norm_weight(n * -(-k // BLOCK)).float().view(n, -1)
        scales = scales.half().float()  # as the originals have them
        return PackedWeight(pool.packed(n, k), scales, n, k, group_size=BLOCK)
    if name.startswith(ROTATION):
        return pool.uniform(spec.shape, 0.0, 1.0).sign()  # the middle itself is not drawn
    for ending, (middle, spread) in _UNIFORM.items():
        if name.endswith(f".{ending}"):
            return pool.uniform(spec.shape, middle, spread)
    if len(spec.shape) == 2:
        return pool.matrix(*spec.shape)
    return pool.norm_weight(spec.shape[0])


def _draft_tensor(shape: tuple[int, ...], pool: _Pool) -> Tensor | PackedWeight:
    """Of a draft head: digits of every weight, or what a norm multiplies by."""
    if len(shape) == 1:
        return pool.norm_weight(shape[0]).float()
    n, k = shape
    size, powers = digit_group(k), 3.0 ** torch.arange(DIGITS)
    # the sum of K products with activations near 1 comes out near 1
    step = float(_NONZERO * k * powers.square().sum()) ** -0.5
    steps = step * pool.norm_weight(n * (k // size)).float().view(n, 1, -1)
    scales = (steps * powers.view(1, -1, 1)).flatten(1)
    weight = pool.packed(n, DIGITS * k)
    return PackedWeight(weight, scales, n, DIGITS * k, group_size=size)


def _tower_tensor(name: str, shape: tuple[int, ...], pool: _Pool) -> Tensor:
    """Of a tower for images; rows come out near 1, as embedded tokens do after their norm."""
    if len(shape) == 1:
        return pool.uniform(shape, 1.0 if "norm" in name and "weight" in name else 0.0, 0.1)
    fan_in = 1 if name == "pos_embed.weight" else math.prod(shape[1:])
    return pool.uniform(shape, 0.0, (3 / fan_in) ** 0.5)


class _Pool:
    """Random data by the piece, from one seed."""

    def __init__(self, seed: int, size: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        words = torch.randint(-(2**63), 2**63 - 1, (size // 8 + 1,), generator=self._generator)
        noise = words.view(torch.uint8)[:size]
        codes = bytearray(noise.numpy().tobytes().translate(_code_table()))
        self._codes = torch.frombuffer(codes, dtype=torch.uint8)
        # uniform over 256 steps: their standard deviation is 256 / sqrt(12)
        self._values = ((noise.float() - 127.5) * (_EMBEDDING_STD * 12**0.5 / 256)).bfloat16()

    def _piece(self, source: Tensor, count: int) -> Tensor:
        """`count` elements of `source`, which goes round, from a random place on; a copy."""
        at = int(torch.randint(len(source), (1,), generator=self._generator))
        out = torch.empty(count, dtype=source.dtype)
        done = 0
        while done < count:
            length = min(count - done, len(source) - at)
            out[done : done + length] = source[at : at + length]
            done, at = done + length, 0
        return out

    def packed(self, n: int, k: int) -> Tensor:
        """Canonical rows uint8 [n, R]: every byte holds four valid codes, padding is code 1."""
        rows = self._piece(self._codes, n * packed_row_bytes(k)).view(n, -1)
        if k % BLOCK:
            unused = torch.arange(BLOCK) >= k % BLOCK
            shifts = torch.tensor([6, 4, 2, 0], dtype=torch.uint8).unsqueeze(1)
            mask = (unused.view(4, 32).to(torch.uint8) * 3 << shifts).sum(0, dtype=torch.uint8)
            rows[:, -32:] = rows[:, -32:] & ~mask | 0x55 & mask
        return rows

    def matrix(self, n: int, k: int) -> Tensor:
        """An embedding or a head, bfloat16 [n, k], evenly spread around 0."""
        return self._piece(self._values, n * k).view(n, k)

    def norm_weight(self, n: int) -> Tensor:
        """A norm's weight, bfloat16 [n], from 0.9 to 1.1."""
        return self.uniform((n,), 1.0, 0.1)

    def uniform(self, shape: tuple[int, ...], middle: float, spread: float) -> Tensor:
        """bfloat16, from middle - spread to middle + spread."""
        piece = self._piece(self._values, math.prod(shape)).float().view(shape)
        return (piece * (spread / (_EMBEDDING_STD * 3**0.5)) + middle).bfloat16()


def _code_table() -> bytes:
    """256 bytes of four codes each: of every byte as many as its probability is worth."""
    share = ((_NONZERO / 2), 1 - _NONZERO, _NONZERO / 2)
    table, reached = bytearray(), 0.0
    for codes in itertools.product(range(3), repeat=4):
        reached += math.prod(share[code] for code in codes)
        byte = sum(code << shift for code, shift in zip(codes, (6, 4, 2, 0), strict=True))
        table += bytes([byte]) * (round(256 * reached) - len(table))
    return bytes(table)
