"""The streaming writer of SGLBITNT, versions 1 and 2 (FORMAT.md); public as `sglbitnt.Writer`.

Everything is checked before the first byte of a tensor is written.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.formats.atomic import atomic_file
from bitnet_ops.formats.sglbitnt_layouts import (
    DTYPES,
    GROUP_SIZES,
    LAYOUTS,
    MAX_DIM,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    ROW_BLOCK_BYTES,
    ROW_BLOCK_WEIGHTS,
    VERSIONS,
    Record,
    SglbitntError,
    Version1,
    Version2,
    config_bytes,
    typed_errors,
)

_SCAN_ELEMS = 1 << 22  # data is scanned in pieces, so that temporaries stay small
_WEIGHTS_PER_BYTE = 4
_SMALLEST_NORMAL = 2.0**-126  # of float32


class Writer:
    """Writes a model file tensor by tensor; only a complete and valid one gets the name `path`.

    `config`: the config.json dict. `tensor_count`: how many tensors will be added; `names`, if
    given, says which. `version`: 2, or 1 for readers that know no other. A context manager: leaving
    it normally renames the temporary file, leaving it by any exception removes it. Needs no memory
    beyond the tensor being written. Raises SglbitntError for what breaks a rule of FORMAT.md
    (nothing of that tensor is written then) and, with code "io", for what the file system rejects.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: dict[str, Any],
        tensor_count: int,
        names: Iterable[str] | None = None,
        *,
        version: int = 2,
    ) -> None:
        self.path = Path(path)
        self.version = version
        if version not in VERSIONS:
            self._fail("version", "header", f"version 1 or 2, got {version}")
        self._config = config_bytes(config, str(self.path))
        self._count = tensor_count
        self._promised = None if names is None else set(names)
        self._written: set[str] = set()
        self._layout: Version1 | Version2 | None = None
        if not 0 <= tensor_count <= MAX_TENSORS:
            limit = f"a tensor count of at most {MAX_TENSORS}, got {tensor_count}"
            self._fail("tensor_count", "header", limit)
        if self._promised is not None and len(self._promised) != tensor_count:
            self._fail("writer_count", "header", f"{tensor_count} names, got {len(self._promised)}")

    def add_packed(
        self,
        name: str,
        weight: Tensor,
        scale: float | Tensor,
        in_features: int | None = None,
        group_size: int = 0,
    ) -> None:
        """Add a ternary weight: packed rows, uint8 [N, 32*ceil(K/128)], and multiplying scales.

        `scale`: a number, or a tensor of one element, f32 or f16 [N], or, with `group_size` G,
        128 or 64, [N, ceil(K/G)]; version 1 holds one number. `in_features`: the true K, against
        which row bytes and padding codes are checked; None means that rows are full, K = 4 * row
        bytes.
        """
        self._check_tensor(name, weight, packed=True)
        whole = weight.shape[1] * _WEIGHTS_PER_BYTE
        scales = self._stored_scales(name, weight, scale, group_size, in_features or whole)
        if in_features is None:
            in_features = whole
        else:
            self._check_padding(name, weight, in_features)
        self._write(Record(name, weight, scales, in_features, group_size))

    def add_dense(self, name: str, tensor: Tensor) -> None:
        """Add a float32, float16 or bfloat16 tensor of 1 to 8 dimensions, in its dtype."""
        self._check_tensor(name, tensor, packed=False)
        self._write(Record(name, tensor))

    # --- checks -----------------------------------------------------------------------------------

    def _fail(
        self, code: str, where: str, expected_got: str, remedy: str = "correct the argument"
    ) -> NoReturn:
        raise SglbitntError(code, f"{self.path}: {where}: expected {expected_got}; {remedy}")

    def _where(self, name: str) -> str:
        return f"tensor {len(self._written)} {name!r}"

    def _check_tensor(self, name: str, tensor: Tensor, packed: bool) -> None:
        if self._layout is None:
            limit = "an open Writer, got one outside its block"
            self._fail("writer_closed", self._where(name), limit, "use `with Writer(...)`")
        self._check_name(name)
        self._check_kind(name, tensor, packed)
        self._check_shape(name, tensor)
        self._check_values(name, tensor)

    def _check_name(self, name: str) -> None:
        where = self._where(name)
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            self._fail("name_utf8", where, "a name that UTF-8 can hold, got a lone surrogate")
        if not 1 <= size <= MAX_NAME_BYTES:
            self._fail("name_length", where, f"a name of 1 to {MAX_NAME_BYTES} bytes, got {size}")
        if any(unicodedata.category(c) == "Cc" for c in name):
            self._fail("name_control", where, f"a name without control characters, got {name!r}")
        if name in self._written:
            self._fail("name_duplicate", where, "a name of its own, got one already written")
        if self._promised is not None and name not in self._promised:
            self._fail("writer_count", where, "a name that was announced, got another")
        if len(self._written) == self._count:
            self._fail("writer_count", where, f"{self._count} tensors as announced, got one more")

    def _check_kind(self, name: str, tensor: Tensor, packed: bool) -> None:
        kinds = "uint8" if packed else "float32, float16 or bfloat16"
        right = tensor.dtype in DTYPES and (tensor.dtype == torch.uint8) == packed
        if not right or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            got = f"got {tensor.dtype} {tensor.layout} on {tensor.device}"
            self._fail("dtype", self._where(name), f"a strided {kinds} tensor on the CPU, {got}")

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        where, shape, packed = self._where(name), list(tensor.shape), tensor.dtype == torch.uint8
        if len(shape) != 2 if packed else not 1 <= len(shape) <= MAX_DIMS:
            limit = "2 (packed)" if packed else f"1 to {MAX_DIMS}"
            self._fail("ndim", where, f"ndim {limit}, got {len(shape)}")
        if not all(1 <= dim <= MAX_DIM for dim in shape):
            self._fail("dim", where, f"dimensions from 1 to {MAX_DIM}, got {shape}")
        if packed and shape[1] % ROW_BLOCK_BYTES:
            limit = f"packed rows of a multiple of {ROW_BLOCK_BYTES} bytes, got {shape[1]}"
            self._fail("packed_shape", where, limit)

    def _check_values(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype != torch.uint8:
            low, high = torch.aminmax(tensor)  # one pass, no temporary; NaN spreads into both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                self._fail("non_finite", self._where(name), "finite values, got NaN or infinity")
            return
        for piece in tensor.detach().contiguous().view(-1).split(_SCAN_ELEMS):
            if (piece & (piece >> 1) & 0x55).any():
                self._fail("invalid_code", self._where(name), "codes 0, 1 and 2, got code 3")

    def _stored_scales(
        self, name: str, weight: Tensor, scale: float | Tensor, group_size: int, k: int
    ) -> Tensor:
        """`scale` as the file holds it: f32 [1], or f32 or f16 [N] or [N, groups]."""
        if not isinstance(scale, Tensor) or (scale.numel() == 1 and group_size == 0):
            return self._one_scale(name, float(scale))
        rows = weight.shape[0]
        where = self._where(name)
        if self.version == 1:
            self._fail("scale_kind", where, f"one scale, got {list(scale.shape)}", "use version 2")
        if group_size not in (0, *GROUP_SIZES):
            sizes = " or ".join(map(str, GROUP_SIZES))
            limit = f"a group size of {sizes}, or 0 for scales per row"
            self._fail("group_size", where, f"{limit}, got {group_size}")
        shape = [rows, -(-k // group_size)] if group_size else [rows]
        if list(scale.shape) != shape:
            self._fail("scale_kind", where, f"scales {shape}, got {list(scale.shape)}")
        if scale.dtype not in (torch.float32, torch.float16):
            self._fail("scale_dtype", where, f"scales in float32 or float16, got {scale.dtype}")
        subnormal = (scale.dtype == torch.float32) & (scale != 0) & (scale < _SMALLEST_NORMAL)
        if not torch.isfinite(scale).all() or torch.signbit(scale).any() or subnormal.any():
            limit = "scales that are finite, not negative and not subnormal in float32"
            self._fail("scale_value", where, f"{limit}, got {scale.min()} to {scale.max()}")
        return scale.detach()

    def _one_scale(self, name: str, scale: float) -> Tensor:
        stored = torch.tensor([scale], dtype=torch.float64).float()
        if not _SMALLEST_NORMAL <= stored.item() < float("inf"):
            limit = f"a scale that is finite, normal and above 0 in float32, got {scale}"
            self._fail("scale_value", self._where(name), limit)
        return stored

    def _check_padding(self, name: str, weight: Tensor, in_features: int) -> None:
        blocks = -(-in_features // ROW_BLOCK_WEIGHTS)
        if in_features < 1 or weight.shape[1] != blocks * ROW_BLOCK_BYTES:
            limit = f"rows of 32*ceil(K/128) bytes for K {in_features}, got {weight.shape[1]}"
            self._fail("in_features", self._where(name), limit)
        last = weight[:, -ROW_BLOCK_BYTES:]
        codes = torch.cat([(last >> shift) & 3 for shift in (6, 4, 2, 0)], dim=1)  # [N, 128]
        if (codes[:, in_features - ROW_BLOCK_WEIGHTS * (blocks - 1) :] != 1).any():
            self._fail("padding_code", self._where(name), "padding code 1 beyond K, got another")

    # --- bytes ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _io_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SglbitntError(
                "io",
                f"{self.path}: expected a writable file and room for it, got error {error}; "
                "check the directory, its permissions and the free space",
            ) from error

    def _write(self, record: Record) -> None:
        assert self._layout is not None
        with self._io_errors():
            self._layout.add(record)
        self._written.add(record.name)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        with atomic_file(self.path) as file:
            self._layout = LAYOUTS[self.version](file, self._config, self._count)
            try:
                yield
                self._layout.finish()
                file.flush()
                self._check_complete(file.name)
            finally:
                self._layout = None

    def _check_complete(self, temporary: str) -> None:
        if len(self._written) != self._count:
            announced = self._promised or set()
            missing = f"; missing: {', '.join(sorted(announced - self._written)[:3])}"
            self._fail(
                "writer_count",
                "header",
                f"{self._count} tensors as announced, got {len(self._written)}",
                "add every tensor before leaving the block" + (missing if announced else ""),
            )
        # The reader has the last word: catches a record cut short by an error the caller swallowed.
        with typed_errors():
            _runtime.SglbitntFile(os.fsencode(temporary), check_codes=False)

    def __enter__(self) -> Writer:
        self._context = self._session()
        with self._io_errors():
            self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if error is not None:  # the caller's own OSError stays what it is
            return self._context.__exit__(kind, error, trace)
        with self._io_errors():
            return self._context.__exit__(None, None, None)
