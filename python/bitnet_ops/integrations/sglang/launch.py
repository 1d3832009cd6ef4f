"""The command that starts SGLang's server on this project's kernels, and its environment.

On a machine without a GPU SGLang needs arguments, variables and, because no CPU build of
torchvision or sgl_kernel may be there, stand-ins that can be imported (stubs/). It must not import
sglang: a wrong set-up is to be said in a line, not after ten seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitnet_ops import machine
from bitnet_ops.config.families import family_of
from bitnet_ops.config.hybrid import DeltaNet, has_states
from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.integrations import sglang
from bitnet_ops.integrations.sglang.serving import model_of
from bitnet_ops.integrations.states import slot_bytes
from bitnet_ops.nn.storage import KV_TYPES
from bitnet_ops.untrusted import read_json_object
from bitnet_ops.untrusted.bounded import interpreter

logger = logging.getLogger(__name__)

STUBS = Path(__file__).parent / "stubs"
# What a CPU needs; whatever the user says comes behind it and wins.
ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--skip-server-warmup"),
    "--sleep-on-idle",  # a scheduler that polls takes a core from the others, clients among them
    *("--dtype", "float32", "--kv-cache-dtype", "bfloat16"),
    *("--max-running-requests", "32", "--log-level", "warning"),
)
_MAX_TOKENS = 32768  # in the cache of keys and values, where memory allows
# slots of states: SGLang holds so many for a request, at most, of 32 at once, and as many prefixes
_SLOTS_OF_A_REQUEST, _MAX_SLOTS = 5, 2 * 32 * 5
_STRATEGY = "--mamba-radix-cache-strategy"
_FALLBACK = "transformers"  # the module of SGLang that runs what it has no class for


class LaunchError(BitNetError, RuntimeError):
    """SGLang cannot be started here."""


def check_version(allow_untested: bool = False) -> str:
    """The installed version of sglang.

    Raises LaunchError for none, one older than those tested, and a newer one that has not got what
    the plug-in asks for.
    """
    version, tested = sglang.PLUGIN.version(), " or ".join(sglang.PLUGIN.tested)
    if version == "unknown":
        raise LaunchError(
            f"sglang: expected sglang {tested} beside bitnet-ops, got none; docs/guide/sglang.md "
            "says how to install it for a CPU"
        )
    if version not in sglang.PLUGIN.tested and not allow_untested:
        _check_untested(version, tested)
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


def _check_untested(version: str, tested: str) -> None:
    found = version
    if _numbers(version) > _numbers(sglang.PLUGIN.tested[-1]):
        # `register` asks for every part of SGLang that the plug-in needs.
        code = "from bitnet_ops.integrations.sglang import register; register()"
        run = [interpreter(), "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, env=environment(os.environ, []))
        if done.returncode == 0:
            logger.warning("sglang: tested with %s, not with %s; going on", tested, version)
            return
        found = f"{version}, where {(done.stderr.strip().splitlines() or ['it ends'])[-1]}"
    raise LaunchError(
        f"sglang: expected version {tested}, which were tested, got {found}; install one of "
        "them, or add --untested to try"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def ranks(options: Sequence[str]) -> int:
    """How many tensor-parallel ranks SGLang's `options` ask for; what is no number is left to it.

    Raises LaunchError where they ask for none.
    """
    return _count(options, "--tp", "--tp-size", "--tensor-parallel-size")


def copies(options: Sequence[str]) -> int:
    """How many copies of the model, each with ranks of its own, they ask for; else as `ranks`."""
    return _count(options, "--dp", "--dp-size", "--data-parallel-size")


def _count(options: Sequence[str], *names: str) -> int:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument(*names, type=int, default=1, dest="count")
    try:
        found: int = parser.parse_known_args(list(options))[0].count
    except argparse.ArgumentError:
        return 1
    if found < 1:
        raise LaunchError(f"sglang: expected {names[0]} of at least 1, got {found}")
    return found


def check_whole(count: int) -> None:
    """Raise LaunchError for several ranks of a converted model, which is one op a forward."""
    if count > 1:
        raise LaunchError(
            f"sglang: expected --tp 1 for a converted model, got {count}; for a Llama- or "
            "Qwen-type checkpoint folder add --per-layer, else give the one rank more --threads, "
            f"or run the whole model {count} times with --dp {count}"
        )


def check_drafts(options: Sequence[str]) -> None:
    """Raise LaunchError for speculative decoding, which SGLang does by models of its own."""
    asked = [option for option in options if option.startswith("--speculative-")]
    if asked:
        raise LaunchError(
            f"sglang: expected no speculative decoding of a converted model, got {asked[0]}; "
            "SGLang drafts by its own model code alone: leave it out, or use bitnet-ops serve, "
            "which uses the draft head of a model that has one"
        )


def check_checkpoint(folder: Path, count: int) -> None:
    """Raise LaunchError for a checkpoint folder that SGLang's own model code with our linears
    cannot serve on `count` ranks.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise LaunchError(
            f"sglang: expected config.json in {folder} (--per-layer), got none; leave out "
            "--per-layer for other forms of a model"
        )
    config = read_json_object(file)
    if has_states(config):
        raise LaunchError(
            f"sglang: expected a model whose layers all have attention (--per-layer), got "
            f"{config.get('model_type')!r} in {file}: SGLang's own code for recurrent layers needs "
            "its kernels for AMX, which no package has. Leave out --per-layer; for several ranks "
            "of the whole model add -- --dp 2"
        )
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method != sglang.METHOD:
        raise LaunchError(
            f"sglang: expected quant_method '{sglang.METHOD}' in {file} (--per-layer), got "
            f"{method!r}; leave out --per-layer, which converts the model"
        )
    if isinstance(settings, dict) and settings.get("use_rms_norm"):
        raise LaunchError(
            f"sglang: expected use_rms_norm false in {file} (--per-layer), got true: SGLang's "
            "model code has no norm inside a projection; leave out --per-layer"
        )
    if count > 1:
        _check_split(config, count)


