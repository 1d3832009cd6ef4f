"""A second plug-in, for the claims only: counts our calls in whichever process makes them.

Counted are apply() of our linear method and steps of a whole decoder as one call; that our paged
attention ran is noted. `announce` makes it an entry point beside bitnet-ops' own. Each process
writes to a file `KIND-<pid>` in BITNET_PROOF_CALLS the number of its calls and the nanoseconds they
took: two mapped numbers, since a worker may be killed without a chance to report, and speed.py
reads them on the way; and to `kinds-<pid>` the kinds of call seen.
"""

from __future__ import annotations

import importlib
import mmap
import os
import struct
import sys
import time
from pathlib import Path

COUNTED = ("apply", "step")


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


def announce(folder, group, modules=("counter",)):
    """Make this module an installed plug-in of the entry points' `group`, for children as well.

    And others of this folder, of which each has an `install`.
    """
    info = folder / "bitnet_ops_proof-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitnet-ops-proof\nVersion: 0\n")
    lines = [f"bitnet_proof_{name} = {name}:install" for name in modules]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for old in [*(f for kind in (*COUNTED, "kinds") for f in folder.glob(f"{kind}-*"))]:
        old.unlink()
    here = str(Path(__file__).resolve().parent)
    path = [str(folder), here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path[:0] = path[:2]
    os.environ["BITNET_PROOF_CALLS"] = str(folder)


def install():
    """Count in this process; called by the engine."""
    from bitnet_ops import ops
    from bitnet_ops.models import Decoder

    engine = os.environ["BITNET_PROOF_ENGINE"]
    quantization = importlib.import_module(f"bitnet_ops.integrations.{engine}.quantization")
    folder, seen = Path(os.environ["BITNET_PROOF_CALLS"]), set()

    def note(kind):
        if kind not in seen:
            seen.add(kind)
            (folder / f"kinds-{os.getpid()}").write_text("\n".join(sorted(seen)))

    def count(cls, name, kind, describe):
        counter, method = Counter(folder / f"{kind}-{os.getpid()}"), getattr(cls, name)

        def counted(self, *args, **kwargs):
            start = time.perf_counter_ns()
            result = method(self, *args, **kwargs)
            counter.add_one(time.perf_counter_ns() - start)
            note(describe(self, *args))
            return result

        setattr(cls, name, counted)

    def linear(_, layer, x, *rest):
        return f"{type(layer).__name__} {x.dim()}-d {x.dtype}"

    def step(self, program, batch, pool):
        return f"step {self.dtype} {pool.key_pool.dtype}"

    count(quantization.BitNetConfig.method, "apply", "apply", linear)
    count(Decoder, "_run", "step", step)  # whether its result is logits or states
    attend = ops.paged_attention

    def noted_attention(query, *args):
        note(f"paged_attention {query.dtype} over {args[0].dtype}")
        return attend(query, *args)

    ops.paged_attention = noted_attention


def read(folder, counted):
    """{pid: (calls, nanoseconds)} of all processes that had the counter."""
    return {
        int(path.name.split("-")[1]): struct.unpack("<QQ", path.read_bytes())
        for path in Path(folder).glob(f"{counted}-*")
    }


def read_kinds(folder):
    """All kinds of call that any process has seen, sorted."""
    lines = [path.read_text().splitlines() for path in Path(folder).glob("kinds-*")]
    return sorted({line for part in lines for line in part})
