"""Climbs the ladder of the SGLang integration with the real package, for scripts/prove_sglang.

L2: the real linear classes (l2_layers.py). L4: the real engine (l4_engine.py) against transformers
(oracle.py), our calls counted inside the spawned scheduler; two tensor-parallel ranks and, with
--only families, checkpoints of every kind against our own engine (own_tokens.py). L5: the
launcher's HTTP server and the `openai` client (l5_server.py). L6, with --speed: tokens per second
(speed_engine.py). L0 and L1 are in the ordinary suite.
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
from collections.abc import Sequence
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
# Kinds of own_tokens.py by how SGLang serves them: linears of ours a layer, 0 for one op a forward.
# "NAME" is the checkpoint folder, "NAME-bin" the converted model, which is what the launcher makes
# of a folder too. Bonsai's scales a group of weights are no quantisation method of SGLang's.
FAMILY_RUNS = (
    *(("bitnet", 4), ("llama", 4), ("qwen3", 4)),
    *((f"{name}-bin", 0) for name in ("bitnet", "llama", "qwen3", "bonsai")),
)
OWN_TOKENS = 24
# Rows of the table of speed: SGLang's own bfloat16, our linear method in SGLang's loop (as the
# launcher's --per-layer starts it), and one op a forward.
SPEED_RUNS = {
    "bf16": ("bf16", {"dtype": "bfloat16", "load_format": "dummy"}),
    "method": ("packed", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
    "whole": ("serving", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
}
VOCABULARY = 32768  # beside 8 layers what 128256 are beside 30
RUNGS = ("layers", "engine", "ranks", "families", "server")
# In bfloat16 two right programs differ by some per cent of the largest logit (about 10 here); a
# token may differ only where transformers' own lead is below that. In float32 none may: these
# prompts were chosen for their leads (the smallest is 0.04).
ALLOWED_LEAD = {"float32": 0.0, "bfloat16": 0.3}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


def child_environment(stubs: bool | str) -> dict[str, str]:
    """os.environ without what would lead a child astray; no network at run time.

    `stubs`: with what SGLang needs here; "plain": and with its own attention.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_PLUGINS", "SGLANG_PLATFORM")
    # Without bytecode each of a server's three processes would compile thousands of files anew.
    dropped += ("PYTHONDONTWRITEBYTECODE",)
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Threads that spin while they wait take the cores from each other where the machine is shared:
    # generating then took 14 times as long (25.3 s against 1.8 s).
    env |= {"OMP_WAIT_POLICY": "passive"}
    if stubs:
        folders = os.pathsep.join(str(STUBS / name) for name in ("vision", "kernels"))
        env |= {"PYTHONPATH": folders, "SGLANG_USE_CPU_ENGINE": "1"}
        env |= {"BITNET_OPS_SGLANG_ATTENTION": "0" if stubs == "plain" else "1"}
    return env


