"""What the reader and the writer of SGLBITNT share: limits, the error type, the config.

The rules are FORMAT.md's; those about bytes are enforced in csrc/format when reading.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from bitnet_ops import _runtime
from bitnet_ops.formats.coded_error import CodedError

MAGIC = b"SGLBITNT"
VERSIONS = (1, 2)
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1024
MAX_DIMS = 8
MAX_DIM = 2**31 - 1
ROW_BLOCK_BYTES = 32  # a packed row is a number of blocks of 32 bytes, 128 weights each
ROW_BLOCK_WEIGHTS = 128
GROUP_SIZES = (128, 64)  # weights along K that may share a scale
PRIVATE_BLOCK = "bitnet_ops"
PRIVATE_VERSION = 1  # of the block "bitnet_ops" in the config

DTYPES = {torch.uint8: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class SglbitntError(CodedError):
    """A file or an argument that breaks a rule of FORMAT.md.

    `code`: the rule's short name as FORMAT.md lists it, e.g. "truncated" or "scale_value".
    """


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Errors of the C++ reader as SglbitntError."""
    try:
        yield
    except _runtime.FormatError as error:
        raise SglbitntError(error.code, str(error)) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key[:MAX_NAME_BYTES]!r} twice")
        out[key] = value
    return out


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, which no float64 holds")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text}, which JSON does not have")


def parse_config(text: str, where: str) -> dict[str, Any]:
    """The config as a dict; strict JSON: one object, no key twice, no NaN, no lone surrogate."""
    try:
        config = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_float=_finite_float,
            parse_constant=_no_constant,
        )
        json.dumps(config, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise SglbitntError(
            "config_json",
            f"{where}: header: expected the config as strict JSON, got {error}; "
            "the file is damaged: convert the model again",
        ) from None
    _check_config(config, where)
    return config


def _check_config(config: Any, where: str) -> None:
    """A JSON object whose private block, if there is one, is of the version known here."""
    if not isinstance(config, dict):
        raise SglbitntError(
            "config_json",
            f"{where}: header: expected the config as a JSON object, got {type(config).__name__}; "
            "the file is damaged: convert the model again",
        )
    if PRIVATE_BLOCK not in config:
        return
    block = config[PRIVATE_BLOCK]
    version = block.get("format_version") if isinstance(block, dict) else None
    if type(version) is not int or version != PRIVATE_VERSION:
        raise SglbitntError(
            "private_block",
            f'{where}: header: expected "bitnet_ops" in the config with format_version '
            f"{PRIVATE_VERSION}, got {block!r:.80}; convert the model again, or use the release "
            "that wrote the file",
        )


def config_bytes(config: dict[str, Any], where: str) -> bytes:
    """The config as it goes into the file; rejected unless reading it back gives the same dict."""
    _check_config(config, where)
    try:
        text = json.dumps(config, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = text.encode()
        if json.loads(text) != config:
            raise ValueError("keys or values that JSON changes (non-string keys, tuples)")
    except (TypeError, ValueError, RecursionError) as error:
        raise SglbitntError(
            "config_json",
            f"{where}: header: expected the config as strict JSON, got {error}; "
            "pass what json.load() gave",
        ) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise SglbitntError(
            "config_length",
            f"{where}: header: expected a config length of 1 to {MAX_CONFIG_BYTES} bytes, "
            f"got {len(data)}; remove what the model does not need",
        )
    return data
