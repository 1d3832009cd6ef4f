"""A second vLLM plug-in, for the proof only: counts our work in whichever process does it.

vllm_l4.py makes it an entry point beside bitnet-ops' own. Each process counts the calls of our
linear method's apply() in `apply-<pid>` and those of the whole decoder in `step-<pid>` of
BITNET_PROOF_DIR (mapped counters: a worker may be killed without a chance to report).
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sglang_proof"))

from apply_counter import Counter  # noqa: E402


def count_calls(cls, name, path):
    """Wrap method `name` of `cls` in a counter at `path`."""
    counter, method = Counter(path), getattr(cls, name)

    def counted(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        counter.add_one()
        return result

    setattr(cls, name, counted)


def install():
    """Count in this process."""
    from bitnet_ops.integrations.vllm.quantization import VLLMLinearMethod
    from bitnet_ops.models.decoder import Decoder

    folder = Path(os.environ["BITNET_PROOF_DIR"])
    count_calls(VLLMLinearMethod, "apply", folder / f"apply-{os.getpid()}")
    count_calls(Decoder, "step", folder / f"step-{os.getpid()}")


def read_counts(folder, kind):
    """{pid: calls} of all processes that had the counter; kind: "apply" or "step"."""
    return {
        int(path.name.split("-")[1]): struct.unpack_from("<Q", path.read_bytes())[0]
        for path in Path(folder).glob(f"{kind}-*")
    }
