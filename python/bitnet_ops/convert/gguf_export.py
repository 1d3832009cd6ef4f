"""model.bin -> one GGUF file: I2_S (layout a) for bitnet.cpp, TQ1_0 and TQ2_0 for llama.cpp,
PQ2_0, which has a scale for every 128 weights, for PrismML's fork of it.

Codes and scales are copied, never computed again. TQ1_0 and TQ2_0 have float16 scales; the float32
ones go along under keys of our own, so that a conversion back gives the same model.bin. It must not
know bytes of tensors beyond what gguf_layouts.py makes of them.

A model folder's tokenizer.json becomes the tokenizer.ggml.* keys. They are read back by
gguf_tokenizer.py and compared with the original on texts that make tokenizers differ, so a
tokenizer that the keys cannot express is rejected, never approximated.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitnet_ops.config import ModelConfig, Scalings, UnsupportedModelError
from bitnet_ops.config.draft import draft_config
from bitnet_ops.config.families import Family
from bitnet_ops.config.hybrid import ROTATION, Rotation
from bitnet_ops.convert import hybrid
from bitnet_ops.convert.errors import ConvertError, reject, said_by
from bitnet_ops.convert.gguf_config import (
    ARCHITECTURES,
    PERMUTED,
    Architecture,
    exported,
    gguf_name,
    head_rows,
    sampling_keys,
)
from bitnet_ops.convert.gguf_source import EXACT_NAMES, EXACT_SCALES
from bitnet_ops.convert.gguf_tokenizer import (
    BYTE,
    CONTROL,
    EXPORTED,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_files,
)
from bitnet_ops.convert.progress import Progress
from bitnet_ops.convert.write import building_file
from bitnet_ops.formats import gguf_layouts as layouts
from bitnet_ops.formats.destination import GGUF_FILE
from bitnet_ops.formats.gguf import GgufError, Writer
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, model_file
from bitnet_ops.generate.tokenizer import Tokenizer, TokenizerError
from bitnet_ops.generate.tokenizer_guard import is_known
from bitnet_ops.loading.generation_config import read_generation_config, stated_ends
from bitnet_ops.loading.model_contents import model_config, own_tensors
from bitnet_ops.loading.resolve import LoadError
from bitnet_ops.models import TensorError, TensorSpec, check_names, expected_tensors
from bitnet_ops.nn.packing import BLOCK
from bitnet_ops.untrusted import UntrustedFileError, printable, read_json_object
from bitnet_ops.vision.weights import vision_config

TYPES = {"i2_s": "I2_S", "tq1_0": "TQ1_0", "tq2_0": "TQ2_0", "pq2_0": "PQ2_0"}
_FILE_TYPES = {"I2_S": 40, "TQ1_0": 36, "TQ2_0": 37}  # general.file_type
_EXACT = ("TQ1_0", "TQ2_0")  # types whose float32 scales go along
# program -> the types and the architectures that it has
_MAINLINE = ("bitnet", "llama", "qwen3", "qwen35")
_PROGRAMS = {
    "bitnet.cpp": (("I2_S", "TQ1_0", "TQ2_0"), ("bitnet-b1.58", "bitnet", "llama")),
    "llama.cpp": (("TQ1_0", "TQ2_0"), _MAINLINE),
    "PrismML's fork of llama.cpp": (("TQ1_0", "TQ2_0", "PQ2_0"), _MAINLINE),
}
_ROTATES = "PrismML's fork of llama.cpp"  # the others would pass over the keys of a rotation
_DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass
class ExportReport:
    """What an export wrote.

    largest_rounding: of a scale by float16, relative; 0 for I2_S. opened_by: programs that have the
    type and the architecture, beside this package.
    """

    file: str
    architecture: str
    type: str
    tensors: int
    output_bytes: int
    largest_rounding: float
    seconds: float
    opened_by: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The report for people, one fact a line."""
        return [
            f"wrote {self.file}: architecture {self.architecture}, {self.type}, "
            f"{self.tensors} tensors, {self.output_bytes:,} bytes in {self.seconds:.1f} s",
            self._openers(),
            *(f"note: {remark}" for remark in self.remarks),
        ]

    def _openers(self) -> str:
        what = f"{self.type} of the architecture {self.architecture}"
        others = [program for program in _PROGRAMS if program not in self.opened_by]
        if not self.opened_by:
            return f"no program is known to open {what}, but `bitnet-ops convert` reads it back"
        opens = f"opens in {' and '.join(self.opened_by)}"
        return f"{opens}, not in {' or '.join(others)}" if others else opens