class Ladder:
    """The rungs, run in an environment; results are collected for the report."""

    def __init__(self, environment: Environment):
        self.env, self.work = environment, environment.work
        self.report: dict = {"failed": []}
        self.kinds: Path | None = None  # once own_tokens.py has made them
        self.tokens: dict[str, list[list[int]]] = {}  # of the kinds that were served

    def script(
        self, name: str, log: str, *arguments, stubs: bool | str = True, timeout: float = 900
    ):
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
        layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
        options = {"dtype": dtype, "model_impl": model_impl}
        report = self.served(name, checkpoints[source], oracle, options)
        judge_tokens(name, report)
        judge_calls(name, report, linears * layers or 1)
        if linears and not any(kind.startswith("paged_attention") for kind in report["kinds"]):
            raise ProofError(f"expected our attention, got {report['kinds']}")
        say(
            f"L4 reached ({name}): engine start {report['engine_start_s']} s, generation "
            f"{report['generate_s']} s, {report['seconds']} s in all"
        )

    def served(self, name: str, checkpoint: Path, oracle: Path, options: dict) -> dict:
        """The report of l4_engine.py."""
        result, folder = self.work / f"l4-{name}.json", self.work / f"plugin-{name}"
        result.unlink(missing_ok=True)
        arguments = (checkpoint, oracle, result, folder, json.dumps(options))
        seconds = self.script("l4_engine.py", f"l4-{name}", *arguments)
        report = self.report[f"L4 {name}"] = json.loads(result.read_text())
        report["seconds"] = round(seconds)
        return report

    def own(self) -> Path:
        """The folder of own_tokens.py."""
        if self.kinds is None:
            folder = self.work / "kinds"
            self.script("own_tokens.py", "own", folder, OWN_TOKENS, stubs=False)
            self.kinds = folder
        return self.kinds

    def kind(self, run: tuple[str, int], ranks: int = 1) -> list[list[int]]:
        """A tiny checkpoint gives our own engine's tokens; returns them."""
        (source, linears), name = run, f"{run[0]}-tp{ranks}"
        if name in self.tokens:
            return self.tokens[name]
        kinds, oracle = self.own(), self.own() / f"{run[0].removesuffix('-bin')}.json"
        folder = kinds / source
        if not linears:
            folder = self.serving(folder, "stored")
        options = {"dtype": "float32", "kv_cache_dtype": "bfloat16", "tp_size": ranks}
        report = self.served(name, folder, oracle, options)
        judge_tokens(name, report, "our own engine")
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        judge_calls(name, report, linears * layers or 1, ranks)
        say(f"L4 reached ({name}): engine start {report['engine_start_s']} s")
        self.tokens[name] = [row["tokens"] for row in report["prompts"]]
        return self.tokens[name]

    def ranks(self) -> None:
        """Two ranks of SGLang's own Llama class give one rank's tokens, and our engine's."""
        found = [self.kind(("llama", 4), ranks) for ranks in (1, 2)]
        if found[0] != found[1]:
            raise ProofError(f"expected two ranks to give one rank's tokens, got {found}")
        say("tensor parallel: 2 ranks give the tokens of 1 rank and of our engine (Llama type)")

    def refused(self) -> None:
        """What SGLang's interface cannot serve as it is, the launcher says, with the remedy."""
        bonsai = self.own() / "bonsai"
        for words, reason in (
            (["--per-layer"], "leave out --per-layer, which converts the model"),
            (["--", "--tp", "2"], "expected --tp 1 for a converted model, got 2"),
        ):
            command = [self.env.python, "-m", "bitnet_ops", "sglang", bonsai, "--print", *words]
            env = child_environment(stubs=False)
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode != 1 or reason not in done.stderr:
                raise ProofError(f"expected {reason!r}, got {done.returncode} and {done.stderr}")
            say(f"  L4 bonsai: {done.stderr.strip()}")

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

    def dims(self, layers: int) -> dict[str, Path]:
        """Models of 2B-4T's dimensions: a checkpoint, and a Llama's config.json for SGLang's own
        bfloat16 on random weights."""
        folder = self.work / f"dims-{layers}-{VOCABULARY}"
        if not (folder / "plain" / "tokenizer.json").exists():
            writer = ROOT / "tests" / "vllm_proof" / "write_dims.py"
            self.script(writer, "dims", folder, layers, VOCABULARY, stubs=False)
        bf16 = folder / "bf16"
        bf16.mkdir(exist_ok=True)
        config = json.loads((folder / "plain" / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (bf16 / "config.json").write_text(json.dumps({**config, "hidden_act": "silu"}))
        return {"packed": folder / "packed", "bf16": bf16}

    def speed(self, layers: int, parts: Sequence[str]) -> None:
        """L6: tokens per second in SGLang and in our engine, which take turns."""
        models = self.dims(layers)
        for part in parts:
            source, options = SPEED_RUNS[part]
            folder = models.get(source) or self.serving(models["packed"])
            own = [] if part == "bf16" else [models["packed"]]
            result, plugin = self.work / f"speed-{layers}-{part}.json", self.work / "plugin-speed"
            result.unlink(missing_ok=True)
            arguments = (result, folder, json.dumps(options), plugin, *own)
            stubs = "plain" if part == "bf16" else True
            seconds = self.script("speed_engine.py", f"speed-{part}", *arguments, stubs=stubs)
            say(f"  L6 {part}: {seconds:.0f} s")
        found = {
            part: json.loads(file.read_text())
            for part in SPEED_RUNS
            if (file := self.work / f"speed-{layers}-{part}.json").exists()
        }
        self.report["L6"] = found
        for line in table_of_speed(found):
            say(f"  L6 {line}")
        say(f"L6 reached: {layers} layers of 2B-4T's dimensions, vocabulary {VOCABULARY}")
        if "whole" in found and not found["whole"]["same_tokens"]:
            raise ProofError(
                "expected one op a forward to give our own engine's tokens, got others"
            )


def table_of_speed(found: dict[str, dict]) -> list[str]:
    """Tokens per second; the share of our own engine, which took turns with each; and of the
    milliseconds of a forward those that are spent in our calls."""
    columns = [what for what in next(iter(found.values()))["engines"]["SGLang"] if " " in what]
    lines = ["tokens per second".ljust(24) + "".join(c.rjust(30) for c in columns) + "   start"]
    for part, report in found.items():
        row, own = report["engines"]["SGLang"], report["engines"].get("own")
        cells = ""
        for what in columns:
            cell = row[what]
            share = f" ({cell['rate'] / own[what]['rate']:.2f})" if own else ""
            spent = f"{cell['ours_ms']:.1f}/{cell['ms']:.1f} ms"
            cells += f"{cell['rate']:.1f}{share} {spent}".rjust(30)
        lines.append(f"SGLang, {part}".ljust(24) + cells + f"{row['start_s']:6.1f} s")
    owns = [report["engines"]["own"] for report in found.values() if "own" in report["engines"]]
    if owns:
        best = {what: max(own[what]["rate"] for own in owns) for what in columns}
        lines.append("own engine".ljust(24) + "".join(f"{best[c]:.1f}".rjust(30) for c in columns))
    return lines


def judge_speed(found: dict[str, dict], layers: int) -> None:
    """What was timed is what the row says: our calls in each decoding forward, our tokens."""
    for part, calls in (("bf16", 0), ("method", 4 * layers), ("whole", 1)):
        if part in found:
            row = found[part]["engines"]["SGLang"]
            got = [row[what]["calls"] for what in row if what.startswith("batch")]
            # Of several requests some may arrive a forward later, so that there are more forwards.
            if got[0] != calls or any(bool(n) != bool(calls) for n in got):
                raise ProofError(f"expected {calls} calls of ours a forward ({part}), got {got}")
    if "whole" in found and not found["whole"]["same_tokens"]:
        raise ProofError("expected the tokens of our own engine of one op a forward, got others")


def judge_tokens(name: str, report: dict, oracle: str = "transformers") -> None:
    """Every token equal up to the first difference, which must be a near-tie of the oracle."""
    rows = report["prompts"]
    same, total = sum(row["same"] for row in rows), sum(row["of"] for row in rows)
    whole = sum(row["same"] == row["of"] for row in rows)
    say(
        f"  L4 {name}: {whole} of {len(rows)} continuations equal to {oracle}, {same} of "
        f"{total} tokens before the first difference; its smallest lead "
        f"{min(row['smallest_lead'] for row in rows)}"
    )
    allowed = ALLOWED_LEAD[report["dtype"]]
    for row in rows:
        lead = row["lead_at_difference"]
        if lead is not None:
            say(f"     {row['prompt']!r} differs at token {row['same']}, where the lead is {lead}")
        if not row["prompt_ids_equal"] or (lead is not None and lead > allowed):
            raise ProofError(f"expected the tokens of {oracle}, got {row}")
    if 2 * same < total:
        raise ProofError(f"expected at least half of the tokens before a near-tie, got {same}")


def judge_calls(name: str, report: dict, per_forward: int, ranks: int = 1) -> None:
    """apply() ran in one other process a rank, its scheduler, once a linear and forward."""
    own = str(report["own_pid"])
    elsewhere = {pid: n for pid, n in report["apply_calls"].items() if pid != own and n}
    here = report["apply_calls"].get(own, 0)
    text = f"{elsewhere} in spawned processes, {here} in the parent; {', '.join(report['kinds'])}"
    say(f"  L4 {name}: apply() calls {text}")
    tokens = report["prompts"][0]["of"]
    ok = len(elsewhere) == ranks and here == 0
    ok = ok and all(n % per_forward == 0 and n >= tokens * per_forward for n in elsewhere.values())
    if not ok:
        raise ProofError(
            f"expected apply() in {ranks} spawned processes, {per_forward} calls for each of at "
            f"least {tokens} forwards, got {text}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove_sglang", description=__doc__.split("\n")[0])
    work = ROOT / "build" / "sglang"
    default = os.environ.get("BITNET_SGLANG_VENV", work / "venv")
    parser.add_argument("--venv", type=Path, default=default, help="default: build/sglang/venv")
    parser.add_argument("--work", type=Path, default=work, help="logs, checkpoints, report.json")
    parser.add_argument(
        "--speed", metavar="LAYERS", type=int, nargs="?", const=8, help="L6 too (default 8 layers)"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=SPEED_RUNS,
        default=[*SPEED_RUNS],
        help="rows of L6 to measure",
    )
    usual = [name for name in RUNGS if name != "families"]
    parser.add_argument(
        "--only", nargs="*", choices=RUNGS, default=usual, help=f"rungs (default {usual})"
    )
    return parser.parse_args()


def climb(ladder: Ladder, options: argparse.Namespace) -> None:
    only = options.only
    expected = json.loads((DEMO / "expected.json").read_text())["cases"]
    if "layers" in only:
        ladder.rung("L2", ladder.layers)
    if {"engine", "server"} & {*only}:
        checkpoints = ladder.checkpoints()
    if "engine" in only:
        for run in ENGINE_RUNS:
            ladder.rung(f"L4 {run[0]}", lambda run=run: ladder.engine(run, checkpoints, expected))
    if "ranks" in only:
        ladder.rung("L4 ranks", ladder.ranks)
    if "families" in only:
        for run in FAMILY_RUNS:
            ladder.rung(f"L4 {run[0]}", lambda run=run: ladder.kind(run))
        ladder.rung("L4 refused", ladder.refused)
    if "server" in only:
        ladder.rung("L5", lambda: ladder.server(expected))
    if options.speed:
        ladder.rung("L6", lambda: ladder.speed(options.speed, options.parts))
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
        climb(ladder, options)
    except ProofError as error:
        ladder.report["failed"].append("set-up")
        say(f"FAILED: {error}")
    ladder.report["wall_s"] = round(time.monotonic() - START)
    (ladder.work / "report.json").write_text(json.dumps(ladder.report, indent=1))
    failed, climbed = ladder.report["failed"], [*options.only, *["speed"][: bool(options.speed)]]
    say(f"failed: {', '.join(failed)}" if failed else f"all rungs reached: {', '.join(climbed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
