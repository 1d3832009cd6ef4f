"""XXH3-128 and the hash of chunks, against the package `xxhash`, which is written by others.

Every length that has a form of its own, then around blocks and chunks.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import xxhash

from bitnet_ops import _runtime
from bitnet_ops.formats import content_hash
from bitnet_ops.formats.content_hash import CHUNK

# Every length up to a block and a few stripes more, then some around further blocks (1024 bytes).
LENGTHS = [*range(1200), 2047, 2048, 2049, 4096, 65536 + 63, 65536 + 64, 65536 + 65, (1 << 20) + 1]


def test_every_length_hashes_as_the_package_does() -> None:
    data = random.Random(1).randbytes(LENGTHS[-1])
    for length in LENGTHS:
        assert _runtime.xxh3_128(data[-length:] if length else b"") == xxhash.xxh3_128_digest(
            data[-length:] if length else b""
        ), length


@pytest.mark.parametrize("byte", [0, 0x80, 0xFF])
def test_bytes_that_are_all_alike(byte: int) -> None:
    for length in LENGTHS:
        data = bytes([byte]) * length
        assert _runtime.xxh3_128(data) == xxhash.xxh3_128_digest(data), length


def test_unaligned_memory_and_other_buffers() -> None:
    data = random.Random(2).randbytes(5000)
    for start in range(16):
        view = memoryview(data)[start:]
        assert _runtime.xxh3_128(view) == xxhash.xxh3_128_digest(view)
    array = np.frombuffer(data, dtype=np.uint8)
    assert _runtime.xxh3_128(array) == xxhash.xxh3_128_digest(data)
    with pytest.raises(ValueError, match="expected contiguous bytes in one dimension"):
        _runtime.xxh3_128(array[::2])
    with pytest.raises(ValueError, match="expected contiguous bytes in one dimension"):
        _runtime.xxh3_128(np.frombuffer(data, dtype=np.int32))


def tree(data: bytes) -> bytes:
    chunks = [data[at : at + (4 << 20)] for at in range(0, len(data), 4 << 20)]
    head = len(data).to_bytes(8, "little")
    return xxhash.xxh3_128_digest(head + b"".join(map(xxhash.xxh3_128_digest, chunks)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_the_hash_of_chunks(length: int, threads: int) -> None:
    data = random.Random(3).randbytes(length)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert content_hash.content_hash(data) == tree(data)
    finally:
        torch.set_num_threads(before)


def test_chunks_that_change_places_are_another_content() -> None:
    a, b = bytes(CHUNK), b"\x01" * CHUNK
    hashes = {content_hash.content_hash(data) for data in (a + b, b + a, a, a + a, a + a + a)}
    assert len(hashes) == 5