def opened_by(type_name: str, architecture: str, *, rotated: bool = False) -> list[str]:
    """The programs that have the type and the architecture of a file."""
    return [
        program
        for program, (types, architectures) in _PROGRAMS.items()
        if type_name in types
        and architecture in architectures
        and (program == _ROTATES or not rotated)
    ]


@said_by("export")
def export_gguf(
    model: str | Path,
    file: str | Path,
    *,
    type: str = "i2_s",
    tokenizer: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the converted model at `model` (its folder or model.bin) as the GGUF file `file`.

    Args:
        type: of the ternary matrices, "i2_s", "tq1_0", "tq2_0" or "pq2_0".
        tokenizer: False leaves the vocabulary out.
        force: replace `file` if it exists.
        progress: called as progress(done, total, tensor_name) before each tensor.

    Returns the report. Raises ConvertError; no file is left then.
    """
    started = time.perf_counter()
    source, target = model_file(model), Path(file)
    if type not in TYPES:
        reject("gguf-type", f"a type among {', '.join(TYPES)}", repr(type))
    try:
        with (
            building_file(target, GGUF_FILE, force=force) as made,
            Reader(source, check_codes=False) as reader,  # each tensor is checked as it is read
        ):
            export = _Export(reader, TYPES[type])
            keys: Keys = {}
            remarks = ["no vocabulary was written"]
            if tokenizer:
                keys, remarks = vocabulary_keys(source.parent, export.model)
            settings = read_generation_config(source.parent, export.model, None)
            keys |= sampling_keys(settings.sampling)
            export.write(made, target.stem, keys, progress)
    except (SglbitntError, UnsupportedModelError, TensorError, LoadError) as error:
        raise ConvertError("export-source", f"export: {error}") from error
    except GgufError as error:  # which names the file where it was being written
        said = str(error).partition(": ")[2]
        raise ConvertError("write-failed", f"export: {target.name}: {said}") from error
    except OSError as error:
        reject("write-failed", f"to write {target}", str(error), "nothing was kept")
    if export.has_tower:
        remarks.append(
            "the tower for images was left out: other programs want it as an mmproj file, which "
            "the model's makers publish"
        )
    if export.has_draft:
        remarks.append(
            "the draft head was left out: GGUF holds it in other forms, which the "
            "model's makers publish"
        )
    if export.rounding:
        kept = "; converting back restores the float32 ones, other programs use the rounded ones"
        remarks.append(
            f"{export.type} keeps scales as float16, up to {export.rounding:.2g} off"
            + (kept if export.type in _EXACT else "")
        )
    return ExportReport(
        target.name,
        export.architecture.name,
        export.type,
        len(export.specs),
        target.stat().st_size,
        export.rounding,
        round(time.perf_counter() - started, 3),
        opened_by(export.type, export.architecture.name, rotated=export.model.rotation is not None),
        remarks,
    )


def architecture_for(model: ModelConfig) -> Architecture:
    """The GGUF architecture that computes what `model` does; ConvertError if there is none."""
    names = [name for name, found in ARCHITECTURES.items() if _maths(found.family) == _maths(model)]
    # parts that no GGUF architecture knows
    odd = [
        name for name in ("linear_norms", "sub_norm_eps", "embedding_only") if getattr(model, name)
    ]
    odd += ["scalings"] if model.scalings != Scalings() else []
    odd += ["sliding windows"] if model.windows else []
    odd += ["attention in every layer"] if model.family.hybrid and not model.delta_net else []
    if not names or odd:
        found = f"{model.model_type} with {model.hidden_act}, sub_norms {model.sub_norms}"
        found += f", {', '.join(odd)}" if odd else ""
        reject("gguf-architecture", "a model that GGUF has an architecture for", found)
    if model.sub_norms and not model.tie_word_embeddings:
        reject("gguf-head", f"a model of the architecture {names[0]} whose head is its embedding",
               "a head of its own", "llama.cpp and bitnet.cpp take token_embd.weight as the head "
               "of this architecture")  # fmt: skip
    return ARCHITECTURES[names[0]]


def _maths(of: Family | ModelConfig) -> tuple[Any, ...]:
    """The parts of a layer that architectures differ in."""
    hybrid_family = (of.family if isinstance(of, ModelConfig) else of).hybrid
    return of.hidden_act, of.sub_norms, of.qk_norm, of.biases, of.post_norms, hybrid_family


@contextmanager
def _named(name: str, remedy: str = "") -> Iterator[None]:
    """What a layout cannot hold of the tensor `name`, as a ConvertError."""
    try:
        yield
    except layouts.LayoutError as error:
        code = "gguf-row-length" if error.code == "row_length" else "bad-scale"
        raise ConvertError(code, f"convert: {name}: {error}{remedy}") from None


class _Export:
    """One export: everything is decided and checked when it is made."""

    def __init__(self, reader: Reader, type_name: str) -> None:
        self.type, self.rounding = type_name, 0.0
        self.model = model_config(reader)
        self.architecture = architecture_for(self.model)
        check_names(self.model, own_tensors(reader, self.model))
        self.specs: dict[str, TensorSpec] = dict(expected_tensors(self.model))
        self._reader = reader
        self.has_tower = vision_config(reader.config) is not None
        self.has_draft = draft_config(reader.config) is not None
        self._scales: dict[str, float] = {}
        for name, spec in self.specs.items():
            if self.type == "PQ2_0" and reader.tensors[name].packed:
                self._check_groups(name, spec)
            elif spec.kind == "ternary":
                self._check(name, spec)
            elif reader.tensors[name].packed:
                reject("group-scales", f"{name} as dense values", "packed ternary weights",
                       "only the type pq2_0 holds its scales")  # fmt: skip

    def _check(self, name: str, spec: TensorSpec) -> None:
        rows, columns = spec.shape
        scale = self._reader.tensors[name].scale
        if scale is None:
            reject("group-scales", f"one scale for {name}", "none, or one for a group of weights",
                   "only the type pq2_0 holds them")  # fmt: skip
        with _named(name, "; i2_s takes K % 128 == 0, tq1_0 and tq2_0 K % 256 == 0"):
            layouts.check_shape(self.type, rows, columns)
            if self.type != "I2_S":
                half = float(layouts.half_scale(scale))
                self.rounding = max(self.rounding, abs(half / scale - 1.0))
        self._scales[gguf_name(name, self.architecture)] = scale

    def _check_groups(self, name: str, spec: TensorSpec) -> None:
        if (size := self._reader.tensors[name].group_size) not in (0, BLOCK):
            reject("group-scales", f"{name} with scales of {BLOCK} weights or more", f"of {size}",
                   "pq2_0 cannot hold them")  # fmt: skip
        scales = self._reader.scales(name).numpy()
        with _named(name):
            layouts.check_shape(self.type, spec.shape[0], spec.shape[1])
            halves, wide = layouts.half_scales(scales), scales.astype(np.float64)
        off = np.abs(halves[scales > 0] / wide[scales > 0] - 1.0)
        self.rounding = max(self.rounding, float(off.max(initial=0.0)))

    def write(
        self, file: Path, name: str, vocabulary: dict[str, Any], progress: Progress | None
    ) -> None:
        """Write `file`; `name` is what it says the model is called."""
        specs = {n: spec for n, spec in self.specs.items() if not n.startswith(ROTATION)}
        tensors = {
            gguf_name(tensor, self.architecture): (self._type(tensor, spec), self._shape(tensor))
            for tensor, spec in specs.items()
        }
        metadata = {**self._metadata(printable(name)), **vocabulary}
        with Writer(file, metadata, tensors) as writer:
            for done, (tensor, spec) in enumerate(specs.items()):
                if progress is not None:
                    progress(done, len(specs), tensor)
                writer.add(gguf_name(tensor, self.architecture), self._data(tensor, spec))
                self._reader.release(tensor)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.specs[name].shape
        return shape[::-1] if name.endswith(hybrid.CONVOLUTION) else shape

    def _type(self, name: str, spec: TensorSpec) -> str:
        if self._reader.tensors[name].packed:
            return self.type
        if len(spec.shape) == 1:
            return "F32"  # llama.cpp computes norms in nothing else
        return _DENSE[self._reader.tensors[name].dtype]

    def _data(self, name: str, spec: TensorSpec) -> Any:
        self._reader.check_sum(name)
        self._reader.check_data(name)
        tensor = self._reader.tensor(name)
        net = self.model.delta_net
        if not self._reader.tensors[name].packed:
            tensor = tensor.float() if len(spec.shape) == 1 else tensor
            tensor = tensor if net is None else hybrid.to_gguf(name, tensor, net)
            return tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self._reader.check_in_features(name, spec.shape[1])
        rows, order, columns = tensor.numpy(), None, None
        if self.architecture.permuted and name.endswith(PERMUTED):
            order = head_rows(len(rows), self.model.head_dim)
        elif net is not None:
            order = hybrid.tiled_rows(name, net)
            columns = hybrid.tiled_columns(name, net, self.model.rotation)
        rows = rows if order is None else rows[np.argsort(order)]
        used: Any = None
        if columns is not None:
            columns = np.argsort(columns)
            codes = layouts.unpack_rows(rows, spec.shape[1])
            used = (codes.reshape(len(rows), -1, BLOCK) != 1).any(axis=2)
            rows = layouts.pack_rows(codes[:, columns])
        if self.type != "PQ2_0":
            scale = self._reader.tensors[name].scale
            assert scale is not None
            return layouts.encode(self.type, rows, spec.shape[1], scale)
        scales = self._reader.scales(name).numpy()
        groups = np.broadcast_to(
            scales if scales.ndim == 2 else scales.reshape(-1, 1),
            (len(rows), spec.shape[1] // BLOCK),
        )
        groups = groups if order is None else groups[np.argsort(order)]
        if columns is not None and net is not None:
            groups = np.where(used, groups, np.nan)
            groups = hybrid.moved_groups(groups, columns, BLOCK, net.value_dim, name)
        with _named(name):
            return layouts.encode_groups(rows, spec.shape[1], groups)

    def _metadata(self, name: str) -> dict[str, tuple[str, Any]]:
        c, a = self.model, self.architecture.name
        metadata: dict[str, tuple[str, Any]] = {
            "general.architecture": ("string", a),
            "general.type": ("string", "model"),
            "general.name": ("string", name),
            "general.quantization_version": ("uint32", 2),
            f"{a}.vocab_size": ("uint32", c.vocab_size),
            f"{a}.context_length": ("uint32", c.max_position_embeddings),
            f"{a}.embedding_length": ("uint32", c.hidden_size),
            f"{a}.block_count": ("uint32", c.num_hidden_layers),
            f"{a}.feed_forward_length": ("uint32", c.intermediate_size),
            f"{a}.attention.head_count": ("uint32", c.num_attention_heads),
            f"{a}.attention.head_count_kv": ("uint32", c.num_key_value_heads),
            f"{a}.attention.key_length": ("uint32", c.head_dim),
            f"{a}.attention.value_length": ("uint32", c.head_dim),
            f"{a}.attention.layer_norm_rms_epsilon": ("float32", c.rms_norm_eps),
            f"{a}.rope.dimension_count": ("uint32", c.rotary_dim),
            f"{a}.rope.freq_base": ("float32", c.rope_theta),
            **exported(c.rope_scaling, a),
        }
        if self.architecture.family.sub_norms:  # readers of these names assume different ones
            metadata[f"{a}.hidden_activation"] = ("string", c.hidden_act)
        if self.type in _FILE_TYPES:
            metadata["general.file_type"] = ("uint32", _FILE_TYPES[self.type])
        if c.delta_net is not None:
            metadata |= hybrid.gguf_keys(c, a)
        if c.rotation is not None:
            metadata |= self._rotation(c.rotation)
        if self.type in _EXACT:
            metadata[EXACT_NAMES] = ("[string]", list(self._scales))
            metadata[EXACT_SCALES] = ("[float32]", list(self._scales.values()))
        return metadata

    def _rotation(self, rotation: Rotation) -> dict[str, tuple[str, Any]]:
        signs = {w: self._reader.tensor(f"{ROTATION}{w}.weight") for w, _ in rotation.blocks}
        names = {
            name.removesuffix(".weight"): gguf_name(name, self.architecture)
            for name, spec in self.specs.items()
            if self._reader.tensors[name].packed
            and rotation.rotates(name.removesuffix(".weight"), spec.shape[1])
        }
        tied = self.model.tie_word_embeddings
        return hybrid.rotation_keys(rotation, signs, names, tied=tied)


# The vocabulary -----------------------------------------------------------------------------------

Keys = dict[str, tuple[str, Any]]  # as gguf.Writer takes them
_REMEDY = "export with --no-tokenizer; the file then takes token ids alone"
# Texts in which cuts differ: contractions, runs of digits and spaces, line ends, scripts, marks.
PROBES = (
    "Hello world, this is a test.",
    "  two  spaces\n\n\n and\t\ttabs \r\n\r\n x   ",
    "don't DON'T I'LL we'Ve 'tis o'clock",
    "1 12 123 1234 12345678 3.14159 2^10 x1y22z333",
    "Gr\u00fc\u00dfe na\u00efve caf\u00e9 e\u0301 \ufb01 \u2126 \u00bd \u0664\u0665\u0666",
    "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a",
    # marks, which join letters in some patterns: Devanagari, Thai, Arabic
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e17\u0e35\u0e48 \u0643\u0650\u062a\u0627\u0628",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u200b\ufeff \u00a0 \x07",
    "...!!! (a)[b]{c} `code` $x+y=z$ a/b\\c <tag> #1 @me ~ ^ | ===== ----",
    "https://example.org/a?b=1&c=%20 foo_bar fooBar FooBAR",
)


def vocabulary_keys(folder: Path, model: ModelConfig) -> tuple[Keys, list[str]]:
    """(tokenizer.ggml.* keys, remarks) of the model in `folder`; ConvertError if inexpressible."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {"tokenizer.ggml.model": ("string", "no_vocab")}, [
            "no tokenizer.json: no vocabulary"
        ]
    try:
        return _vocabulary_keys(folder, Tokenizer.from_dir(folder), model), []
    except TokenizerError as error:
        reject("tokenizer-broken", f"a tokenizer in {folder} that can be run", str(error), _REMEDY)


