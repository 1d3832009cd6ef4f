"""A second SGLang plug-in, for the proof only: counts our calls in whichever process makes them.

Counted are apply() of a linear, and the step of a whole model; that our attention ran is noted.

l4_engine.py makes it an entry point beside bitnet-ops' own. Each process writes its calls, and the
nanoseconds they took, to a file `apply-<pid>` in BITNET_PROOF_DIR: two mapped numbers, since a
scheduler may be killed without a chance to report, and speed_engine.py reads them on the way; and
`layers-<pid>` with the kinds of layer and input seen.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path


class Counter:
    """Calls and their nanoseconds in a shared mapping of a file."""

    def __init__(self, path):
        self.file = open(path, "w+b")
        self.file.write(bytes(16))
        self.file.flush()
        self.map = mmap.mmap(self.file.fileno(), 16)

    def add_one(self, ns=0):
        calls, total = struct.unpack("<QQ", self.map[:])
        self.map[:] = struct.pack("<QQ", calls + 1, total + ns)


def install():
    """Wrap Method.apply, Decoder.step and paged_attention of this process."""
    from bitnet_ops import ops
    from bitnet_ops.integrations.sglang.quantization import SGLangLinearMethod as Method
    from bitnet_ops.models import Decoder

    folder = Path(os.environ["BITNET_PROOF_DIR"])
    counter = Counter(folder / f"apply-{os.getpid()}")
    apply, step, seen = Method.apply, Decoder.step, set()

    def write_kinds():
        (folder / f"layers-{os.getpid()}").write_text("\n".join(sorted(seen)))

    def count(kind, start):
        counter.add_one(time.perf_counter_ns() - start)
        if kind not in seen:
            seen.add(kind)
            write_kinds()

    def counted(self, layer, *args, **kwargs):
        start = time.perf_counter_ns()
        result = apply(self, layer, *args, **kwargs)
        count(f"{type(layer).__name__} {args[0].dim()}-d {args[0].dtype}", start)
        return result

    def counted_step(self, batch, pool):
        start = time.perf_counter_ns()
        logits = step(self, batch, pool)
        count(f"{type(self).__name__}.step {self.dtype} over {pool.key_pool.dtype}", start)
        return logits

    attend = ops.paged_attention

    def counted_attention(query, *args):
        kind = f"paged_attention {query.dtype} over {args[0].dtype}"
        if kind not in seen:
            seen.add(kind)
            write_kinds()
        return attend(query, *args)

    Method.apply, Decoder.step = counted, counted_step
    ops.paged_attention = counted_attention


def read_counts(folder):
    """{pid: calls} of all processes that had the counter."""
    return {pid: calls for pid, (calls, _) in read_times(folder).items()}


def read_times(folder):
    """{pid: (calls, nanoseconds)} of all processes that had the counter."""
    return {
        int(path.name.split("-")[1]): struct.unpack("<QQ", path.read_bytes())
        for path in Path(folder).glob("apply-*")
    }


def read_kinds(folder):
    """All kinds of layer and input that any process has seen, sorted."""
    lines = [path.read_text().splitlines() for path in Path(folder).glob("layers-*")]
    return sorted({line for part in lines for line in part})
