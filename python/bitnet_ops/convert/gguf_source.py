"""A GGUF file as a source: its tensors under Hugging Face names, its metadata as config.json.

Strict as for folders: every tensor that the metadata calls for, and no other. Every value of a
tensor is checked as it is decoded, and the order of rows that interleaved rotary embedding wants is
undone. What metadata mean is in gguf_config.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.hybrid import ROTATION, written_rotation
from bitnet_ops.config.scheme import Scheme, Storage
from bitnet_ops.convert import hybrid
from bitnet_ops.convert.checkpoint import copy_tokenizer
from bitnet_ops.convert.draft import DraftHead
from bitnet_ops.convert.draft_sources import gguf_head
from bitnet_ops.convert.errors import ConvertError, listed, reject
from bitnet_ops.convert.gguf_config import (
    FACTOR_TENSORS,
    PERMUTED,
    Architecture,
    architecture_of,
    decoder_layers,
    generation_settings,
    gguf_name,
    head_rows,
    hf_config,
    hf_name,
    shortest,
)
from bitnet_ops.convert.gguf_tokenizer import UNUSED, tokenizer_files
from bitnet_ops.convert.source import (
    EMBEDDING,
    HEAD,
    Plan,
    Source,
    Ternary,
    Uneven,
    folder_tokens,
    model_of,
)
from bitnet_ops.convert.ternary import SPREAD, check_finite, from_ternary, looks_ternary
from bitnet_ops.convert.tower import vocabulary_ids
from bitnet_ops.errors import install
from bitnet_ops.formats import gguf_layouts as layouts
from bitnet_ops.formats.gguf import MAX_TENSORS, GgufError, Reader, TensorInfo, is_strings
from bitnet_ops.formats.gguf_layouts import I2S_LAYOUTS
from bitnet_ops.loading.generation_config import GENERATION_CONFIG
from bitnet_ops.models import TensorSpec, expected_tensors
from bitnet_ops.nn.packing import BLOCK, MIN_SCALE

EXACT_NAMES, EXACT_SCALES = "bitnet_ops.scale_names", "bitnet_ops.scales"
_MAX_FACTORS = 1 << 16  # a number for every pair of a head


class GgufSource(Source):
    """An opened and planned file; `infos` are its tensors by Hugging Face name, `.scale` ones too.

    Args:
        i2s_layout: "a", "b" or "c", the order of bytes of I2_S tensors.
        assume_online: dense projections that are not ternary are masters.
        tokenizer: a folder whose tokenizer files `finish` takes, "none", or None: the metadata's.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        i2s_layout: str = "a",
        assume_online: bool = False,
        tokenizer: str | Path | None = None,
    ) -> None:
        q2_block = reader.q2_block
        self.path, self.nbytes, self.reader = reader.path, reader.size, reader
        self.i2s_layout, self._assume_online, self._tokenizer = i2s_layout, assume_online, tokenizer
        self.architecture = architecture_of(reader.metadata)
        self.infos, factors, beside = _named(reader, self.architecture)
        if EMBEDDING not in self.infos or len(self.infos[EMBEDDING].shape) != 2:
            reject("missing-tensor", "token_embd.weight, a matrix", "no such tensor")
        vocab_size, tied = self.infos[EMBEDDING].shape[0], HEAD not in self.infos
        config, more = hf_config(reader.metadata, self.architecture, vocab_size, tied, factors)
        model = model_of(config)
        self.rotation = self._read_rotation(model)
        found: dict[str, Any] = {}
        if self.rotation is not None:
            found["rotation"] = written_rotation(self.rotation.rotation)
            model = dataclasses.replace(model, rotation=self.rotation.rotation)
        specs = dict(expected_tensors(model))
        stored = {n: s for n, s in specs.items() if not n.startswith(ROTATION)}
        _check_names(stored, self.infos, self.architecture)
        for name, spec in stored.items():
            info, shape = self.infos[name], tuple(spec.shape)
            shape = shape[::-1] if name.endswith(hybrid.CONVOLUTION) else shape
            if info.shape != shape:
                form = f"{info.type.name} {list(info.shape)}"
                reject("shape", f"{info.name} of shape {list(shape)}", form)
        self.exact_scales = _exact_scales(reader.metadata)  # by GGUF name
        ones = [n for n, v in factors.items() if set(v) == {1.0} and "rope_scaling" not in config]
        remarks = [f"{name} holds ones alone; ignored" for name in ones]
        self.remarks = [*remarks, *more, *beside, *model.notes]
        kinds = _kinds(specs, self.infos)
        named = f"gguf {self.architecture.name}"
        self.plan = Plan(
            model,
            Scheme(Storage.GGUF, None, named, kinds, assumed=assume_online),
            specs,
            {name: self.infos[name].name if name in self.infos else name for name in specs},
            config,
            {
                "format_version": 1,
                "source_linear_class": "gguf",
                "source_mode": kinds + (f" layout {i2s_layout}" if "I2_S" in kinds else ""),
                **({"source_q2_block": q2_block} if q2_block else {}),
                "source_architecture": self.architecture.name,
                "converter_version": importlib.metadata.version("bitnet-ops"),
                **found,
            },
        )

    def _read_rotation(self, model: ModelConfig) -> hybrid.GgufRotation | None:
        if not model.family.hybrid:
            return None
        specs = expected_tensors(model)
        matrices = {
            info.name: (name.removesuffix(".weight"), specs[name].shape[1])
            for name, info in self.infos.items()
            if name in specs and (specs[name].kind == "ternary" or specs[name].may_be_ternary)
        }
        metadata, tied = self.reader.metadata, model.tie_word_embeddings
        layers, blocks = decoder_layers(metadata, self.architecture)

        def drafts(name: str) -> bool:
            return hybrid.gguf_beside(name, layers, blocks) == hybrid.DRAFTS

        return hybrid.gguf_rotation(metadata, matrices, model.delta_net, tied, drafts)

    @classmethod
    @contextmanager
    def opened(
        cls,
        file: str | Path,
        *,
        i2s_layout: str = "a",
        q2_block: int | None = None,
        **options: Any,
    ) -> Iterator[GgufSource]:
        """The source in `file`; what the reader rejects comes as ConvertError.

        `q2_block`: as the Reader takes it.
        """
        if i2s_layout not in I2S_LAYOUTS:
            reject("i2s-layout", f"a layout among {', '.join(I2S_LAYOUTS)}", repr(i2s_layout))
        try:
            with Reader(Path(file), q2_block) as reader:
                yield cls(reader, i2s_layout=i2s_layout, **options)
        except GgufError as error:
            raise ConvertError(f"gguf-{error.code}", f"convert: {error.message}") from error

    def dense(self, name: str) -> Tensor:
        if self.rotation is not None and name.startswith(ROTATION):
            return self.rotation.tensor(name)
        tensor = dense(self.reader, self.infos[name])
        rows, columns = self.row_order(name), self._column_order(name)
        tensor = tensor if rows is None else tensor[torch.from_numpy(rows)]
        tensor = tensor if columns is None else tensor[:, torch.from_numpy(columns)]
        return hybrid.from_gguf(name, tensor) if self.plan.config.family.hybrid else tensor

    def row_order(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """For every row of a matrix here the row in the file; None: in order."""
        config, rows = self.plan.config, self.infos[name].shape[0]
        if self.architecture.permuted and name.endswith(PERMUTED):
            if rows % config.head_dim or config.head_dim % 2:
                expected = f"{self.infos[name].name} of whole heads of {config.head_dim} rows"
                reject("shape", expected, f"{rows} rows")
            return head_rows(rows, config.head_dim)
        return None if config.delta_net is None else hybrid.tiled_rows(name, config.delta_net)

    def _column_order(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        config = self.plan.config
        if config.delta_net is None:
            return None
        return hybrid.tiled_columns(name, config.delta_net, config.rotation)

    def ternary(self, name: str) -> Ternary:
        info, factor = self.infos[name], 1.0
        scale_info = self.infos.get(scale_name(name))
        if scale_info is not None:
            if scale_info.shape != (1,) or scale_info.type.name not in DENSE:
                form = f"{scale_info.type.name} {list(scale_info.shape)}"
                reject("group-scales", f"one scale in {scale_info.name}", form)
            factor = float(dense(self.reader, scale_info))
        found = ternary(
            self.reader,
            info,
            i2s_layout=self.i2s_layout,
            factor=factor,
            exact_scale=self.exact_scales.get(info.name),
            order=self.row_order(name),
            assume_online=self._assume_online,
            remedy=_MASTERS if self.plan.config.delta_net is None else hybrid.NOT_TERNARY,
        )
        net, columns = self.plan.config.delta_net, self._column_order(name)
        if net is None or columns is None:
            return found
        return hybrid.with_columns(found, columns, net.value_dim, name)

    def own_draft(self) -> DraftHead | None:
        return head_of(self.reader, self.architecture, self.plan.config, "the file")

    def drafts(self) -> int:
        return len(draft_tensors(self.reader, self.architecture))

    def tokens(self) -> dict[int, str]:
        if self._tokenizer is not None and str(self._tokenizer) != "none":
            return folder_tokens(Path(self._tokenizer))
        return metadata_tokens(self.reader)

    def image_ids(self) -> dict[str, int]:
        return vocabulary_ids(self.reader.metadata.get("tokenizer.ggml.tokens"))

    def unwritten_rows(self, name: str) -> int:
        info = self.infos[name]
        if info.type.name in DENSE or info.type.name == "I2_S":  # which has codes of -1 there
            return 0
        rows = np.asarray(self.reader.data(info.name)).reshape(info.shape[0], -1)
        return int((~rows.any(axis=1)).sum())

    def release(self, name: str) -> None:
        if name in self.infos:
            self.reader.release(self.infos[name].name)

    def finish(self, folder: Path) -> list[str]:
        files = self._write_tokenizer(folder)
        settings = generation_settings(self.reader.metadata)
        if settings and GENERATION_CONFIG not in files:
            (folder / GENERATION_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
            files.append(GENERATION_CONFIG)
        if any(info.type.name == "I2_S" for info in self.infos.values()):
            self.remarks.append(
                "I2_S has three layouts that no file tells apart: if the model talks nonsense, "
                "convert again with another --i2s-layout (docs/guide/gguf.md)"
            )
        return files

    def _write_tokenizer(self, folder: Path) -> list[str]:
        if self._tokenizer is None:
            return self._own_tokenizer(folder)
        if str(self._tokenizer) == "none":
            return []
        given = Path(self._tokenizer)
        if not (given / "tokenizer.json").is_file():
            reject("tokenizer-missing", f"tokenizer.json in {given}", "no such file")
        names, remarks = copy_tokenizer(given, folder)
        self.remarks += remarks
        return names

    def _own_tokenizer(self, folder: Path) -> list[str]:
        made, remarks = tokenizer_files(self.reader.metadata, self.plan.config)
        self.remarks += remarks
        for name, text in made.items():
            (folder / name).write_text(text, encoding="utf-8")
        return list(made)

    def files(self) -> dict[str, Path]:
        return {self.path.name: self.path}


def _named(
    reader: Reader, architecture: Architecture
) -> tuple[dict[str, TensorInfo], dict[str, list[float]], list[str]]:
    """The tensors by Hugging Face name, the values of those that stretch rotary embedding, and a
    remark on those that were left out.
    """
    infos, unknown, factors, beside = {}, [], {}, []
    layers, blocks = 0, 0
    if architecture.family.hybrid:
        layers, blocks = decoder_layers(reader.metadata, architecture)
        if layers < blocks:
            hybrid.check_drafts(reader.tensors, layers)
    for name, info in reader.tensors.items():
        kind = hybrid.gguf_beside(name, layers, blocks) if architecture.family.hybrid else None
        if kind is not None:
            beside += [kind] if kind != hybrid.DRAFTS else []
            continue
        if name in FACTOR_TENSORS:
            if info.type.name != "F32" or len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS:
                found = f"{info.type.name} {list(info.shape)}"
                reject("shape", f"{name} as F32, a number for every pair of a head", found)
            factors[name] = [shortest(value) for value in dense(reader, info).tolist()]
            continue
        renamed = hf_name(name, architecture)
        if renamed is None or renamed in infos:
            unknown.append(name)
        else:
            infos[renamed] = info
    if unknown:
        reject("unknown-tensor", f"the tensors of {architecture.name} alone", listed(unknown),
               "this kind of model is not implemented")  # fmt: skip
    return infos, factors, hybrid.counted(beside)


def draft_tensors(reader: Reader, architecture: Architecture) -> list[str]:
    """Names of the tensors of layers that draft tokens."""
    if not architecture.family.hybrid:
        return []
    layers, blocks = decoder_layers(reader.metadata, architecture)
    return [n for n in reader.tensors if hybrid.gguf_beside(n, layers, blocks) == hybrid.DRAFTS]


def head_of(
    reader: Reader, architecture: Architecture, model: ModelConfig, origin: str
) -> DraftHead | None:
    """The draft head of a file, for the trunk `model`; None without one.

    Raises HeadError for one that cannot be taken over.
    """
    if not draft_tensors(reader, architecture):
        return None
    layers, blocks = decoder_layers(reader.metadata, architecture)
    names, numbers = architecture.layer_names, range(layers, blocks)
    return gguf_head(reader, model, names, numbers, lambda info: dense(reader, info), origin)


def metadata_tokens(reader: Reader) -> dict[int, str]:
    """Texts of the tokens by id, but for rows that no token has; none where there are none."""
    tokens = reader.metadata.get("tokenizer.ggml.tokens")
    types = reader.metadata.get("tokenizer.ggml.token_type")
    if not is_strings(tokens):
        return {}
    kinds = types.tolist() if isinstance(types, np.ndarray) and len(types) == len(tokens) else []
    return {i: t for i, t in enumerate(tokens) if not kinds or kinds[i] != UNUSED}


def _check_names(
    specs: dict[str, TensorSpec], infos: dict[str, TensorInfo], architecture: Architecture
) -> None:
    scales = {f"{n.removesuffix('.weight')}.scale" for n, s in specs.items() if s.kind == "ternary"}
    unknown = [
        info.name for name, info in infos.items() if name not in specs and name not in scales
    ]
    biases = [name for name in unknown if name.endswith(".bias")]
    if biases:
        reject("bias", "projections without biases", listed(biases))
    if unknown:
        reject("unknown-tensor", f"the {len(specs)} tensors of this model", listed(unknown))
    missing = [gguf_name(name, architecture) for name in specs if name not in infos]
    if missing:
        reject("missing-tensor", f"all {len(specs)} tensors", f"no {listed(missing)}")


def scale_name(weight: str) -> str:
    """Of the tensor that newer converters put beside a projection; it multiplies."""
    return f"{weight.removesuffix('.weight')}.scale"


def _exact_scales(metadata: dict[str, Any]) -> dict[str, float]:
    """The float32 scales that our own exporter leaves beside TQ1_0 and TQ2_0 tensors."""
    names, scales = metadata.get(EXACT_NAMES), metadata.get(EXACT_SCALES)
    if names is None and scales is None:
        return {}
    if (
        not is_strings(names)
        or not isinstance(scales, np.ndarray)
        or not len(names) == len(scales) <= MAX_TENSORS
    ):
        reject("gguf-metadata", f"{EXACT_NAMES} and {EXACT_SCALES} of one length", "other values")
    return dict(zip(names, scales.astype(float).tolist(), strict=True))


def _kinds(specs: dict[str, TensorSpec], infos: dict[str, TensorInfo]) -> str:
    """The types of the projections, e.g. "I2_S"."""
    names = [name for name, spec in specs.items() if spec.kind == "ternary"]
    return ", ".join(dict.fromkeys(infos[name].type.name for name in names))


# One tensor -> canonical rows with a scale, or a dense torch tensor -------------------------------

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Embeddings and heads of these types are stored dense, in the dtype of their scales.
_MASTERS = "if these are masters trained to be ternary, convert with --assume-online"
PACKED_DENSE = ("Q2_0", "Q2_0_128", "PQ2_0", "PTQ1_0")
_CODES = {"code_3": "code-3", "scale": "bad-scale", "row_length": "gguf-row-length"}
_CHUNK_ELEMS = 1 << 22
_SMALLEST = 2.0**-126  # the smallest normal float32


def ternary(
    reader: Reader,
    info: TensorInfo,
    *,
    i2s_layout: str,
    factor: float = 1.0,
    exact_scale: float | None = None,
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    assume_online: bool = False,
    remedy: str = _MASTERS,
) -> Ternary:
    """The projection `info`.

    `factor`: of a `.scale` tensor beside it. `exact_scale`: the float32 scale that the file's
    writer has left beside TQ blocks, whose own scale is float16. `order`: the stored row that
    becomes each row. `assume_online`: dense masters may be ternarised by absmean; `remedy`: where
    they may not.
    """
    n, k = info.shape
    if info.type.name in DENSE:
        found = _from_dense(info, dense(reader, info), assume_online, remedy)
    elif info.type.name in layouts.TERNARY_TYPES:
        found = _from_layout(reader, info, i2s_layout, exact_scale)
    else:
        reject(
            "gguf-not-ternary",
            f"{info.name} as {', '.join((*layouts.TERNARY_TYPES[:4], *DENSE))}",
            info.type.name,
            "it was quantised to other values than -1, 0, 1: export the model again as TQ2_0",
        )
    rows, scale = found.rows, found.scale * factor
    if not (torch.isfinite(scale).all() and factor > 0 and scale.max() >= _SMALLEST):
        reject("bad-scale", f"a finite scale of {info.name} above zero", f"one times {factor}")
    if order is not None:
        at = torch.from_numpy(order)
        rows = rows[at]
        scale = scale[at] if found.group_size or len(scale) == n > 1 else scale
    return dataclasses.replace(found, rows=rows, scale=scale)


def _from_layout(reader: Reader, info: TensorInfo, layout: str, exact: float | None) -> Ternary:
    n, k = info.shape
    try:
        decoded = layouts.decode(info.type.name, reader.data(info.name), n, k, layout)
    except layouts.LayoutError as error:
        reject(_CODES[error.code], f"{info.name} as {info.type.name}", str(error), _hint(info))
    rows = torch.from_numpy(decoded.rows)  # of layout a the mapping itself
    scale = decoded.one_scale()
    if scale is None and decoded.scales.any():
        groups, size, uneven = _group_scales(decoded)
        kind = f"scales for groups of {size} weights"
        remark = f"{kind}; such models were trained without int8 activations"
        return Ternary(rows, groups, remark, size, uneven=uneven)
    if scale is None:
        return Ternary(
            rows,
            torch.tensor([exact or MIN_SCALE], dtype=torch.float32),
            f"{info.name} holds zeros alone",
        )
    if exact is not None:
        with np.errstate(over="ignore"):  # an infinity is another scale
            half = float(np.float16(np.float32(exact)))
        if half != scale:
            reject("bad-scale", f"{info.name} with the scale {exact} as float16", f"{scale}")
        scale = exact
    return Ternary(rows, torch.tensor([scale], dtype=torch.float32))


def _group_scales(decoded: layouts.Decoded) -> tuple[Tensor, int, Uneven | None]:
    """f32 [N, groups], the weights of a group, and the groups whose halves differ.

    Blocks of 64 that agree in pairs, to SPREAD of the larger, are groups of 128, which are faster;
    the larger is taken, and blocks of zeros agree with all.
    """
    scales, uneven = decoded.scales, None
    if decoded.block < BLOCK:
        pairs = np.pad(scales, ((0, 0), (0, scales.shape[1] % 2)))
        first, second = pairs[:, ::2], pairs[:, 1::2]
        larger = np.maximum(first, second)
        below = larger - np.where((first == 0) | (second == 0), larger, np.minimum(first, second))
        if (below > larger * SPREAD).any():
            return torch.from_numpy(scales), decoded.block, None
        if below.any():
            relative = float((below[below > 0] / larger[below > 0]).max())
            uneven = Uneven(int((below > 0).sum()), float(below.max()), relative)
        scales = larger
    scales = np.repeat(scales, max(1, decoded.block // BLOCK), axis=1)
    return torch.from_numpy(np.ascontiguousarray(scales)), BLOCK, uneven


def _hint(info: TensorInfo) -> str:
    if info.type.name == "I2_S":
        return "the file is damaged, or of another --i2s-layout than the one that was given"
    return "the file is damaged"


def _from_dense(info: TensorInfo, tensor: Tensor, assume_online: bool, remedy: str) -> Ternary:
    """Values code * scale, exactly; or masters, if the caller says so."""
    check_finite(info.name, tensor)
    scale = float(tensor.abs().max())
    if scale == 0.0:
        codes, remark = torch.zeros(tensor.shape, dtype=torch.int8), "holds zeros alone"
        return Ternary(
            ops.pack(codes), torch.tensor([MIN_SCALE], dtype=torch.float32), f"{info.name} {remark}"
        )
    if _is_ternary(tensor, scale):
        return Ternary(
            ops.pack(tensor.sign().to(torch.int8)), torch.tensor([scale], dtype=torch.float32)
        )
    if not assume_online and looks_ternary(tensor):
        codes, scales, group_size, uneven = from_ternary(info.name, tensor)
        return Ternary(ops.pack(codes), scales, None, group_size, uneven=uneven)
    if not assume_online:
        reject(
            "gguf-not-ternary",
            f"{info.name} with one magnitude beside zero, of the matrix, a row or a group of 128",
            f"other values, as {info.type.name}",
            remedy,
        )
    codes, absmean = ops.quantize_weights(tensor)
    return Ternary(ops.pack(codes), absmean, "dense masters were ternarised by absmean")


def _is_ternary(tensor: Tensor, magnitude: float) -> bool:
    for piece in tensor.reshape(-1).split(_CHUNK_ELEMS):
        size = piece.abs()
        if not ((size == 0) | (size == magnitude)).all():
            return False
    return True


def dense(reader: Reader, info: TensorInfo) -> Tensor:
    """The tensor in its dtype, zero-copy for F32, F16 and BF16.

    Ternary types of float16 scales come as float16, exactly; other types as float32.
    """
    data: Any = reader.data(info.name)
    if info.type.name in DENSE:
        tensor = torch.from_numpy(data).view(DENSE[info.type.name]).view(info.shape)
    elif info.type.name in PACKED_DENSE and len(info.shape) == 2:
        tensor = _values(info, data)
    else:
        tensor = _dequantised(info, data)
    check_finite(info.name, tensor)
    return tensor


def _values(info: TensorInfo, data: Any) -> Tensor:
    try:
        return torch.from_numpy(layouts.values(info.type.name, data, *info.shape))
    except layouts.LayoutError as error:
        reject(_CODES[error.code], f"{info.name} as {info.type.name}", str(error), _hint(info))


def _dequantised(info: TensorInfo, data: Any) -> Tensor:
    """float32 values through the gguf package, by pieces of rows."""
    try:
        import gguf
    except ImportError:
        reject(
            "gguf-package",
            f"the gguf package, which reads {info.name} ({info.type.name})",
            "none installed",
            install("gguf"),
        )
    known = info.type.name in gguf.GGMLQuantizationType.__members__
    rows = data.reshape(-1, info.shape[-1] // info.type.block * info.type.block_bytes)
    out = np.empty((len(rows), info.shape[-1]), dtype=np.float32)
    step = max(1, _CHUNK_ELEMS // info.shape[-1])
    try:
        if not known:
            raise NotImplementedError("unknown type")
        kind = gguf.GGMLQuantizationType[info.type.name]
        with np.errstate(all="ignore"):  # what is not finite is rejected by its name
            for begin in range(0, len(rows), step):
                piece = rows[begin : begin + step]
                out[begin : begin + step] = gguf.quants.dequantize(piece, kind)
    except NotImplementedError as error:
        reject("gguf-type", f"{info.name} of a type that the gguf package reads", f"{error}")
    return torch.from_numpy(out).view(info.shape)
