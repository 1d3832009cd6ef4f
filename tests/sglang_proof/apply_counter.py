"""A second SGLang plug-in, for the proof only: counts our calls in whichever process makes them.

Counted are apply() of a linear, and the step of a whole model; that our attention ran is noted.

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
    """Wrap BitNetLinearMethod.apply, Decoder.step and paged_attention of this process."""
    from bitnet_ops import ops
    from bitnet_ops.integrations.sglang.linear import BitNetLinearMethod
    from bitnet_ops.models import Decoder

    folder = Path(os.environ["BITNET_PROOF_DIR"])
    counter = Counter(folder / f"apply-{os.getpid()}")
    apply, step, seen = BitNetLinearMethod.apply, Decoder.step, set()

    def write_kinds():
        (folder / f"layers-{os.getpid()}").write_text("\n".join(sorted(seen)))

    def count(kind):
        counter.add_one()
        if kind not in seen:
            seen.add(kind)
            write_kinds()

    def counted(self, layer, *args, **kwargs):
        result = apply(self, layer, *args, **kwargs)
        count(f"{type(layer).__name__} {args[0].dim()}-d {args[0].dtype}")
        return result

    def counted_step(self, batch, pool):
        logits = step(self, batch, pool)
        count(f"{type(self).__name__}.step {self.dtype} over {pool.key_pool.dtype}")
        return logits

    attend = ops.paged_attention

    def counted_attention(query, *args):
        kind = f"paged_attention {query.dtype} over {args[0].dtype}"
        if kind not in seen:
            seen.add(kind)
            write_kinds()
        return attend(query, *args)

    BitNetLinearMethod.apply, Decoder.step = counted, counted_step
    ops.paged_attention = counted_attention


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