def _check_split(config: Mapping[str, object], count: int) -> None:
    """Raise LaunchError for a model that does not fall into `count` equal ranks."""
    family = family_of(config)
    if family is not None and family.sub_norms:
        raise LaunchError(
            f"sglang: expected --tp 1 for {family.classes[0]}, got {count}; its sub-norms are "
            "means over all heads and the whole intermediate size, of which a rank holds a part: "
            "give the one rank more --threads"
        )
    heads = config.get("num_attention_heads")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = config.get(key, heads)
        if not isinstance(size, int):
            continue  # SGLang, or our loader, says it
        # fewer key/value heads than ranks are held twice and more
        whole = size % count == 0 or (key == "num_key_value_heads" and count % size == 0)
        if not whole:
            raise LaunchError(
                f"sglang: expected {key} to divide evenly over --tp {count}, got {size}; SGLang "
                "would pad it, and packed weights cannot be padded: choose another --tp"
            )


def _imports(module: str) -> bool:
    """Whether `module` can be imported, tried in a process of its own."""
    if importlib.util.find_spec(module) is None:
        return False
    done = subprocess.run([interpreter(), "-c", f"import {module}"], capture_output=True)
    return done.returncode == 0


def stub_paths() -> list[str]:
    """The folders of the stand-ins that this environment needs."""
    needed = {"torchvision": "vision", "sgl_kernel": "kernels"}
    return [str(STUBS / folder) for module, folder in needed.items() if not _imports(module)]


def _sources() -> Path | None:
    """The folder sglang/srt, found without importing sglang; None where it is not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "srt"


def _unused_models(architectures: Sequence[str]) -> list[str]:
    """SGLang's modules without a model class of these names, found without importing sglang."""
    sources = _sources()
    if sources is None:
        return []
    folder = sources / "models"
    defined = re.compile("|".join(rf"^class {re.escape(name)}\b" for name in architectures), re.M)
    return [
        file.stem
        for file in sorted(folder.glob("*.py"))
        if file.stem not in ("__init__", _FALLBACK)
        and not (architectures and defined.search(file.read_text(encoding="utf-8")))
    ]


