"""A second SGLang plug-in, for the proof only: counts our apply() in whichever process calls it.

l4_engine.py makes it an entry point beside bitnet-ops' own. Each process writes its calls to a file
`apply-<pid>` in BITNET_PROOF_DIR: a mapped 8-byte counter, since a scheduler may be killed without
a chance to report, and `layers-<pid>` with the kinds of layer and input seen.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path


class Counter:
    """A counter in a shared mapping of a file."""

    def __init__(self, path):
        self.file = open(path, "w+b")
        self.file.write(bytes(8))
        self.file.flush()
        self.map = mmap.mmap(self.file.fileno(), 8)

    def add_one(self):
        (value,) = struct.unpack("<Q", self.map[:])
        self.map[:] = struct.pack("<Q", value + 1)


def install():
    """Wrap BitNetLinearMethod.apply of this process."""
    from bitnet_ops.integrations.sglang.linear import BitNetLinearMethod

    folder = Path(os.environ["BITNET_PROOF_DIR"])
    counter = Counter(folder / f"apply-{os.getpid()}")
    apply, seen = BitNetLinearMethod.apply, set()

    def counted(self, layer, *args, **kwargs):
        result = apply(self, layer, *args, **kwargs)
        counter.add_one()
        kind = f"{type(layer).__name__} {args[0].dim()}-d {args[0].dtype}"
        if kind not in seen:
            seen.add(kind)
            (folder / f"layers-{os.getpid()}").write_text("\n".join(sorted(seen)))
        return result

    BitNetLinearMethod.apply = counted


def read_counts(folder):
    """{pid: calls} of all processes that had the counter."""
    return {
        int(path.name.split("-")[1]): struct.unpack("<Q", path.read_bytes())[0]
        for path in Path(folder).glob("apply-*")
    }


def read_kinds(folder):
    """All kinds of layer and input that any process has seen, sorted."""
    lines = [path.read_text().splitlines() for path in Path(folder).glob("layers-*")]
    return sorted({line for part in lines for line in part})
