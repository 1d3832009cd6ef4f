"""Climbs the ladder of the SGLang integration with the real package, for scripts/prove_sglang.

L2: the real linear classes (l2_layers.py). L4: the real engine (l4_engine.py) against transformers
(oracle.py), our calls counted inside the spawned scheduler. L5: the launcher's HTTP server and the
`openai` client (l5_server.py). L6, with --speed: tokens per second (speed_engine.py). L0 and L1
are in the ordinary suite.
Prints versions, rungs, the token comparison, calls and times; exit status 1 if a rung fails.
Standard library only: torch and the rest live in the proof's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from environment import HERE, ROOT, Environment, ProofError, run_logged

DEMO = ROOT / "tests" / "data" / "demo-model"
CONVERTED = ROOT / "python" / "bitnet_ops" / "data" / "demo"  # the same model as a model.bin
STUBS = ROOT / "python" / "bitnet_ops" / "integrations" / "sglang" / "stubs"
START = time.monotonic()
# Name, checkpoint, dtype, SGLang's model_impl, ternary linears a layer as that model has them, how
# many prompts and new tokens. The first is the linear method with our attention; the second a
# converted model, in one op a forward (no linear is asked); the third the other stored form,
# through SGLang's fallback to transformers' model, in the dtype that servers use.
ENGINE_RUNS = (
    ("packed-fp32", "packed", "float32", "auto", 4, 8, 48),
    ("whole-fp32", "converted", "float32", "auto", 0, 8, 48),
    ("online-bf16", "online", "bfloat16", "transformers", 7, 4, 24),
)
# In bfloat16 two right programs differ by some per cent of the largest logit (about 10 here); a
# token may differ only where transformers' own lead is below that. In float32 none may: these
# prompts were chosen for their leads (the smallest is 0.04).
ALLOWED_LEAD = {"float32": 0.0, "bfloat16": 0.3}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


def child_environment(stubs: bool) -> dict[str, str]:
    """os.environ without what would lead a child astray; no network at run time."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_PLUGINS", "SGLANG_PLATFORM")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Threads that spin while they wait take the cores from each other where the machine is shared:
    # generating then took 14 times as long (25.3 s against 1.8 s).
    env |= {"OMP_WAIT_POLICY": "passive"}
    if stubs:
        folders = os.pathsep.join(str(STUBS / name) for name in ("vision", "kernels"))
        env |= {"PYTHONPATH": folders, "SGLANG_USE_CPU_ENGINE": "1"}
        env |= {"BITNET_OPS_SGLANG_ATTENTION": "1"}
    return env