def architectures(folder: Path) -> list[str]:
    """The model classes that the config.json of `folder` names."""
    found = read_json_object(folder / "config.json").get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _cpus_of_ranks(count: int) -> list[list[int]]:
    """The processors of each rank; there are fewer of them than ranks where some share one."""
    cpus = sorted(machine.affinity())
    each = max(1, len(cpus) // count)
    return [[cpus[(rank * each + i) % len(cpus)] for i in range(each)] for rank in range(count)]


def environment(base: Mapping[str, str], classes: Sequence[str], count: int = 1) -> dict[str, str]:
    """`base` with what SGLang needs on a CPU to serve a model of one of these classes on `count`
    ranks.

    Other models are left out: importing all 200 takes half of a start. Ranks share the processors,
    which SGLang does not do by itself within a NUMA node.
    """
    env = dict(base)
    path = [*stub_paths(), *filter(None, [env.get("PYTHONPATH")])]
    if path:
        env["PYTHONPATH"] = os.pathsep.join(path)
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    env.setdefault("HF_HUB_OFFLINE", "1")  # everything lies on this machine already
    env[sglang.ATTENTION_VARIABLE] = "1"
    env.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_unused_models(classes)))
    if count > 1:
        parts = _cpus_of_ranks(count)
        bound = "|".join(",".join(map(str, part)) for part in parts)
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)
        env.setdefault("OMP_NUM_THREADS", str(len(parts[0])))
    return env


def _tokens_in_memory(file: Path) -> int:
    """How many tokens' keys and values in bfloat16 there is memory for; `file`: the config.json."""
    try:
        config = model_of(read_json_object(file))
    except BitNetError:  # whoever loads the model says it
        return _MAX_TOKENS
    layers, budget = config.num_hidden_layers, machine.cache_budget()
    if (net := config.delta_net) is not None:
        layers -= len(net.layers)
        budget -= _slots_in_memory(net) * slot_bytes(net)
    rows = 2 * layers * config.num_key_value_heads
    found = budget // (rows * KV_TYPES["bfloat16"].row_bytes(config.head_dim))
    return max(1, min(_MAX_TOKENS, found))


def _slots_in_memory(net: DeltaNet) -> int:
    """How many slots of states there are, in half of what caches may take."""
    found = machine.cache_budget() // (2 * slot_bytes(net))
    return max(_SLOTS_OF_A_REQUEST, min(_MAX_SLOTS, found))


def _states(file: Path, options: Sequence[str]) -> list[str]:
    """What a hybrid needs; `file`: the config.json.

    States inside of prompts, where this SGLang can be brought to ask for them: so a prompt that
    begins as another has begun is continued, where states at the ends of prompts would not do.
    """
    try:
        net = model_of(read_json_object(file)).delta_net
    except BitNetError:
        return []
    if net is None:
        return []
    words = ["--max-mamba-cache-size", str(_slots_in_memory(net))]
    given, sources = {option.split("=")[0] for option in options}, _sources()
    hook = None if sources is None else sources / "arg_groups" / "mamba_hook.py"
    if given.isdisjoint((_STRATEGY, "--disable-radix-cache")) and hook and hook.is_file():
        if f"def {sglang.PLATFORM_CHECK}(" in hook.read_text(encoding="utf-8"):
            words += [_STRATEGY, "extra_buffer"]
    return words


def _answers(model: Path, options: Sequence[str]) -> list[str]:
    """What JSON and tool calls need, of what this SGLang has and `options` do not decide.

    Small models write blanks without end where a grammar allows any. SGLang finds the parser of
    tool calls by the chat template itself where it is asked to.
    """
    sources, given = _sources(), {option.split("=")[0] for option in options}
    if sources is None:
        return []
    files = [sources / "server_args.py", *sorted((sources / "arg_groups").rglob("*.py"))]
    known = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    compact, parser = "--constrained-json-disable-any-whitespace", "--tool-call-parser"
    found = []
    decided = given & {compact, "--constrained-json-whitespace-pattern"}
    if not decided and re.search(r"constrained[-_]json[-_]disable[-_]any[-_]whitespace", known):
        found.append(compact)
    automatic = re.search(r'"auto"\] \+ tool_call_parser_choices', known)
    if parser not in given and automatic and "tools" in (_chat_template(model) or ""):
        found += [parser, "auto"]
    return found


def _chat_template(model: Path) -> str | None:
    try:
        return Tokenizer.from_dir(model).chat_template
    except (BitNetError, OSError):  # whoever loads it says it
        return None


def command(model: Path, name: str, options: Sequence[str] = ()) -> list[str]:
    """The words that start the server of the folder `model` under `name`; `options` win."""
    fixed = ["--model-path", str(model), "--served-model-name", name, *ARGUMENTS]
    fixed += ["--max-total-tokens", str(_tokens_in_memory(model / "config.json"))]
    fixed += _states(model / "config.json", options)
    fixed += _answers(model, options)
    return [interpreter(), "-m", "sglang.launch_server", *fixed, *options]
