"""A 128-bit hash of any number of bytes, on several threads: XXH3-128 of the hashes of chunks.

It finds every accident and every mixed up part; it is no proof against a forger who may choose the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bitnet_ops import _runtime

CHUNK = 4 << 20  # bytes: they fit the caches of the CPU


def of_chunks(head: bytes, hashes: Iterable[bytes]) -> bytes:
    """16 bytes that stand for `head` and chunks with the hashes `hashes`, in order.

    `head` must have a length that is known beforehand, and say how many bytes the chunks have.
    """
    return _runtime.xxh3_128(head + b"".join(hashes))


def each_chunk(size: int, hash_of_chunk: Callable[[int], bytes]) -> list[bytes]:
    """`hash_of_chunk(i)` for each of the chunks of `size` bytes, on torch's number of threads."""
    with ThreadPoolExecutor(max(1, min(8, torch.get_num_threads()))) as pool:
        return list(pool.map(hash_of_chunk, range(-(-size // CHUNK))))


def content_hash(data: Any) -> bytes:
    """16 bytes that stand for the bytes of the buffer `data`."""
    view = memoryview(data)
    chunk = CHUNK

    def hash_of_chunk(index: int) -> bytes:
        return _runtime.xxh3_128(view[chunk * index : chunk * (index + 1)])

    return of_chunks(view.nbytes.to_bytes(8, "little"), each_chunk(view.nbytes, hash_of_chunk))
