"""A fork in a process whose threads others than our ops used, or that Python is not told of.

Each case is a process of its own, since a pool of threads is for ever. Forks after our own regions
are test_threads.py's.
"""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import ctypes, os, signal, sys, torch
torch.set_num_threads(2)
from bitnet_ops import _runtime, ops
x, scale = torch.ones(64, 1024), torch.ones(1)
weight = torch.full((2048, 256), 0x55, dtype=torch.uint8)
wide = torch.ones(2_000_000)
def finish(pid, body):
    if pid == 0:
        signal.alarm(60)  # its default action ends the process
        status = 1
        try:
            status = 0 if body() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(body: str) -> tuple[str, str]:
    command = [sys.executable, "-c", PRELUDE + body]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return child.stdout, child.stderr


def test_a_pool_that_only_torch_has_used_hangs_no_child() -> None:
    """The child has threads of its own, of which it uses all, and nothing to be told."""
    out, err = run("""
assert (wide + wide).sum() == 4_000_000
assert len(os.listdir("/proc/self/task")) > 1 and _runtime.region_count() == 0
def body():
    ours = ops.linear(x, weight, scale).eq(0).all()  # code 1 is the weight 0
    return ours and _runtime.region_count() > 0 and (wide + wide).sum() == 4_000_000
print(finish(os.fork(), body), finish(os.fork(), body))
print((wide + wide).sum().item(), torch.get_num_threads())
""")
    assert (out, err) == ("0 0\n4000000.0 2\n", "")


def test_other_threads_than_one_in_the_child_of_a_used_pool_are_refused() -> None:
    """torch's own operations, between ours, would wait for ever."""
    out, err = run("""
import bitnet_ops
model = bitnet_ops.load()
expected = str(model.generate("The", max_new_tokens=3))
def body():
    torch.set_num_threads(3)
    for call in (lambda: model.generate("The"), lambda: model.model(torch.tensor([[1]]))):
        try:
            call()
        except RuntimeError as error:
            assert "to stay 1 in a process forked from one" in str(error), error
        else:
            return False
    torch.set_num_threads(1)
    return str(model.generate("The", max_new_tokens=3)) == expected
print(finish(os.fork(), body))
""")
    assert out == "0\n" and err.count("\n") <= 1


def test_a_fork_behind_pythons_back_is_noticed() -> None:
    """As a server in C makes it: no hook of Python runs, and our own pool was used before."""
    out, err = run("""
ops.linear(x, weight, scale)
assert _runtime.region_count() > 0
def body():
    regions = _runtime.region_count()
    some = ops.linear(x, weight, scale)[0, :8]  # little: torch itself does not know of the fork
    return some.eq(0).all() and _runtime.region_count() == regions
print(finish(ctypes.PyDLL(None).fork(), body))
""")
    assert out == "0\n"
    assert err.count("bitnet_ops: this process was forked") == 1 and err.count("\n") == 1


def test_a_fork_inside_another_thread() -> None:
    """The forking thread has no pool of its own; the main thread's is no concern of the child's."""
    out, err = run("""
import threading
(wide + wide).sum()
codes = []
def body():
    return ops.linear(x, weight, scale).eq(0).all()
thread = threading.Thread(target=lambda: codes.append(finish(os.fork(), body)))
thread.start()
thread.join()
print(codes)
""")
    assert (out, err) == ("[0]\n", "")
