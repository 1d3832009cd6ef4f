"""The table of malformed model files: name -> (bytes, the code of the rule each breaks).

Every row is one mistake in an otherwise right file. The tests enumerate it.
"""

from __future__ import annotations

import struct

from sglbitnt_bytes import file, tensor, u32

NAN, INF = float("nan"), float("inf")
F32_NAN, F32_INF = struct.pack("<f", NAN), struct.pack("<f", -INF)
PACKED, DENSE = tensor(), tensor(b"n", 1, (2,))
LARGEST = 2**31 - 1
HUGE = {"above_2_31": 2**31 + 1, "minus_one": 2**32 - 1}


def private(block: str) -> bytes:
    return b'{"bitnet_ops":' + block.encode() + b"}"


HEADER = {
    "empty_file": (b"", "truncated"),
    "half_a_magic": (b"SGLB", "truncated"),
    "zeros": (bytes(64), "magic"),
    "gguf": (b"GGUF" + bytes(60), "magic"),
    "magic_in_lower_case": (file(PACKED, magic=b"sglbitnt"), "magic"),
    "magic_of_a_later_format": (file(PACKED, magic=b"SGLBITN2"), "magic"),
    "magic_shifted_by_one_byte": (b"\n" + file(PACKED), "magic"),
    "version_0": (file(PACKED, version=0), "version"),
    "version_3": (file(PACKED, version=3), "version"),
    "version_big_endian": (file(PACKED, version=1 << 24), "version"),
    "version_minus_one": (file(PACKED, version=-1), "version"),
    "config_empty": (file(PACKED, config=b""), "config_length"),
    "config_length_over_the_limit": (file(PACKED, config=b" " * (2**20 + 1)), "config_length"),
    "config_length_beyond_the_file": (file(config_length=2**20), "truncated"),
    "config_length_one_too_long": (file(config_length=3), "truncated"),
    "config_length_one_too_short": (file(config_length=1), "tensor_count"),
    "config_latin_1": (file(config=b'{"a":"\xe9"}'), "config_utf8"),
    "config_utf8_cut": (file(config=b'{}\xe2\x82'), "config_utf8"),
    "config_utf8_surrogate": (file(config=b'{"a":"\xed\xa0\x80"}'), "config_utf8"),
    "count_0_with_tensors": (file(PACKED, count=0), "trailing_bytes"),
    "count_one_too_few": (file(PACKED, DENSE, count=1), "trailing_bytes"),
    "count_one_too_many": (file(PACKED, count=2), "truncated"),
    "count_more_than_bytes_allow": (file(PACKED, count=4), "tensor_count"),
    "count_over_the_limit": (
        file(*(tensor(b"%x" % i, 2, (1,)) for i in range(65537))), "tensor_count"),
    "trailing_byte": (file(PACKED, tail=b"\0"), "trailing_bytes"),
    "trailing_second_file": (file(PACKED, tail=file(PACKED)), "trailing_bytes"),
    "trailing_zip_polyglot": (file(PACKED, tail=b"PK\5\6" + bytes(18)), "trailing_bytes"),
} | {
    f"{field}_{name}": (file(PACKED, **{field: value}), code)
    for name, value in HUGE.items()
    for field, code in (("config_length", "config_length"), ("count", "tensor_count"))
}  # fmt: skip

CONFIG = {
    name: (file(PACKED, config=config), "config_json")
    for name, config in {
        "config_not_json": b"model_type: bitnet",
        "config_array": b"[]",
        "config_string": b'"bitnet"',
        "config_null": b"null",
        "config_blank": b"  \n",
        "config_two_objects": b"{}{}",
        "config_cut_object": b'{"a":1',
        "config_trailing_comma": b'{"a":1,}',
        "config_comment": b'{"a":1} // x',
        "config_byte_order_mark": b"\xef\xbb\xbf{}",
        "config_zero_byte": b"{}\0",
        "config_key_twice": b'{"a":1,"a":2}',
        "config_inner_key_twice": b'{"a":[{"b":1,"b":1}]}',
        "config_nan": b'{"a":NaN}',
        "config_minus_infinity": b'{"a":-Infinity}',
        "config_number_beyond_float64": b'{"a":1e999}',
        "config_number_of_5000_digits": b'{"a":' + b"9" * 5000 + b"}",
        "config_lone_surrogate": b'{"a":"\\ud800"}',
        "config_nested_100000_deep": b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}",
    }.items()
} | {
    f"private_block_{name}": (file(PACKED, config=private(block)), "private_block")
    for name, block in {
        "version_2": '{"format_version":2}',
        "version_0": '{"format_version":0}',
        "version_minus_one": '{"format_version":-1}',
        "version_string": '{"format_version":"1"}',
        "version_float": '{"format_version":1.0}',
        "version_true": '{"format_version":true}',
        "version_missing": '{"source_mode":"online"}',
        "list": '[{"format_version":1}]',
        "null": "null",
        "bare_version": "1",
    }.items()
}

