"""Images: what a model's tower makes of pictures, as parts of prompts.

A picture is decoded, resized and cut into patches (vision/), and the tower makes of each two by two
patches a row, which stands in the prompt where a token's embedding would. Rows of the newest
pictures are kept by what they were made of, so that a conversation's next turn needs no tower. The
tower is loaded at the first picture. For any threads: one picture is computed at a time.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bitnet_ops import _runtime
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.generate.pictures import Picture
from bitnet_ops.generate.prompt import PromptRows
from bitnet_ops.vision.config import VisionConfig
from bitnet_ops.vision.decode import LIMITS, ImageLimits, decode_image, image_size
from bitnet_ops.vision.errors import ImageError
from bitnet_ops.vision.preprocess import image_identity, patches, tokens_of
from bitnet_ops.vision.sources import read_image_file
from bitnet_ops.vision.tower import VisionTower
from bitnet_ops.vision.weights import load_tower, vision_config

if TYPE_CHECKING:
    from PIL import Image

KEPT_MB = 256
# Of ImageError, where a model reads texts alone.
NO_TOWER = (
    "texts alone",
    "a picture, and the model has no tower that would read it",
    "convert the model with its tower (a checkpoint's own, or --mmproj FILE)",
)


class Images:
    """Makes prompts of pictures for one model.

    Args:
        config: of the tower.
        load: gives the tower; called once, at the first picture.
        digest: tells this tower from others, where rows are found again by what made them.
        limits: what pictures may cost; `max_tokens` of each above all.
        kept_mb: MiB for rows of pictures that may come again.
    Attributes: `config`, `limits`; `computed`, how many pictures the tower has read, and
    `seconds`, how long that took, decoding included.
    """

    def __init__(
        self,
        config: VisionConfig,
        load: Callable[[], VisionTower],
        digest: bytes,
        limits: ImageLimits = LIMITS,
        kept_mb: float = KEPT_MB,
    ) -> None:
        self.config, self.limits = config, limits
        self._load, self._digest = load, digest
        self._tower: VisionTower | None = None
        self._lock, self._computing = threading.Lock(), threading.Lock()
        self._max_bytes = int(kept_mb * 2**20)
        self._kept: OrderedDict[bytes, PromptRows] = OrderedDict()
        self._bytes = 0
        self.computed, self.seconds = 0, 0.0

    def grid(self, picture: Picture) -> tuple[int, int]:
        """(rows, columns) of a picture's tokens; reads its header alone. Raises ImageError."""
        try:
            height, width = image_size(picture.data, self.limits)
            return tokens_of(height, width, self.config, self.limits.max_tokens)
        except ImageError as error:
            raise error.at(picture.where) from None

    def padded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Ids with as many padding tokens as each picture has rows, where there was one.

        Reads no more of a picture than its header. Raises ImageError for too many pictures or rows,
        and where there are more or fewer padding tokens than pictures.
        """
        self._check_pads(ids, len(pictures))
        self.limits.check_count(len(pictures))
        counts = [rows * columns for rows, columns in map(self.grid, pictures)]
        self.limits.check_total(sum(counts))
        pad, found, rest = self.config.image_token_id, list[int](), iter(counts)
        for i in ids:
            found += [pad] * next(rest) if i == pad else [i]
        return found

    def _check_pads(self, ids: Sequence[int], count: int) -> None:
        if (pads := sum(i == self.config.image_token_id for i in ids)) != count:
            expected = f"a padding token for each of {count} pictures"
            remedy = "the tokenizer or the chat template belongs to another model"
            raise ImageError(expected, str(pads), remedy, "images")

    def rows(self, picture: Picture) -> PromptRows:
        """What stands in a prompt for a picture. Raises ImageError for one that cannot be read."""
        if (known := self._found(identity := self._identity(picture))) is not None:
            return known
        with self._computing:
            if (known := self._found(identity)) is not None:
                return known
            began = time.perf_counter()
            grid = self.grid(picture)
            rows = PromptRows(self._computed(picture), self.config.image_token_id, identity, grid)
            self.seconds += time.perf_counter() - began
            self.computed += 1
            self._keep(identity, rows)
        return rows

    def kept(self, picture: Picture) -> PromptRows | None:
        """The rows of a picture that has been read lately; None of another one."""
        return self._found(self._identity(picture))

    def check(self, picture: Picture) -> None:
        """Raise ImageError as `rows` would; the picture is decoded, but no tower computes."""
        if self.kept(picture) is None:
            self._decoded(picture)

    def _found(self, identity: bytes) -> PromptRows | None:
        with self._lock:
            if (known := self._kept.get(identity)) is not None:
                self._kept.move_to_end(identity)
            return known

    def _identity(self, picture: Picture) -> bytes:
        grid, merge = self.grid(picture), self.config.spatial_merge_size
        patched = grid[0] * merge, grid[1] * merge
        return self._digest + image_identity(picture.data, patched, self.config)

    def _decoded(self, picture: Picture) -> Image.Image:
        try:
            return decode_image(picture.data, self.limits)
        except ImageError as error:
            raise error.at(picture.where) from None

    @torch.inference_mode()
    def _computed(self, picture: Picture) -> torch.Tensor:
        pixels, grid = patches(self._decoded(picture), self.config, self.limits.max_tokens)
        if self._tower is None:
            self._tower = self._load()
        rows: torch.Tensor = self._tower(pixels, [grid])[0]
        return rows

    def prompt_of(self, picture: Picture) -> list[int | PromptRows]:
        """What stands in a prompt for a picture, with the tokens before and behind it."""
        start, _, end = self.token_ids
        return [start, self.rows(picture), end]

    def _keep(self, identity: bytes, rows: PromptRows) -> None:
        with self._lock:
            self._kept[identity] = rows
            self._bytes += rows.rows.nbytes
            while self._bytes > self._max_bytes and self._kept:
                self._bytes -= self._kept.popitem(last=False)[1].rows.nbytes

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int | PromptRows]:
        """Ids, in which one padding token stands for each picture, with the pictures' rows.

        Raises ImageError where there are more or fewer, or for a picture that cannot be read.
        """
        self.padded(ids, pictures)  # before a tower computes
        return self.joined(ids, [self.rows(picture) for picture in pictures])

    def joined(self, ids: Sequence[int], rows: Sequence[PromptRows]) -> list[int | PromptRows]:
        """Ids with rows in the place of their padding tokens; ImageError unless as many."""
        self._check_pads(ids, len(rows))
        rest = iter(rows)
        return [next(rest) if i == self.config.image_token_id else i for i in ids]

    @property
    def token_ids(self) -> tuple[int, int, int]:
        """The tokens that stand for a picture in a text: before it, for padding, behind it."""
        c = self.config
        return c.vision_start_token_id, c.image_token_id, c.vision_end_token_id


def open_images(file: Path, limits: ImageLimits = LIMITS) -> Images | None:
    """Images of a model file; None for a model that reads texts alone.

    The tower computes in bfloat16 where this CPU multiplies it, else in float32. Raises
    UnsupportedModelError for a tower's config of another form.
    """
    reader = Reader(file, check_codes=False)
    config = vision_config(reader.config)
    if config is None:
        reader.close()
        return None
    dtype = tower_dtype()
    state = repr((reader.digest(), config, str(dtype))).encode()

    def load() -> VisionTower:
        tower = load_tower(reader, dtype)
        assert tower is not None
        return tower

    return Images(config, load, hashlib.sha256(state).digest(), limits)


def picture_file(path: Path, limits: ImageLimits = LIMITS) -> Picture:
    """The picture in a file; raises ImageError, which names it, for what cannot be read.

    Of its contents no more is looked at than the header.
    """
    try:
        data = read_image_file(path, limits)
        image_size(data, limits)
    except ImageError as error:
        raise error.at(str(path)) from None
    return Picture(data, where=str(path))


def tower_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it, else float32, which is then faster."""
    features = _runtime.cpu_features()
    fast = features.get("avx512_bf16", False) or features.get("amx_bf16", False)
    return torch.bfloat16 if fast else torch.float32
