"""What a conversion reads and decides, the same for every kind of source: Source, Plan, Ternary."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import ModelConfig, UnsupportedModelError
from bitnet_ops.config.scheme import Scheme
from bitnet_ops.convert.draft import DraftHead
from bitnet_ops.convert.errors import ConvertError, reject
from bitnet_ops.convert.tower import Tower
from bitnet_ops.generate.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerError
from bitnet_ops.models import TensorSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Plan:
    """Everything decided before data is read: the model, the scheme and the tensors to write.

    specs: by name here, in writing order.
    stored: name here -> name in the source, for every tensor of the source that has one.
    hf_config: config.json as the source has it, or as transformers would have it.
    block: the private block of the config, which says how the source was read.
    tied_head: the source repeats the embedding as lm_head.weight; they must be equal.
    tower: name inside the tower for images -> name in the source, for every tensor of a checkpoint.
    drafts: the same of layers that draft tokens, by their names from `mtp.` on.
    """

    config: ModelConfig
    scheme: Scheme
    specs: dict[str, TensorSpec]
    stored: dict[str, str]
    hf_config: dict[str, Any]
    block: dict[str, Any]
    tied_head: bool = False
    remarks: tuple[str, ...] = ()
    tower: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drafts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def renamed(self) -> bool:
        """Whether the source's names are not those that transformers' classes have."""
        return any(self.stored[name] != name for name in self.specs)

    @property
    def ternary(self) -> list[str]:
        """The names of the ternary matrices."""
        return [name for name, spec in self.specs.items() if spec.kind == "ternary"]


@dataclass
class Uneven:
    """Groups of weights with two magnitudes of nearly one size, of which the larger was taken.

    largest_error: of a weight. largest_relative: of a weight, by its group's scale.
    """

    groups: int = 0
    largest_error: float = 0.0
    largest_relative: float = 0.0

    def add(self, other: Uneven | None) -> None:
        """Count those of `other` too."""
        if other is not None:
            self.groups += other.groups
            self.largest_error = max(self.largest_error, other.largest_error)
            self.largest_relative = max(self.largest_relative, other.largest_relative)

    def line(self) -> str:
        """What a user must know of them."""
        return (
            f"{self.groups:,} groups of weights hold two magnitudes within 2^-7 of each other; the "
            f"larger was taken (a weight is off by {self.largest_error:.3g} at most, "
            f"{100 * self.largest_relative:.2g} %)"
        )


@dataclass(frozen=True)
class Ternary:
    """A ternary matrix: canonical rows uint8 [N, R], multiplying scales, codes int8 [N, K] or None.

    `scale`: f32 [1] or [N], or with `group_size` G, 128 or 64, f32 [N, ceil(K / G)]. `remark`: for
    the report. `uneven`: groups whose weights are not all exactly code * scale.
    """

    rows: Tensor
    scale: Tensor
    remark: str | None = None
    group_size: int = 0
    codes: Tensor | None = None
    uneven: Uneven | None = None

    @classmethod
    def packed(
        cls,
        codes: Tensor,
        scale: Tensor | float,
        remark: str | None = None,
        group_size: int = 0,
        uneven: Uneven | None = None,
    ) -> Ternary:
        """Of codes int8 [N, K]."""
        scale = torch.tensor([scale], dtype=torch.float32) if isinstance(scale, float) else scale
        return cls(ops.pack(codes), scale, remark, group_size, codes, uneven)


class Source:
    """A checkpoint or file, opened and planned; a kind of source is a class derived from this.

    path: of the folder or file. nbytes: of its weights. noun: what messages call it. remarks: for
    the report, complete once `finish` has run. tower: for images, draft: that drafts tokens, where
    one is to be written.
    """

    path: Path
    plan: Plan
    nbytes: int
    noun = "file"
    remarks: list[str]
    tokenizer_folder: Path | None = None  # the source's own, where it has files of it
    tower: Tower | None = None
    tower_remarks: Sequence[str] = ()
    draft: DraftHead | None = None
    draft_remarks: Sequence[str] = ()

    def check(self) -> None:
        """Reject what only the data of the source shows, before anything is written."""

    def dense(self, name: str) -> Tensor:
        """The dense tensor `name`, checked."""
        raise NotImplementedError

    def holds_ternary(self, name: str) -> bool:
        """Whether an embedding or a head is packed ternary weights in the source already."""
        return False

    def ternary(self, name: str) -> Ternary:
        """The ternary matrix `name`, checked, and ternarised if need be."""
        raise NotImplementedError

    def unwritten_rows(self, name: str) -> int:
        """How many rows of a ternary matrix are zero bytes, where those are no row of zeros."""
        return 0

    def release(self, name: str) -> None:
        """The data of `name` are not needed any more."""

    def own_tower(self) -> Tower | None:
        """The tower for images that the source itself holds."""
        return None

    def own_draft(self) -> DraftHead | None:
        """The draft head that the source itself holds.

        Raises HeadError for one that cannot be taken over.
        """
        return None

    def drafts(self) -> int:
        """How many tensors of layers that draft tokens the source has."""
        return len(self.plan.drafts)

    def tokens(self) -> dict[int, str]:
        """The vocabulary, as far as it is known: texts by id."""
        return folder_tokens(self.tokenizer_folder)

    def image_ids(self) -> dict[str, int]:
        """Ids of the tokens of images (vision.config.IMAGE_TOKENS), those that are known."""
        return {}

    def finish(self, folder: Path) -> list[str]:
        """Write what belongs beside model.bin (the tokenizer) into `folder`; returns the names."""
        raise NotImplementedError

    def check_result(self, file: Path) -> None:
        """Reject a model.bin that differs from the source where copies must be exact."""

    def files(self) -> dict[str, Path]:
        """Every file that is read, by the name that a report has for it."""
        raise NotImplementedError

    def all_files(self) -> dict[str, Path]:
        """Those, and the files of the tower and of the draft head."""
        beside = [part.files for part in (self.tower, self.draft) if part is not None]
        return dict(item for files in [self.files(), *beside] for item in files.items())

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every file that was read, by name."""
        return {name: file_sha256(path) for name, path in self.all_files().items()}


def folder_tokens(folder: Path | None) -> dict[int, str]:
    """Texts of the tokens of tokenizer.json in `folder` by id; none where there is none."""
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return {}
    try:
        vocabulary = Tokenizer.from_dir(folder).backend.get_vocab()
    except TokenizerError:  # which is said where it is copied
        return {}
    return {number: token for token, number in vocabulary.items()}


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# Files that change while they are read ------------------------------------------------------------

Stamp = tuple[int, ...] | None


def stamp(path: Path) -> Stamp:
    """What changes with a file: which one it is, its size and times; None for one that is gone."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # a zero byte in the name
        return None
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_dev, found.st_ino, found.st_size, *times


def stamps(path: Path) -> dict[Path, Stamp]:
    """The stamps of the file `path`, or of all that lies in the folder `path`."""
    try:
        files = list(path.iterdir()) if path.is_dir() else [path]
    except (OSError, ValueError):  # whoever opens it says what is wrong
        return {}
    return {file: stamp(file) for file in files}


def reject_changed(path: Path) -> NoReturn:
    """Raise ConvertError("source-changed"): what was read of it is of two files."""
    reject(
        "source-changed",
        f"{path.name} as it was when it was opened",
        "another size, time or file",
        "convert again once nothing writes to it",
    )


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig.from_hf, whose rejections are ConvertError("unsupported-model")."""
    try:
        return ModelConfig.from_hf(config)
    except UnsupportedModelError as error:
        raise ConvertError("unsupported-model", f"convert: {error}") from error
