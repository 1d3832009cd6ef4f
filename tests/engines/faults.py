"""Faults of SGLang's book-keeping of states, for claims_hybrids.py: each has to show in the tokens.

`install` is an entry point beside bitnet-ops' own (counter.announce). Which fault there is, if any,
says the file BITNET_PROOF_FAULT at every call, so that one engine can be tried with all of them.
"""

from __future__ import annotations

import os
from pathlib import Path

# By the name in the file. "not cleared" is none: a sequence at position 0 begins without a state.
HARMFUL = ("another slot", "one token late", "not copied", "another prefix")
HARMLESS = ("not cleared",)


def install():
    """Plant them in this process."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

    from bitnet_ops.integrations import states

    file = Path(os.environ["BITNET_PROOF_FAULT"])
    slots, copy_from = HybridReqToTokenPool.get_mamba_indices, MambaPool.copy_from
    steps_of, clear_slots = states.steps_of, MambaPool.clear_slots
    calls = 0

    def get_mamba_indices(pool, rows):
        """Now and then that of the neighbour in the batch, or of nobody."""
        nonlocal calls
        found, calls = slots(pool, rows), calls + 1
        if file.read_text() != "another slot" or calls % 5:
            return found
        return found.roll(1) if len(found) > 1 else found % pool.mamba_pool.size + 1

    def late_steps_of(batch, tracks):
        if file.read_text() == "one token late":
            last = batch.seq_lens.tolist()
            tracks = [t._replace(length=min(t.length + 1, last[t.sequence])) for t in tracks]
        return steps_of(batch, tracks)

    def copied_from(pool, source, target):
        fault = file.read_text()
        if fault == "another prefix":
            source = source % pool.size + 1
        if fault != "not copied":
            copy_from(pool, source, target)

    def cleared(pool, indices):
        if file.read_text() != "not cleared":
            clear_slots(pool, indices)

    HybridReqToTokenPool.get_mamba_indices = get_mamba_indices
    MambaPool.copy_from, MambaPool.clear_slots = copied_from, cleared
    states.steps_of = late_steps_of