NAMES = {
    "name_empty": (file(tensor(b"")), "name_length"),
    "name_of_1025_bytes": (file(tensor(b"n" * 1025)), "name_length"),
    "name_length_beyond_the_file": (file(tensor(name_length=1000)), "truncated"),
    "name_twice": (file(PACKED, PACKED), "name_duplicate"),
    "name_twice_far_apart": (
        file(PACKED, *(tensor(b"t%d" % i, 2, (1,)) for i in range(99)), tensor(b"w", 1, (1,))),
        "name_duplicate"),
} | {
    f"name_length_{name}": (file(tensor(name_length=value)), "name_length")
    for name, value in HUGE.items()
} | {
    f"name_utf8_{name}": (file(tensor(text)), "name_utf8")
    for name, text in {
        "latin_1": b"caf\xe9.weight",
        "overlong_slash": b"a\xc0\xafb",
        "overlong_zero": b"a\xe0\x80\x80",
        "surrogate": b"a\xed\xbf\xbf",
        "above_10ffff": b"\xf4\x90\x80\x80",
        "lone_continuation": b"a\x80",
        "cut": b"a\xf0\x9f\x98",
        "five_byte_form": b"\xf8\x88\x80\x80\x80",
    }.items()
} | {
    f"name_control_{name}": (file(tensor(text)), "name_control")
    for name, text in {
        "zero_byte": b"a\0b",
        "newline": b"a\nb",
        "terminal_escape": b"\x1b[2J",
        "delete": b"a\x7f",
        "c1_next_line": b"a\xc2\x85",
    }.items()
}  # fmt: skip

SHAPES = {
    "dtype_4": (file(tensor(dtype=4)), "dtype"),
    "dtype_256": (file(tensor(dtype=256)), "dtype"),
    "dtype_minus_one": (file(tensor(dtype=-1)), "dtype"),
    "packed_ndim_0": (file(tensor(b"weight", dims=())), "ndim"),
    "packed_ndim_1": (file(tensor(dims=(32,))), "ndim"),
    "packed_ndim_3": (file(tensor(dims=(1, 1, 32))), "ndim"),
    "dense_ndim_0": (file(tensor(b"weight", 1, (), bytes(4))), "ndim"),
    "dense_ndim_9": (file(tensor(b"n", 1, (1,) * 9)), "ndim"),
    "ndim_above_2_31": (file(tensor(b"n", 1, (2,), ndim=2**31 + 1)), "ndim"),
    "ndim_minus_one": (file(tensor(ndim=-1)), "ndim"),
    "packed_no_rows": (file(tensor(dims=(0, 32))), "dim"),
    "packed_no_columns": (file(tensor(dims=(1, 0))), "dim"),
    "dense_dim_0": (file(tensor(b"n", 1, (2, 0))), "dim"),
    "dim_minus_one": (file(tensor(b"weight", 1, (-1,), b"")), "dim"),
    "dim_2_31": (file(tensor(b"weight", 1, (2**31,), b"")), "dim"),
    "packed_rows_of_31_bytes": (file(tensor(dims=(1, 31))), "packed_shape"),
    "packed_rows_of_48_bytes": (file(tensor(dims=(2, 48))), "packed_shape"),
    "packed_rows_of_1_byte": (file(tensor(dims=(32, 1))), "packed_shape"),
}

SCALES = {
    "has_scale_2": (file(tensor(has_scale=2)), "has_scale"),
    "has_scale_256": (file(tensor(has_scale=256)), "has_scale"),
    "has_scale_minus_one": (file(tensor(has_scale=-1)), "has_scale"),
    "has_scale_2_on_a_dense_tensor": (file(tensor(b"n", 1, (2,), has_scale=2)), "has_scale"),
    "packed_without_scale": (file(tensor(has_scale=0)), "scale_missing"),
} | {
    f"scale_on_a_dense_tensor_of_dtype_{dtype}": (
        file(tensor(b"n", dtype, (2,), has_scale=1)), "scale_unexpected")
    for dtype in (1, 2, 3)
} | {
    f"scale_{name}": (file(tensor(scale=scale)), "scale_value")
    for name, scale in {
        "zero": 0.0,
        "minus_zero": -0.0,
        "negative": -1.5,
        "nan": NAN,
        "nan_with_payload": u32(0xFFC12345),
        "infinite": INF,
        "minus_infinite": -INF,
        "subnormal": u32(1),
        "largest_subnormal": u32(0x007FFFFF),
    }.items()
}  # fmt: skip