class Ladder:
    """The rungs, run in an environment; results are collected for the report."""

    def __init__(self, environment: Environment):
        self.env, self.work = environment, environment.work
        self.report: dict = {"failed": []}

    def script(self, name: str, log: str, *arguments, stubs: bool = True, timeout: float = 900):
        command = [self.env.python, HERE / name, *arguments]
        return run_logged(command, self.work / f"{log}.log", timeout, child_environment(stubs))

    def facts(self) -> dict:
        command = [self.env.python, HERE / "facts.py"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=child_environment(stubs=False),
            cwd=self.work,
        )
        if done.returncode:
            raise ProofError(f"facts.py failed:\n{done.stderr}")
        facts = json.loads(done.stdout)
        if (
            facts["torch_cuda"]
            or facts["nvidia_packages"]
            or "torch" not in facts["torch_distributions"]
        ):
            raise ProofError(
                f"expected a CPU build of torch and no nvidia packages, got torch {facts['torch']} "
                f"and {facts['nvidia_packages']}; set BITNET_TORCH_INDEX to the CPU wheel index"
            )
        if not facts["installed_in_environment"]:
            raise ProofError("expected bitnet_ops to be the one installed in the environment")
        return facts

    def rung(self, name: str, climb) -> None:
        try:
            climb()
        except ProofError as error:
            self.report["failed"].append(name)
            say(f"FAILED {name}: {error}")

    def layers(self) -> None:
        """L2"""
        result = self.work / "l2.json"
        result.unlink(missing_ok=True)
        try:
            seconds = self.script("l2_layers.py", "l2", result)
        finally:
            if result.exists():
                self.report["L2"] = json.loads(result.read_text())
                for line in self.report["L2"]["lines"]:
                    say(f"  L2 {line}")
        say(f"L2 reached: the real linear classes, {seconds:.0f} s")

    def checkpoints(self) -> dict[str, Path]:
        packed = self.work / "packed"
        self.script("pack_offline.py", "pack", DEMO, packed, stubs=False)
        return {"packed": packed, "online": DEMO, "converted": self.serving(CONVERTED, "stored")}

    def serving(self, model: Path, head: str = "int8") -> Path:
        """The folder that the launcher would make of a converted model."""
        folder = self.work / f"serving-{model.name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.script("serving_folder.py", f"serving-{model.name}", model, folder, head, stubs=False)
        return folder

    def oracle(
        self, name: str, checkpoint: Path, dtype: str, expected: list[dict], count: int
    ) -> Path:
        """transformers' greedy tokens for some prompts of the demo model's expected.json."""
        prompts, result = self.work / "prompts.json", self.work / f"oracle-{name}.json"
        cases = [{"prompt": c["prompt"], "draft": c["greedy_ids"]} for c in expected]
        prompts.write_text(json.dumps(cases))
        arguments = (checkpoint, prompts, result, dtype, count)
        seconds = self.script("oracle.py", f"oracle-{name}", *arguments, stubs=False)
        say(f"  L4 {name}: transformers' tokens, {seconds:.0f} s")
        if dtype == "float32":
            for case, recorded in zip(
                json.loads(result.read_text())["cases"], expected, strict=True
            ):
                if case["tokens"] != recorded["greedy_ids"][:count]:
                    raise ProofError(f"transformers departs from expected.json: {case['prompt']!r}")
        return result

    def engine(self, run: tuple, checkpoints: dict[str, Path], expected: list[dict]) -> None:
        """L4"""
        name, source, dtype, model_impl, linears, prompts, count = run
        source_of_truth = DEMO if source == "converted" else checkpoints[source]
        oracle = self.oracle(name, source_of_truth, dtype, expected[:prompts], count)
        result, folder = self.work / f"l4-{name}.json", self.work / f"plugin-{name}"
        result.unlink(missing_ok=True)
        arguments = (checkpoints[source], oracle, result, folder, model_impl, dtype)
        seconds = self.script("l4_engine.py", f"l4-{name}", *arguments)
        report = self.report[f"L4 {name}"] = json.loads(result.read_text())
        layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
        judge_tokens(name, report)
        judge_calls(name, report, linears * layers or 1)
        if linears and not any(kind.startswith("paged_attention") for kind in report["kinds"]):
            raise ProofError(f"expected our attention, got {report['kinds']}")
        say(
            f"L4 reached ({name}): engine start {report['engine_start_s']} s, generation "
            f"{report['generate_s']} s, {seconds:.0f} s in all"
        )

    def server(self, expected: list[dict]) -> None:
        """L5"""
        result = self.work / "l5.json"
        result.unlink(missing_ok=True)
        case = self.work / "l5-expected.json"
        case.write_text(json.dumps(expected[0]))
        # Without the stand-ins: what the launcher starts has to have its own.
        arguments = (CONVERTED, case, result)
        seconds = self.script("l5_server.py", "l5", *arguments, stubs=False)
        report = self.report["L5"] = json.loads(result.read_text())
        say(
            f"L5 reached: bitnet-ops sglang ready after {report['ready_s']} s; {report['checked']} "
            f"answered the openai client, {seconds:.0f} s in all"
        )

    def speed(self, name: str) -> None:
        """L6: tokens per second of a synthetic model in SGLang, in our engine, and of SGLang's
        own bfloat16 on a Llama of the same dimensions."""
        model, bf16 = self.work / f"dummy-{name}", self.work / f"bf16-{name}"
        if not (model / "model.bin").exists():
            words = [self.env.python, "-m", "bitnet_ops", "dummy", name, model]
            run_logged(words, self.work / "dummy.log")
        folder = self.serving(model)
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config |= {"hidden_act": "silu", "torch_dtype": "bfloat16"}
        bf16.mkdir(exist_ok=True)
        (bf16 / "config.json").write_text(json.dumps(config))
        rows: dict[str, dict[str, float]] = {}
        for label, paths in (("l6-ours", (folder, model)), ("l6-bf16", (bf16,))):
            result = self.work / f"{label}.json"
            result.unlink(missing_ok=True)
            self.script("speed_engine.py", label, result, *paths, timeout=3600)
            rows |= json.loads(result.read_text())
        self.report["L6"] = rows
        for line in table_of_speed(rows):
            say(f"  L6 {line}")
        say(f"L6 reached: tokens per second of {name}, random weights, the same tokens of both")


