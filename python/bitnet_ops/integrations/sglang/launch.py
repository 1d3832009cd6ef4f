"""The command that starts SGLang's server on this project's kernels, and its environment.

On a machine without a GPU SGLang needs arguments, variables and, because no CPU build of
torchvision or sgl_kernel may be there, stand-ins that can be imported (stubs/). It must not import
sglang: a wrong set-up is to be said in a line, not after ten seconds.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitnet_ops.integrations import sglang

STUBS = Path(__file__).parent / "stubs"
# What a CPU needs; whatever the user says comes behind it and wins.
ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--skip-server-warmup"),
    "--sleep-on-idle",  # a scheduler that polls takes a core from the others, clients among them
    *("--dtype", "float32", "--kv-cache-dtype", "bfloat16"),
    *("--max-total-tokens", "32768", "--max-running-requests", "32"),
    *("--log-level", "warning"),
)
# Models of SGLang that others of its modules count on; importing all 200 takes half of a start.
_KEPT_MODELS = ("llama", "qwen2", "qwen3", "transformers", "registry", "utils")


class LaunchError(RuntimeError):
    """SGLang cannot be started here."""


def check_version(allow_untested: bool = False) -> str:
    """The installed version of sglang. Raises LaunchError for none, or one that was not tested."""
    version, tested = sglang.sglang_version(), " or ".join(sglang.TESTED_VERSIONS)
    if version == "unknown":
        raise LaunchError(
            f"sglang: expected sglang {tested} beside bitnet-ops, got none; docs/sglang.md says "
            "how to install it for a CPU"
        )
    if version not in sglang.TESTED_VERSIONS and not allow_untested:
        raise LaunchError(
            f"sglang: expected version {tested}, which were tested, got {version}; install one of "
            "them, or add --untested to try"
        )
    status = sglang.status()
    if not status["active"]:
        raise LaunchError(
            "sglang: expected the plug-in to be active, got "
            + (
                f"SGLANG_PLUGINS={status['SGLANG_PLUGINS']} without bitnet; add it or unset it"
                if status["entry_point"]
                else "no entry point; install bitnet-ops with pip into the environment of sglang"
            )
        )
    return version


def _imports(module: str) -> bool:
    """Whether `module` can be imported, tried in a process of its own."""
    if importlib.util.find_spec(module) is None:
        return False
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
    return done.returncode == 0


def stub_paths() -> list[str]:
    """The folders of the stand-ins that this environment needs."""
    needed = {"torchvision": "vision", "sgl_kernel": "kernels"}
    return [str(STUBS / folder) for module, folder in needed.items() if not _imports(module)]


def _unused_models() -> list[str]:
    """SGLang's models that no model of ours needs, found without importing sglang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt" / "models"
    names = [module.name for module in pkgutil.iter_modules([str(folder)])]
    return [name for name in names if name not in _KEPT_MODELS]


def environment(base: Mapping[str, str], *, whole: bool) -> dict[str, str]:
    """`base` with what SGLang needs on a CPU. `whole`: it serves a converted model and no other."""
    env = dict(base)
    path = [*stub_paths(), *filter(None, [env.get("PYTHONPATH")])]
    if path:
        env["PYTHONPATH"] = os.pathsep.join(path)
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    env.setdefault("HF_HUB_OFFLINE", "1")  # everything lies on this machine already
    env[sglang.ATTENTION_VARIABLE] = "1"
    if whole:
        env.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_unused_models()))
    return env


def command(model: Path, name: str, options: Sequence[str] = ()) -> list[str]:
    """The words that start the server of the folder `model` under `name`; `options` win."""
    fixed = ["--model-path", str(model), "--served-model-name", name, *ARGUMENTS]
    return [sys.executable, "-m", "sglang.launch_server", *fixed, *options]
