"""Loads the compiled op library into torch, so that `torch.ops.bitnet.*` exists.

Importing this module is what does it: once in a process, at the first import of `bitnet_ops.ops`,
which every module that computes imports. It must not know what the ops are.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import torch

# The first release whose stable C ABI has everything the op library calls (torch_parallel_for).
MINIMUM_TORCH = (2, 10)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _build_text() -> str:
    """How and for what the binaries were built, as far as the torch-free `_runtime` can tell."""
    try:
        info = importlib.import_module("bitnet_ops._runtime").build_info()
    except (ImportError, OSError) as error:
        return f"the module _runtime could not be loaded either: {error}"
    return "built with " + ", ".join(f"{key} {value}" for key, value in info.items())


def _load_op_library() -> None:
    """Load `_ops.so` into torch; an ImportError names the cause and the remedy."""
    floor = ".".join(map(str, MINIMUM_TORCH))
    if _torch_version() < MINIMUM_TORCH:
        raise ImportError(
            f"bitnet_ops: expected torch >= {floor}, got torch {torch.__version__} "
            f"from {torch.__file__}; upgrade torch ({_build_text()})"
        )
    # Not beside __file__: in an editable install the binaries live in site-packages while the
    # Python files stay in the source tree. `_ops` has no PyInit, so it is never imported.
    spec = importlib.util.find_spec("bitnet_ops._ops")
    if spec is None or spec.origin is None:
        raise ImportError(
            "bitnet_ops: expected the compiled op library bitnet_ops/_ops.so beside the package, "
            f"got nothing in {Path(__file__).parent}; the package was not built for this Python: "
            "run `pip install .` (or `pip install -e . --no-build-isolation`) in the project"
        )
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise ImportError(
            f"bitnet_ops: expected the op library {spec.origin} to load into torch "
            f"{torch.__version__}, got: {error}; it needs torch >= {floor} ({_build_text()}); "
            "rebuild with `pip install .`"
        ) from error


_forked = False


def check_threads_after_fork() -> None:
    """Raise RuntimeError where torch would wait for threads that a fork did not copy."""
    if _forked and torch.get_num_threads() > 1:
        raise RuntimeError(
            "bitnet_ops: expected torch.get_num_threads() to stay 1 in a process forked from one "
            f"that had used its threads, got {torch.get_num_threads()}: it would wait for ever for "
            "threads that a fork does not copy; call torch.set_num_threads(1), or start processes "
            "with the 'spawn' method"
        )


def _after_fork_in_child() -> None:
    """A fork copies no threads: a parallel region would wait for the parent's for ever.

    So where the parent had used them, ops and torch itself run on the calling thread; the first op
    that would have wanted more says so.
    """
    global _forked
    if importlib.import_module("bitnet_ops._runtime").mark_forked():
        torch.set_num_threads(1)
        _forked = True


_load_op_library()
os.register_at_fork(after_in_child=_after_fork_in_child)
