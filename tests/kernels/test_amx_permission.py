"""The process asks for AMX tiles when an ISA that needs them is chosen, and not before.

On a CPU without AMX there is nothing to ask for, whatever is forced.
"""

from __future__ import annotations

import os
import subprocess
import sys

from bitnet_ops import _runtime

HAS_AMX = bool(_runtime.cpu_features().get("amx_tile"))
WHO_NEEDS_TILES = {row["isa"] for row in _runtime.kernel_table() if "amx_tile" in row["required"]}


def states(isa: str, *after: str) -> list[str]:
    """amx_permission() of a new process at its start, after its first choice, and after `after`."""
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bitnet_ops._runtime", sys.argv[1])
runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
print(runtime.amx_permission())
runtime.cpu_features(), runtime.available_isas(), runtime.kernel_table(), runtime.isa()
print(runtime.amx_permission())
for name in sys.argv[2:]:
    runtime.force_isa(name)
    assert runtime.isa() == name
    print(runtime.amx_permission())
"""
    command = [sys.executable, "-c", code, _runtime.__file__, *after]
    environment = {**os.environ, "BITNET_OPS_ISA": isa}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return run.stdout.splitlines()


def test_a_forced_isa_without_tiles_asks_for_nothing() -> None:
    unasked = "not requested" if HAS_AMX else "none"
    for isa in sorted(set(_runtime.available_isas()) - WHO_NEEDS_TILES):
        assert states(isa) == [unasked, unasked], isa


def test_it_is_asked_for_when_it_is_chosen() -> None:
    chosen = [isa for isa in _runtime.available_isas() if isa in WHO_NEEDS_TILES]
    if HAS_AMX and chosen:
        assert states("", "scalar") == ["not requested", "granted", "granted"]
        assert states("scalar", *chosen) == ["not requested", "not requested", "granted"]
    else:  # also the emulated kernels, which need nothing of the CPU
        asked = "not requested" if HAS_AMX else "none"
        assert states("", *_runtime.available_isas()) == [asked] * (
            2 + len(_runtime.available_isas())
        )
