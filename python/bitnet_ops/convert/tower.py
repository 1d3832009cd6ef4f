"""The tower for images of a source: a part of a checkpoint, or an mmproj file beside a GGUF.

Whatever names and layouts a file has, a Tower hands out Hugging Face's. Nothing is permuted but the
product of the pixels: MLX has its colours last, GGUF its two times as two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.formats.gguf import GgufError, Reader, TensorInfo, is_strings
from bitnet_ops.generate.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerError
from bitnet_ops.vision.config import IMAGE_TOKENS, PROJECTOR, VisionConfig
from bitnet_ops.vision.tower import VisionError
from bitnet_ops.vision.weights import check_tensors, shapes

_LEFT = "--no-vision leaves the tower out"
_PIXELS = "patch_embed.proj.weight"


@dataclass(frozen=True)
class Tower:
    """Sizes, and every tensor by its name without `model.visual.`, in Hugging Face's form.

    origin: for people. files: those that are read beside the source's own.
    """

    config: VisionConfig
    origin: str
    read: Callable[[str], Tensor]
    files: Mapping[str, Path] = field(default_factory=dict)

    def line(self, nbytes: int) -> str:
        """What a user must know of it."""
        c = self.config
        return (
            f"a tower for images from {self.origin}: {c.depth} blocks of {c.hidden_size} features, "
            f"{nbytes / 1e6:,.0f} MB"
        )


def check_pair(tower: Tower, hidden_size: int, vocab_size: int) -> Tower:
    """The tower itself; ConvertError where it does not belong to a text model of these sizes."""
    config = tower.config
    if config.out_hidden_size != hidden_size:
        reject(
            "vision-pair",
            f"a tower that gives the text model's {hidden_size} features",
            f"{config.out_hidden_size} from {tower.origin}",
            f"it belongs to another model; {_LEFT}",
        )
    ids = {config.image_token_id, config.vision_start_token_id, config.vision_end_token_id}
    if len(ids) < 3 or max(ids) >= vocab_size:
        expected = f"three ids of image tokens below {vocab_size}"
        reject("vision-ids", expected, f"{sorted(ids)} of {tower.origin}", _LEFT)
    return tower


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (UnsupportedModelError, VisionError) as error:
        remedy = "" if "--no-vision" in str(error) else f"; {_LEFT}"
        raise ConvertError("vision", f"convert: {error}{remedy}") from None


# Checkpoints --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """The tower's tensors as a checkpoint has them, by names without prefix.

    shapes: of every one. read: as stored. Modules of MLX's writer that are quantised have `.scales`
    and `.biases` beside integers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def checkpoint_tower(
    published: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    ids: Mapping[str, int],
    stored: Stored,
) -> Tower:
    """The tower of a checkpoint whose config.json is `published`.

    ids: of IMAGE_TOKENS in the vocabulary, as far as they are known; they win over config.json,
    since packages exist whose config.json names other tokens.
    """
    with _refusals():
        config = VisionConfig.from_hf(published, preprocessor)
        if len(ids) == len(IMAGE_TOKENS):
            pad, start, end = (ids[token] for token in IMAGE_TOKENS)
            config = replace(config, image_token_id=pad, vision_start_token_id=start,
                             vision_end_token_id=end)  # fmt: skip
        expected = shapes(config)
        quantised = _quantised(stored.shapes)
        parts = {part for module in quantised for part in _parts(module)}
        found = {}
        for name, shape in stored.shapes.items():
            if name == _PIXELS and name in expected and _colours_last(shape):
                shape = (shape[0], shape[4], *shape[1:4])
            if name not in parts:
                known = name in quantised and name in expected
                found[name] = expected[name] if known else shape
        check_tensors(config, found)

    def read(name: str) -> Tensor:
        if name in quantised:
            return _dequantised(name, stored.read, expected[name])
        tensor = stored.read(name)
        if not tensor.is_floating_point():
            reject("dtype", f"{name} of the tower as floating values", str(tensor.dtype), _LEFT)
        if name == _PIXELS and _colours_last(tuple(tensor.shape)):
            tensor = tensor.movedim(-1, 1)
        return tensor

    return Tower(config, "the checkpoint", read)


def _colours_last(shape: tuple[int, ...]) -> bool:
    """Whether the product of the pixels lies as MLX has it, [h, time, row, column, colour]."""
    return len(shape) == 5 and shape[4] == 3 and shape[1] != 3


def _parts(name: str) -> tuple[str, str]:
    module = name.removesuffix(".weight")
    return f"{module}.scales", f"{module}.biases"


def _quantised(found: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Weights with scales and biases beside them, as MLX's `quantize` leaves them."""
    return {n for n in found if n.endswith(".weight") and all(part in found for part in _parts(n))}


def _dequantised(name: str, read: Callable[[str], Tensor], shape: tuple[int, ...]) -> Tensor:
    """code * scale + bias of every group; codes of 2, 4 or 8 bits, the lowest bits first."""
    words, scales, biases = (read(part) for part in (name, *_parts(name)))
    inner = shape[-1]
    bits = 32 * words.shape[-1] // inner if words.ndim == 2 else 0
    groups = scales.shape[-1] if scales.ndim == 2 else 0
    fits = words.ndim == 2 and words.shape[0] == scales.shape[0] == shape[0]
    fits = fits and 32 * words.shape[-1] == bits * inner and groups > 0 and inner % groups == 0
    fits = fits and scales.shape == biases.shape and words.element_size() == 4
    if not fits or bits not in (2, 4, 8):
        got = f"{list(words.shape)} with scales {list(scales.shape)}, biases {list(biases.shape)}"
        reject("mlx", f"{name} of the tower in 2, 4 or 8 bits of groups", got, _LEFT)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.view(torch.int32).unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
    grouped = codes.view(shape[0], groups, -1).float()
    values = grouped * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)
    return values.flatten(1).to(scales.dtype)