def _vocabulary_keys(folder: Path, original: Tokenizer, model: ModelConfig) -> Keys:
    stored = json.loads(original.backend.to_str())
    if not is_known(original.backend):
        found = "a regular expression that none of them has"
        reject("tokenizer-pre", f"one of {', '.join(EXPORTED)}, or SentencePiece", found, _REMEDY)
    config = _object(folder / "tokenizer_config.json")
    keys = _frame(stored, original, config, model, folder)
    kind = stored["model"].get("type")
    decoder = (stored.get("decoder") or {}).get("type")
    if kind == "BPE" and decoder == "ByteLevel":
        candidates = _byte_level(stored, keys)
    elif kind == "BPE" and stored["model"].get("byte_fallback"):
        candidates = _sentencepiece(stored, keys)
    else:
        found = f"{kind} with the decoder {decoder}"
        reject("tokenizer-model", "byte-level or SentencePiece BPE", found, _REMEDY)
    for candidate in candidates:
        if _expresses(candidate, original, model):
            return candidate
    reject(
        "tokenizer-pre",
        f"a tokenizer that cuts texts like one of {', '.join(EXPORTED)}, or SentencePiece",
        "other token ids on the texts compared",
        _REMEDY,
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.is_file() else {}
    except UntrustedFileError as error:
        raise ConvertError("tokenizer-broken", f"export: {error}") from None


def _frame(
    stored: Mapping[str, Any],
    original: Tokenizer,
    config: Mapping[str, Any],
    model: ModelConfig,
    folder: Path,
) -> Keys:
    """Everything but the model's kind, the merges and the scores."""
    tokens, types = _tokens(stored, original, model)
    keys: Keys = {
        "tokenizer.ggml.tokens": ("[string]", tokens),
        "tokenizer.ggml.token_type": ("[int32]", types),
    }
    ids = {"bos": model.bos_token_id}
    ends = sorted(stated_ends(folder, model), key=lambda i: i not in model.eos_token_ids)
    ids["eos"] = ends[0] if ends else None
    for i, name in enumerate(("eot", "eom")):
        ids[name] = ends[i + 1] if len(ends) > i + 1 else None
    for name, token in (("unknown", "unk_token"), ("padding", "pad_token")):
        content = config.get(token)
        content = content.get("content") if isinstance(content, dict) else content
        ids[name] = original.token_id(content) if isinstance(content, str) else None
    for name, token_id in ids.items():
        if token_id is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = ("uint32", token_id)
    before, behind = _around(original)
    if before not in ([], [ids["bos"]]) or behind not in ([], [ids["eos"]]):
        found = f"{before} before a text and {behind} behind it"
        reject("tokenizer-special", "at most bos before a text and eos behind it", found, _REMEDY)
    keys["tokenizer.ggml.add_bos_token"] = ("bool", bool(before))
    keys["tokenizer.ggml.add_eos_token"] = ("bool", bool(behind))
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = ("string", template)
    return keys


def _tokens(
    stored: Mapping[str, Any], original: Tokenizer, model: ModelConfig
) -> tuple[list[str], list[int]]:
    """Tokens and types by id, filled up to the rows of the embedding."""
    if original.vocab_size > model.vocab_size:
        found = f"{original.vocab_size} tokens"
        reject("tokenizer-size", f"at most {model.vocab_size} tokens, as the model has rows", found)
    tokens = [f"[PAD{i}]" for i in range(model.vocab_size)]
    types = [UNUSED] * model.vocab_size
    fallback = bool(stored["model"].get("byte_fallback"))
    for token, i in original.backend.get_vocab().items():
        if i >= model.vocab_size:
            reject("tokenizer-size", f"ids below {model.vocab_size}", f"{token!r} with {i}")
        is_byte = fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[i], types[i] = token, BYTE if is_byte else NORMAL
    for added in stored.get("added_tokens", ()):
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = stored["model"].get("unk_token")
    if isinstance(unknown, str) and (i := original.token_id(unknown)) is not None:
        types[i] = UNKNOWN
    return tokens, types


def _around(original: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and behind a text."""
    plain, whole = original.encode("a", add_special_tokens=False), original.encode("a")
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return whole, whole


def _merges(stored: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = (m.split(" ") if isinstance(m, str) else m for m in stored["model"]["merges"])
    return [(left, right) for left, right in merges]


def _byte_level(stored: Mapping[str, Any], keys: Keys) -> Iterator[Keys]:
    normalizer = (stored.get("normalizer") or {}).get("type")
    for name in EXPORTED:
        pre = PRE_TOKENIZERS[name]
        same_merges = pre.ignore_merges == bool(stored["model"].get("ignore_merges"))
        if same_merges and normalizer == ("NFC" if pre.nfc else None):
            yield {
                "tokenizer.ggml.model": ("string", "gpt2"),
                "tokenizer.ggml.pre": ("string", name),
                **keys,
                "tokenizer.ggml.merges": ("[string]", [f"{a} {b}" for a, b in _merges(stored)]),
            }


def _sentencepiece(stored: Mapping[str, Any], keys: Keys) -> Iterator[Keys]:
    """Scores are minus the rank of the first merge that makes a token, as SentencePiece's are."""
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(_merges(stored)):
        rank.setdefault(left + right, i)
    lowest = float(len(rank) + 1)
    scores = [
        -float(rank.get(token, lowest)) if kind in (NORMAL, USER_DEFINED) else 0.0
        for token, kind in zip(
            keys["tokenizer.ggml.tokens"][1], keys["tokenizer.ggml.token_type"][1], strict=True
        )
    ]
    for prefix in (True, False):
        yield {
            "tokenizer.ggml.model": ("string", "llama"),
            "tokenizer.ggml.pre": ("string", "default"),
            **keys,
            "tokenizer.ggml.scores": ("[float32]", scores),
            "tokenizer.ggml.add_space_prefix": ("bool", prefix),
        }


def _expresses(keys: Keys, original: Tokenizer, model: ModelConfig) -> bool:
    """Whether a tokenizer rebuilt from `keys` gives the original's ids on every probe."""
    from tokenizers import Tokenizer as Backend

    metadata = {
        name: np.array(value) if kind in ("[int32]", "[float32]") else value
        for name, (kind, value) in keys.items()
    }
    try:
        files, _ = tokenizer_files(metadata, model)
    except ConvertError:
        return False
    made = Backend.from_str(files["tokenizer.json"])
    return all(made.encode(text).ids == original.encode(text) for text in PROBES)
