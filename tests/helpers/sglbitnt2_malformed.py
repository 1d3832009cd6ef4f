"""The table of malformed version 2 files: name -> (bytes, the code of the rule each breaks).

Every row is one mistake in an otherwise right file, with right checksums unless they are the
mistake. The tests enumerate it.
"""

from __future__ import annotations

import struct
from typing import Any

from sglbitnt2_bytes import Tensor, file

PACKED = Tensor()
DENSE = Tensor(b"n", 1, (2,))
GROUPS = Tensor(b"g", 0, (2, 200), kind=3, scale_dtype=2)
ROWS = Tensor(b"r", 0, (2, 200), kind=2)
LARGEST = 2**31 - 1
GOOD = file(PACKED, DENSE, GROUPS)
WIDE = b"{" + b" " * 62 + b"}"  # a config without a gap behind it


def one(**fields: Any) -> bytes:
    return file(Tensor(**fields))


def dense(**fields: Any) -> bytes:
    return file(Tensor(**{"name": b"n", "dtype": 1, "dims": (2,), **fields}))


def grouped(**fields: Any) -> bytes:
    return file(Tensor(**{"dims": (2, 200), "kind": 3, **fields}))


def patched(at: int, value: bytes) -> bytes:
    """GOOD with bytes changed and no checksum made right."""
    return GOOD[:at] + value + GOOD[at + len(value) :]


HEADER = {
    "v2_header_alone": (GOOD[:63], "truncated"),
    "v2_cut_by_one_byte": (GOOD[:-1], "file_length"),
    "v2_trailing_byte": (file(PACKED, tail=b"\0"), "file_length"),
    "v2_length_too_small": (file(PACKED, length=64), "file_length"),
    "v2_length_2_64": (file(PACKED, length=2**64 - 1), "file_length"),
    "v2_header_bit": (patched(13, b"\1"), "header_checksum"),
    "v2_header_sum_0": (file(PACKED, header_sum=0), "header_checksum"),
    "v2_reserved": (file(PACKED, reserved=1), "reserved"),
    "v2_config_offset_0": (file(PACKED, config_offset=0), "offset"),
    "v2_config_offset_odd": (file(PACKED, config_offset=129), "offset"),
    "v2_config_offset_2_63": (file(PACKED, config_offset=2**63), "offset"),
    "v2_config_offset_beyond": (file(PACKED, config_offset=2**20), "offset"),
    "v2_config_empty": (file(PACKED, config=b""), "config_length"),
    "v2_config_length_too_large": (file(PACKED, config_length=2**20 + 1), "config_length"),
    "v2_config_beyond_the_file": (file(PACKED, config_length=2**20), "truncated"),
    "v2_index_beyond_the_file": (file(config_length=3)[:-62], "file_length"),
    "v2_config_sum": (file(PACKED, config_sum=1), "config_checksum"),
    "v2_config_bit": (file(PACKED).replace(b"{}", b"[]"), "config_checksum"),
    "v2_config_latin_1": (file(config=b'{"a":"\xe9"}'), "config_utf8"),
    "v2_config_array": (file(config=b"[]"), "config_json"),
    "v2_private_block_2": (
        file(config=b'{"bitnet_ops":{"format_version":2}}'), "private_block"),
    "v2_index_sum": (file(PACKED, index_sum=1), "index_checksum"),
    "v2_index_bit": (file(DENSE).replace(b"\1\0\0\0n\1", b"\1\0\0\0m\1"), "index_checksum"),
    "v2_gap_before_the_index": (file(config=b"{}", gap=b"\1"), "padding_bytes"),
    "v2_count_0_with_tensors": (file(PACKED, count=0), "trailing_bytes"),
    "v2_count_one_too_many": (file(PACKED, DENSE, count=3), "tensor_count"),
    "v2_count_2_32": (file(PACKED, count=2**32 - 1), "tensor_count"),
    "v2_index_tail": (file(PACKED, index_tail=b"\0"), "trailing_bytes"),
    "v2_index_cut": (file(Tensor(b"n" * 99), Tensor(b"n" * 9, name_length=999)), "truncated"),
}  # fmt: skip