# mmproj files -------------------------------------------------------------------------------------

_INNER = {
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
}  # fmt: skip
_OUTER = {"pos_embed": "v.position_embd", "merger.norm": "v.post_ln",
          "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
          "patch_embed.proj": "v.patch_embd"}  # fmt: skip
_PIXELS_1 = "v.patch_embd.weight.1"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])  # of Q8_0


def _gguf_name(name: str) -> str:
    """Of a parameter."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blocks."):
        _, number, inner = stem.split(".", 2)
        return f"v.blk.{number}.{_INNER[inner]}.{kind}"
    return f"{_OUTER[stem]}.{kind}"


def vocabulary_ids(tokens: object) -> dict[str, int]:
    """Ids of the tokens of images in a GGUF's list of tokens, as far as they are there."""
    if not is_strings(tokens):
        return {}
    wanted = set(IMAGE_TOKENS)
    return {token: i for i, token in enumerate(tokens) if token in wanted}


def image_ids(folder: Path) -> dict[str, int]:
    """Ids of the tokens of images in the tokenizer of `folder`; none where there is none."""
    if not (folder / TOKENIZER_FILE).is_file():
        return {}
    try:
        tokenizer = Tokenizer.from_dir(folder).backend
    except TokenizerError:  # which is said where it is copied
        return {}
    found = {token: tokenizer.token_to_id(token) for token in IMAGE_TOKENS}
    return {token: id for token, id in found.items() if id is not None}


@contextmanager
def mmproj_tower(file: Path, ids: Mapping[str, int]) -> Iterator[Tower]:
    """The tower in an mmproj file, open while it is used; `ids` of IMAGE_TOKENS."""
    try:
        with Reader(file) as reader:
            yield _mmproj(reader, ids)
    except GgufError as error:
        raise ConvertError(f"gguf-{error.code}", f"convert: {error.message}") from error


def _mmproj(reader: Reader, ids: Mapping[str, int]) -> Tower:
    about = reader.metadata
    kind = reader.architecture, about.get("general.type", "mmproj")
    if kind != ("clip", "mmproj"):
        found = f"{kind[0]} of type {kind[1]}"
        reject("mmproj", f"a tower for images in {reader.path.name}", found,
               "give the model itself as the source, and the mmproj file by --mmproj")  # fmt: skip
    with _refusals():
        config = VisionConfig.from_gguf(_plain(about), ids)
        there: dict[str, tuple[int, ...]] = {}
        names = {_gguf_name(name): name for name in shapes(config)}
        for name, info in reader.tensors.items():
            if name != _PIXELS_1:
                there[names.get(name, name)] = info.shape
        pixels = [reader.tensors.get(name) for name in (_gguf_name(_PIXELS), _PIXELS_1)]
        first, second = pixels
        if first is None or second is None or first.shape != second.shape or len(first.shape) != 4:
            reject("missing-tensor", f"{_gguf_name(_PIXELS)} and {_PIXELS_1} of one shape",
                   "others", f"the file is no {PROJECTOR} of two times; {_LEFT}")  # fmt: skip
        there[_PIXELS] = (*first.shape[:2], 2, *first.shape[2:])
        check_tensors(config, there)
    wrong = [i.name for i in reader.tensors.values() if i.type.name not in (*_DTYPES, "Q8_0")]
    if wrong:
        reject("gguf-type", "the tower in F32, F16, BF16 or Q8_0", listed(wrong),
               f"get another mmproj file; {_LEFT}")  # fmt: skip

    def read(name: str) -> Tensor:
        tensor = _values(reader, reader.tensors[_gguf_name(name)])
        if name != _PIXELS:
            return tensor
        second = _values(reader, reader.tensors[_PIXELS_1])
        dtype = torch.promote_types(tensor.dtype, second.dtype)
        return torch.stack([tensor.to(dtype), second.to(dtype)], dim=2)

    return Tower(config, reader.path.name, read, {reader.path.name: reader.path})


def _values(reader: Reader, info: TensorInfo) -> Tensor:
    """As stored; Q8_0 as float16, which is off by 2^-11 at most, a tenth of what Q8_0 is off."""
    data: Any = reader.data(info.name)
    if info.type.name in _DTYPES:
        return torch.from_numpy(data).view(_DTYPES[info.type.name]).view(info.shape)
    blocks = data.view(_BLOCK)
    values = blocks["codes"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]
    tensor = torch.from_numpy(values).view(info.shape)
    half = tensor.half()
    return half if bool(torch.isfinite(half).all()) else tensor


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the tower, arrays as lists."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in metadata.items()
        if name.startswith("clip.")
    }


def choose_mmproj(files: Sequence[Path], hidden_size: int) -> tuple[Path | None, list[str]]:
    """The one of mmproj files beside a model that fits it, and remarks on others.

    Raises ConvertError where several do.
    """
    fitting, remarks = [], []
    for file in files:
        try:
            with Reader(file) as reader:
                width = reader.metadata.get("clip.vision.projection_dim")
        except GgufError as error:
            message = f"convert: {error.message}; {_LEFT}"
            raise ConvertError(f"gguf-{error.code}", message) from error
        if width == hidden_size:
            fitting.append(file)
        else:
            remarks.append(f"{file.name} gives {width} features, not {hidden_size}: left out")
    if len(fitting) > 1:
        names = listed([file.name for file in fitting])
        reject("several-mmproj", "one mmproj file beside the model", names,
               f"name one by --mmproj; {_LEFT}")  # fmt: skip
    return (fitting[0] if fitting else None), remarks
