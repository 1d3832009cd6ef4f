"""PEP 517 backend: scikit-build-core plus one decision, which torch to compile against.

Build isolation hides the user's torch, and a plain ``requires = ["torch"]`` would download another
one. ``_ops.so`` uses only torch's stable C interface, so any torch >= 2.10 will do; this module
finds one without importing it, in this order:

1. the environment variable BITNET_TORCH_ROOT (the directory of the ``torch`` package);
2. torch visible to this process (``--no-build-isolation``, or installed by step 4);
3. torch of the interpreter behind pip's isolated build environment;
4. none: ``torch==2.13.0`` (BITNET_TORCH_REQUIREMENT overrides it) joins the build requirements. An
   exact version, because a range would take the newest build, often a CUDA one of several GB.

A wheel is built in the same folder as an editable install, whose object files it shares. Afterwards
the folder is configured again as it was, for pip's isolated environment, which it then names, is
gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import scikit_build_core
from scikit_build_core import build as _skbuild
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

TORCH_FLOOR = (2, 10)
DEFAULT_REQUIREMENT = "torch==2.13.0"
_STABLE_HEADER = Path("include/torch/csrc/stable/library.h")

# Runs in this process or in a child; finds torch without importing it (an import takes seconds).
_PROBE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("torch")
root = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    version = None
result = {"root": root, "version": version}
"""


@dataclass(frozen=True)
class Torch:
    """A torch installation: ``root`` is its package directory, ``why`` says where it was found."""

    root: Path
    version: str
    why: str


class TorchNotUsable(RuntimeError):
    """Raised with one line that names what was found and what to do."""


def _say(message: str) -> None:
    print(f"bitnet-ops build: {message}", file=sys.stderr, flush=True)


def _probe_here() -> dict[str, str | None]:
    scope: dict[str, dict[str, str | None]] = {}
    exec(_PROBE, scope)  # the same text as in the child process, so that both find the same thing
    return scope["result"]


def _probe_outside() -> dict[str, str | None]:
    """Ask the interpreter again, without the variables by which pip hides its site-packages."""
    hidden = {"PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    with tempfile.TemporaryDirectory() as elsewhere:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE + "print(json.dumps(result))"],
            env=env,
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode != 0:
        return {"root": None, "version": None}
    found: dict[str, str | None] = json.loads(child.stdout)
    return found


def _version_in(root: Path) -> str:
    """The version of the torch in ``root``, read from its version.py."""
    text = (root / "version.py").read_text(encoding="utf-8")
    scope: dict[str, str] = {}
    exec(text, scope)
    return scope["__version__"]


def _problem(root: Path, version: str) -> str | None:
    """Why this torch cannot be built against, or None."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < TORCH_FLOOR:
        return f"torch {version} is older than {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}"
    for needed in (_STABLE_HEADER, Path("lib/libtorch_cpu.so")):
        if not (root / needed).is_file():
            return f"torch {version} at {root} lacks {needed}"
    return None


def find_torch() -> Torch | None:
    """The torch to build against, or None when there is none that is usable."""
    named = os.environ.get("BITNET_TORCH_ROOT")
    if named:
        root = Path(named)
        if not (root / "version.py").is_file():
            raise TorchNotUsable(
                "BITNET_TORCH_ROOT: expected the directory of an installed torch package "
                f"(with version.py), got {named}"
            )
        version = _version_in(root)
        if problem := _problem(root, version):
            raise TorchNotUsable(f"BITNET_TORCH_ROOT: {problem}; install torch>=2.10 there")
        return Torch(root, version, "BITNET_TORCH_ROOT")
    for probe, why in (
        (_probe_here, "visible to the build"),
        (_probe_outside, "installed in the environment outside build isolation"),
    ):
        found = probe()
        if not found["root"] or not found["version"]:
            continue
        root, version = Path(found["root"]), found["version"]
        if problem := _problem(root, version):
            _say(f"ignoring {problem}")
            continue
        return Torch(root, version, why)
    return None


def _torch_requirement() -> list[str]:
    """What to add to the build requirements: nothing when a usable torch is there."""
    torch = find_torch()
    if torch is not None:
        _say(f"will use torch {torch.version} ({torch.why})")
        return []
    requirement = os.environ.get("BITNET_TORCH_REQUIREMENT", DEFAULT_REQUIREMENT)
    _say(f"no usable torch found; adding {requirement} to the build requirements")
    return [requirement]


def _select_torch() -> None:
    """Tell CMake, through the environment, which torch to use; one clear line either way."""
    torch = find_torch()
    if torch is None:
        raise TorchNotUsable(
            "expected an installed torch >= 2.10 to build against, found none; "
            f"run: pip install {DEFAULT_REQUIREMENT}"
        )
    _say(f"building against torch {torch.version} at {torch.root} ({torch.why})")
    os.environ["BITNET_TORCH_ROOT"] = str(torch.root)


_OWN = re.compile(r"^(pybind11_DIR|Python_EXECUTABLE):\w+=(.+)$", re.MULTILINE)
_INFO = ".skbuild-info.json"
_CMAKE = re.compile(r"^CMAKE_COMMAND:\w+=(.+)$", re.MULTILINE)


@contextlib.contextmanager
def _trees_left_as_they_were(folder: Path) -> Iterator[None]:
    """Let a build use the trees of this Python in `folder`, and leave them as they were.

    scikit-build-core throws the object files away where it is imported from another place than the
    last time, as in each isolated environment: it is told that it is the same, and CMake looks for
    everything again. Afterwards a tree is configured as before, if its environment is still there.
    """
    found = {}
    for info in folder.glob(f"cp{sys.version_info.major}{sys.version_info.minor}-*/{_INFO}"):
        cache = info.with_name("CMakeCache.txt")
        if cache.is_file():
            found[info] = said, text = info.read_text("utf-8"), cache.read_text("utf-8")
            here = os.fspath(Path(scikit_build_core.__file__).resolve().parent)
            if json.loads(said).get("skbuild_path") != here:
                info.write_text(json.dumps({**json.loads(said), "skbuild_path": here}), "utf-8")
                cache.unlink()
    try:
        yield
    finally:
        for info, (said, text) in found.items():
            cache, owner = info.with_name("CMakeCache.txt"), dict(_OWN.findall(text))
            now = dict(_OWN.findall(cache.read_text("utf-8"))) if cache.is_file() else {}
            if owner != now and owner and all(Path(path).exists() for path in owner.values()):
                info.write_text(said, "utf-8")
                cache.write_text(text, "utf-8")
                command = [*_CMAKE.findall(text), str(info.parent)]
                subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*_skbuild.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*_skbuild.get_requires_for_build_editable(config_settings), *_torch_requirement()]


def build_wheel(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    _select_torch()
    with _trees_left_as_they_were(Path("build")):
        return _skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    _select_torch()
    return _skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