FIELDS = {
    "v2_name_empty": (one(name=b""), "name_length"),
    "v2_name_latin_1": (one(name=b"\xe9"), "name_utf8"),
    "v2_name_escape": (one(name=b"\x1b[2J"), "name_control"),
    "v2_name_twice": (file(PACKED, PACKED), "name_duplicate"),
    "v2_dtype_4": (one(dtype=4, kind=0, dims=(1,)), "dtype"),
    "v2_packed_ndim_1": (one(ndim=1), "ndim"),
    "v2_dense_ndim_0": (dense(ndim=0), "ndim"),
    "v2_packed_k_0": (one(dims=(1, 0), data=b"\x55" * 32), "dim"),
    "v2_dim_2_31": (dense(dims=(2**31,), data=b""), "dim"),
    "v2_product_overflows": (dense(dims=(LARGEST,) * 8, data=b""), "size_overflow"),
    "v2_scale_kind_4": (one(kind=4), "scale_kind"),
    "v2_packed_without_scale": (one(kind=0), "scale_missing"),
    "v2_dense_with_scale": (dense(kind=1), "scale_unexpected"),
    "v2_scale_zero": (one(scale=0.0), "scale_value"),
    "v2_scale_nan": (one(scale=float("nan")), "scale_value"),
    "v2_scale_dtype_3": (grouped(scale_dtype=3), "scale_dtype"),
    "v2_scale_dtype_0": (file(Tensor(kind=2, scale_dtype=0)), "scale_dtype"),
    "v2_group_size_32": (grouped(group_size=32), "group_size"),
    "v2_group_size_0": (grouped(group_size=0), "group_size"),
    "v2_offset_0": (one(offset=0), "offset"),
    "v2_offset_unaligned": (one(offset=65), "offset"),
    "v2_offset_of_another": (file(PACKED, Tensor(b"b", offset=64)), "offset"),
    "v2_scales_over_data": (grouped(scales_offset=64), "offset"),
    "v2_hole_before_the_config": (file(Tensor(data=b"\x55" * 65, nbytes=32)), "offset"),
    "v2_byte_length": (one(nbytes=31), "size_mismatch"),
    "v2_rows_for_another_k": (one(dims=(1, 129), data=b"\x55" * 32), "size_mismatch"),
    "v2_scales_for_another_k": (grouped(scales=bytes(8)), "size_mismatch"),
    "v2_exabytes_claimed": (
        one(dims=(LARGEST, LARGEST), data=b"", nbytes=LARGEST * 32 * 2**24), "truncated"),
    "v2_data_beyond_the_config": (dense(dims=(64,), data=bytes(64), nbytes=256), "truncated"),
    "v2_scales_beyond_the_config": (
        grouped(dims=(99, 128), scales=bytes(4), scales_nbytes=396), "truncated"),
}  # fmt: skip

F16_INF, F16_NAN = struct.pack("<e", float("inf")), b"\1\x7e"
DATA = {
    "v2_data_bit": (patched(64, b"\x54"), "data_checksum"),
    "v2_data_sum_0": (one(checksum=0), "data_checksum"),
    "v2_dense_sum": (dense(checksum=1), "data_checksum"),
    "v2_scales_sum": (grouped(scales_checksum=1), "data_checksum"),
    "v2_code_3": (one(data=b"\x57" + b"\x55" * 31), "invalid_code"),
    "v2_dense_nan": (dense(data=struct.pack("<2f", 0, float("nan"))), "non_finite"),
    "v2_padding_code": (one(dims=(1, 127), data=b"\x55" * 31 + b"\x56"), "padding_code"),
    "v2_padding_code_row_2": (
        one(dims=(2, 100), data=b"\x55" * 63 + b"\x54"), "padding_code"),
    "v2_gap_after_data": (file(PACKED, gap=b"\x55", config=WIDE), "padding_bytes"),
    "v2_gap_after_dense": (file(DENSE, gap=b"\1", config=WIDE), "padding_bytes"),
    "v2_gap_after_scales": (
        file(Tensor(dims=(2, 128), kind=2), gap=b"\1", config=WIDE),
        "padding_bytes"),
    "v2_group_scale_infinite": (
        grouped(scale_dtype=2, scales=bytes(6) + F16_INF), "scale_value"),
    "v2_group_scale_nan": (grouped(scale_dtype=2, scales=F16_NAN * 4), "scale_value"),
    "v2_group_scale_minus_zero": (grouped(scales=struct.pack("<4f", 0, 1, -0.0, 1)), "scale_value"),
    "v2_group_scale_negative": (
        grouped(scale_dtype=2, scales=struct.pack("<4e", 1, 1, 1, -1)), "scale_value"),
    "v2_group_scale_subnormal": (grouped(scales=struct.pack("<4I", 0, 1, 0, 0)), "scale_value"),
    "v2_row_scale_nan": (
        file(Tensor(dims=(1, 128), kind=2, scales=struct.pack("<f", float("nan")))), "scale_value"),
}  # fmt: skip

MALFORMED2: dict[str, tuple[bytes, str]] = HEADER | FIELDS | DATA