def table_of_speed(rows: dict[str, dict[str, float]]) -> list[str]:
    """A line for each engine, and the share of our engine's speed that is left in SGLang."""
    columns = list(rows["own engine"])
    lines = ["tokens per second".ljust(22) + "".join(c.rjust(12) for c in columns)]
    for name, row in rows.items():
        lines.append(name.ljust(22) + "".join(f"{row[c]:12.2f}" for c in columns))
    ours, own = rows["SGLang, ours in it"], rows["own engine"]
    lines.append(
        "share of own engine".ljust(22) + "".join(f"{ours[c] / own[c]:12.2f}" for c in columns)
    )
    return lines


def judge_tokens(name: str, report: dict) -> None:
    """Every token equal up to the first difference, which must be a near-tie of transformers."""
    rows = report["prompts"]
    same, total = sum(row["same"] for row in rows), sum(row["of"] for row in rows)
    whole = sum(row["same"] == row["of"] for row in rows)
    say(
        f"  L4 {name}: {whole} of {len(rows)} continuations equal to transformers, {same} of "
        f"{total} tokens before the first difference; transformers' smallest lead "
        f"{min(row['smallest_lead'] for row in rows)}"
    )
    allowed = ALLOWED_LEAD[report["dtype"]]
    for row in rows:
        lead = row["lead_at_difference"]
        if lead is not None:
            say(f"     {row['prompt']!r} differs at token {row['same']}, where the lead is {lead}")
        if not row["prompt_ids_equal"] or (lead is not None and lead > allowed):
            raise ProofError(f"expected transformers' tokens, got {row}")
    if 2 * same < total:
        raise ProofError(f"expected at least half of the tokens before a near-tie, got {same}")


def judge_calls(name: str, report: dict, per_forward: int) -> None:
    """apply() ran in exactly one other process, the scheduler, once a linear and forward."""
    own = str(report["own_pid"])
    elsewhere = {pid: n for pid, n in report["apply_calls"].items() if pid != own and n}
    here = report["apply_calls"].get(own, 0)
    text = f"{elsewhere} in spawned processes, {here} in the parent; {', '.join(report['kinds'])}"
    say(f"  L4 {name}: apply() calls {text}")
    tokens = report["prompts"][0]["of"]
    ok = len(elsewhere) == 1 and here == 0
    ok = ok and all(n % per_forward == 0 and n >= tokens * per_forward for n in elsewhere.values())
    if not ok:
        raise ProofError(
            f"expected apply() in one spawned process, {per_forward} calls for each of at least "
            f"{tokens} forwards, got {text}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove_sglang", description=__doc__.split("\n")[0])
    work = ROOT / "build" / "sglang"
    default = os.environ.get("BITNET_SGLANG_VENV", work / "venv")
    parser.add_argument("--venv", type=Path, default=default, help="default: build/sglang/venv")
    parser.add_argument("--work", type=Path, default=work, help="logs, checkpoints, report.json")
    parser.add_argument(
        "--speed", metavar="NAME", nargs="?", const="2b-4t", help="L6 too, of a synthetic model"
    )
    return parser.parse_args()


def climb(ladder: Ladder, speed: str | None = None) -> None:
    expected = json.loads((DEMO / "expected.json").read_text())["cases"]
    ladder.rung("L2", ladder.layers)
    checkpoints = ladder.checkpoints()
    for run in ENGINE_RUNS:
        ladder.rung(f"L4 {run[0]}", lambda run=run: ladder.engine(run, checkpoints, expected))
    ladder.rung("L5", lambda: ladder.server(expected))
    if speed:
        ladder.rung("L6", lambda: ladder.speed(speed))
    ladder.facts()  # torch is still the CPU build after all that was imported and spawned


def main() -> int:
    options = arguments()
    environment = Environment(options.venv.resolve(), options.work.resolve())
    ladder = Ladder(environment)
    try:
        environment.ensure(say)
        facts = ladder.report["facts"] = ladder.facts()
        say(
            "python {python}, torch {torch}, sglang {sglang}, transformers {transformers}, "
            "bitnet-ops {bitnet_ops} on {isa}; no nvidia package".format(**facts)
        )
        climb(ladder, options.speed)
    except ProofError as error:
        ladder.report["failed"].append("set-up")
        say(f"FAILED: {error}")
    ladder.report["wall_s"] = round(time.monotonic() - START)
    (ladder.work / "report.json").write_text(json.dumps(ladder.report, indent=1))
    failed = ladder.report["failed"]
    say(f"failed: {', '.join(failed)}" if failed else "all rungs reached: L2, L4, L5")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