SIZES = {
    "byte_length_one_short": (file(tensor(nbytes=31)), "size_mismatch"),
    "byte_length_one_long": (file(tensor(nbytes=33)), "size_mismatch"),
    "byte_length_0": (file(tensor(nbytes=0)), "size_mismatch"),
    "byte_length_counts_elements": (file(tensor(b"n", 1, (8,), nbytes=8)), "size_mismatch"),
    "byte_length_2_63": (file(tensor(nbytes=2**63)), "size_mismatch"),
    "byte_length_minus_one": (file(tensor(nbytes=2**64 - 1)), "size_mismatch"),
    "dims_swapped_against_data": (file(tensor(dims=(32, 32), data=b"\x55" * 32)), "size_mismatch"),
    "data_one_byte_short": (file(tensor(data=b"\x55" * 31, nbytes=32)), "truncated"),
    "data_missing": (file(tensor(data=b"", nbytes=32)), "truncated"),
    # the byte size wraps to 0, which the byte length then matches
    "cve_2026_33298_product_wraps_to_0": (
        file(tensor(b"n", 1, (2**30, 2**30, 4), b"", nbytes=0)), "size_overflow"),
    # 2^62 + 1 elements of 4 bytes: wraps to the 4 bytes that are there
    "cve_2026_33298_product_wraps_to_the_data": (
        file(tensor(b"n", 1, (2147418113, 429509837, 5), bytes(4))), "size_overflow"),
    "cve_2026_33298_eight_largest_dims": (
        file(tensor(b"n", 3, (LARGEST,) * 8, bytes(8))), "size_overflow"),
    "cve_2026_33298_exabytes_claimed": (
        file(tensor(dims=(LARGEST, 2**31 - 32), data=b"\x55" * 32,
                    nbytes=LARGEST * (2**31 - 32))), "truncated"),
    # undersized heap, then a read of the claimed size
    "cve_2026_27940_claim_beyond_the_file": (
        file(tensor(b"n", 1, (2**30,), bytes(4096), nbytes=2**32)), "truncated"),
    # right in the low 32 bits only
    "cve_2025_49847_byte_length_plus_2_32": (file(tensor(nbytes=2**32 + 32)), "size_mismatch"),
    "cve_2025_49847_elements_2_32": (
        file(tensor(b"n", 1, (2**16, 2**16), b"", nbytes=0)), "size_mismatch"),
    "cve_2025_53630_sizes_sum_past_2_64": (
        file(tensor(b"a", 3, (LARGEST, LARGEST), b"", nbytes=2 * LARGEST**2),
             tensor(b"b", 3, (LARGEST, LARGEST), b"", nbytes=2 * LARGEST**2)), "truncated"),
}  # fmt: skip

DATA = {
    "code_3_first_byte": (file(tensor(data=b"\xd5" + b"\x55" * 31)), "invalid_code"),
    "code_3_last_byte": (file(tensor(data=b"\x55" * 31 + b"\x57")), "invalid_code"),
    "code_3_third_field": (file(tensor(data=b"\x55" * 9 + b"\x5d" + b"\x55" * 22)), "invalid_code"),
    "code_3_everywhere": (file(tensor(data=b"\xff" * 32)), "invalid_code"),
    "code_3_in_the_last_tensor": (
        file(PACKED, DENSE, tensor(b"z", data=b"\x55" * 16 + b"\x75" * 16)), "invalid_code"),
    "f32_nan_first": (file(tensor(b"n", 1, (3,), F32_NAN + bytes(8))), "non_finite"),
    "f32_infinity_last": (file(tensor(b"n", 1, (3,), bytes(8) + F32_INF)), "non_finite"),
    "f32_nan_with_sign_and_payload": (
        file(tensor(b"n", 1, (9,), bytes(32) + u32(0xFFBADBAD))), "non_finite"),
    "f16_infinity": (file(tensor(b"n", 2, (3,), b"\0\0\0\x7c\0\0")), "non_finite"),
    "f16_nan_last": (file(tensor(b"n", 2, (3,), b"\0\0\0\0\x01\xfc")), "non_finite"),
    "bf16_infinity": (file(tensor(b"n", 3, (3,), b"\x80\x7f\0\0\0\0")), "non_finite"),
    "bf16_nan_last": (file(tensor(b"n", 3, (5,), bytes(8) + b"\xc0\xff")), "non_finite"),
}  # fmt: skip

MALFORMED: dict[str, tuple[bytes, str]] = HEADER | CONFIG | NAMES | SHAPES | SCALES | SIZES | DATA
