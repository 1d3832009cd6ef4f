"""From source to an importable install, as users do it: sdist, wheel, isolation, no compiler.

Works without a network: environments borrow the packages of the running one through a .pth file,
and what build isolation needs is served from files copied out of it.
"""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
VERSION = metadata.version("bitnet-ops")
IMPORT_CHECK = (
    "import torch, bitnet_ops, bitnet_ops._runtime as r\n"
    "q, s = torch.ops.bitnet.quantize_activations(torch.tensor([[1.0, -2.0]]))\n"
    "print(q.tolist(), r.isa(), bitnet_ops.__file__, sep='|')"
)


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Combined output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


class Environment:
    """A fresh virtual environment; `borrow` is the list of directories it sees packages in."""

    def __init__(self, path: Path, borrow: list[Path]) -> None:
        # pip is borrowed too: the one venv brings has a setuptools older than torch wants
        run(sys.executable, "-m", "venv", "--without-pip", path)
        self.python = path / "bin" / "python"
        self.site = Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        )
        (self.site / "borrowed.pth").write_text("".join(f"{directory}\n" for directory in borrow))

    def pip(self, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
        return run(self.python, "-m", "pip", *arguments, env=env, cwd=self.site)


def top_level_of(distribution: str) -> set[Path]:
    """The files and directories directly in site-packages that a distribution installed."""
    files = metadata.files(distribution)
    assert files, f"{distribution} is not installed"
    return {SITE / path.parts[0] for path in files if path.parts[0] != ".."}


def borrowed_packages(directory: Path, only: set[str] | None = None) -> Path:
    """A directory of links to this environment's packages: all, or `only` those named.

    bitnet-ops itself is always left out, with the hook of its editable install.
    """
    directory.mkdir()
    skip = {"bitnet-ops", "bitnet_ops"}
    for distribution in metadata.distributions(path=[str(SITE)]):
        name = distribution.metadata["Name"]
        if name.lower() in skip or (only is not None and name not in only):
            continue
        for entry in top_level_of(name):
            link = directory / entry.name
            if entry.exists() and entry.name not in {"bin", "__pycache__"} and not link.exists():
                link.symlink_to(entry)
    return directory


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of this environment, torch included, bitnet-ops not."""
    return borrowed_packages(tmp_path_factory.mktemp("all") / "site")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, everything: Path) -> Environment:
    return Environment(tmp_path_factory.mktemp("env") / "venv", [everything])


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built by our backend."""
    out = tmp_path_factory.mktemp("sdist")
    code = f"import bitnet_build; print(bitnet_build.build_sdist({str(out)!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    run(sys.executable, "-c", code, env=env, cwd=ROOT)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def build_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of the build requirements, zipped from the installed packages: no index is asked."""
    out = tmp_path_factory.mktemp("wheelhouse")
    installed = {
        dist.metadata["Name"].lower().replace("_", "-") for dist in metadata.distributions()
    }
    tools = {"scikit-build-core", "pybind11", "packaging", "pathspec", "cmake", "ninja"}
    for name in sorted(tools & installed):
        distribution = metadata.distribution(name)
        tag = next(
            line.split(": ")[1]
            for line in (distribution.read_text("WHEEL") or "").splitlines()
            if line.startswith("Tag: ")
        )
        stem = f"{name.replace('-', '_')}-{distribution.version}"
        with zipfile.ZipFile(out / f"{stem}-{tag}.whl", "w") as archive:
            for file in distribution.files or []:
                if file.parts[0] != ".." and not file.name.endswith(".pyc"):
                    archive.write(str(file.locate()), str(file))
    return out


@dataclass(frozen=True)
class Built:
    """A wheel and what pip said while it was built."""

    path: Path
    log: str


@pytest.fixture(scope="module")
def wheel(
    tmp_path_factory: pytest.TempPathFactory,
    sdist: Path,
    environment: Environment,
    build_wheels: Path,
) -> Built:
    """The wheel, built in isolation from the sdist, not the tree: the sdist must be complete.

    With the scalar kernels alone, in little time: what it is about is the packaging. Its libraries
    are linked as a release's are (scripts/build_wheels).
    """
    out = tmp_path_factory.mktemp("wheel")
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(build_wheels)}
    settings = ["-C", "cmake.define.BITNET_ISAS=scalar"]
    settings += ["-C", "cmake.build-type=Quick", "-C", "cmake.define.BITNET_MANYLINUX=ON"]
    log = environment.pip("wheel", "-v", sdist, "--no-deps", "-w", out, *settings, env=env)
    (path,) = out.glob("*.whl")
    return Built(path, log)


def own_benchmarks() -> set[str]:
    """The measurements of this project itself, which its users have no use for."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("*.py")}
    assert len(found) > 5
    return found


@pytest.mark.slow
def test_sdist_holds_the_sources_and_no_build_products(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for needed in ("CMakeLists.txt", "LICENSE", "csrc/ops.cpp", "build_backend/bitnet_build.py"):
        assert needed in names
    assert not [name for name in names if name.endswith((".o", ".so", ".pyc"))]
    assert not [name for name in names if name.startswith(("build/", ".github", ".ci", ".venv"))]
    assert "tests/data/demo-model/model.safetensors" in names  # it can test itself
    assert own_benchmarks() <= names and "benchmarks/bench_engine.cpp" in names


@pytest.mark.slow
@pytest.mark.sampled(0)
def test_isolated_build_uses_the_installed_torch(wheel: Built) -> None:
    torch = metadata.version("torch")
    where = "installed in the environment outside build isolation"
    assert f"will use torch {torch} ({where})" in wheel.log
    assert f"building against torch {torch} at " in wheel.log
    assert "Collecting torch" not in wheel.log


@pytest.mark.slow
@pytest.mark.sampled(0)
def test_wheel_tag_and_content(wheel: Built) -> None:
    assert wheel.path.name.startswith(f"bitnet_ops-{VERSION}-{TAG}-{TAG}-linux_")
    with zipfile.ZipFile(wheel.path) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"bitnet_ops-{VERSION}.dist-info/entry_points.txt").decode()
    assert {"bitnet_ops/_ops.so", "bitnet_ops/libbitnet_kernels.so", "bitnet_ops/py.typed"} <= names
    assert len([name for name in names if name.startswith("bitnet_ops/_runtime.cpython-")]) == 1
    assert f"bitnet_ops-{VERSION}.dist-info/licenses/LICENSE" in names
    assert "bitnet_ops/data/demo/model.bin" in names
    python_files = {
        path.relative_to(ROOT / "python").as_posix()
        for path in (ROOT / "python" / "bitnet_ops").rglob("*.py")
    }
    assert python_files <= names
    assert not [name for name in names if "benchmarks" in name]
    other = [name for name in names if not name.startswith(("bitnet_ops/", "bitnet_ops-"))]
    assert other == []
    assert "bitnet = bitnet_ops.integrations.sglang:register" in entry_points
    assert "bitnet-ops = bitnet_ops.cli:main" in entry_points


@pytest.mark.slow
@pytest.mark.sampled(0)
def test_wheel_installs_and_imports_without_a_compiler(
    wheel: Built, environment: Environment, tmp_path: Path
) -> None:
    # Without --no-deps: every dependency must be satisfied by what is there, torch too.
    output = environment.pip("install", "--no-index", wheel.path)
    assert "Requirement already satisfied: torch>=2.10" in output
    assert f"Successfully installed bitnet-ops-{VERSION}\n" in output
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert shutil.which("g++", path=env["PATH"]) is None
    codes, isa, origin = run(environment.python, "-c", IMPORT_CHECK, env=env, cwd=tmp_path).split(
        "|"
    )
    assert codes == "[[64, -127]]"
    assert isa
    assert Path(origin.strip()).is_relative_to(environment.site)
    environment.pip("uninstall", "-y", "bitnet-ops")


# --- a wheel for several Pythons: scripts/build_wheels ------------------------------------------


def build_wheels_program() -> ModuleType:
    loader = SourceFileLoader("build_wheels", str(ROOT / "scripts" / "build_wheels"))
    module = module_from_spec(spec_from_loader("build_wheels", loader))
    loader.exec_module(module)
    return module


def test_a_wheel_is_for_every_python_or_names_those_without_headers(tmp_path: Path) -> None:
    """Interpreters and folders; one of a machine before one for all; no wheel lacks a Python."""
    program = build_wheels_program()
    for version in (*program.VERSIONS, "arm"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "Python.h").touch()
    named = [f"{version}={tmp_path / version}" for version in program.VERSIONS]
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = program.runtimes("x86_64", [*reversed(named), f"aarch64:3.12={tmp_path / 'arm'}"])
    assert list(found) == list(program.VERSIONS)
    assert found["3.12"] == tmp_path / "3.12"
    found = program.runtimes("aarch64", [*named, f"aarch64:3.12={tmp_path / 'arm'}"])
    assert found["3.12"] == tmp_path / "arm"
    others = [name for name in named if not name.startswith(f"{here}=")]
    assert program.runtimes("x86_64", [*others, sys.executable])[here] == Path(
        sysconfig.get_path("include")
    )
    with pytest.raises(SystemExit, match=rf"got none of {re.escape(here)}; name each with"):
        program.runtimes("x86_64", others)
    with pytest.raises(SystemExit, match=r"expected Python\.h in .*gone, found none"):
        program.runtimes("x86_64", [f"3.10={tmp_path / 'gone'}"])
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert list(program.VERSIONS) == classifiers


# --- which torch the build takes -----------------------------------------------------------------


HOOK = "import json, bitnet_build as b; print(json.dumps(b.get_requires_for_build_{}()))"


def ask_hook(python: Path, hook: str, cwd: Path, **variables: str) -> tuple[list[str], str]:
    """(requirements, what was said) of a hook of the build backend."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "build_backend"), **variables}
    shutil.copy(ROOT / "pyproject.toml", cwd)
    shutil.copy(ROOT / "CMakeLists.txt", cwd)
    done = subprocess.run(
        [str(python), "-c", HOOK.format(hook)], env=env, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the build tools and no torch."""
    base = tmp_path_factory.mktemp("torchless")
    tools = {"scikit_build_core", "scikit-build-core", "packaging", "pathspec", "pybind11"}
    site = borrowed_packages(base / "site", only=tools)
    return Environment(base / "venv", [site])


@pytest.mark.parametrize("hook", ["wheel", "editable"])
def test_hook_asks_for_exactly_the_pinned_torch_when_there_is_none(
    hook: str, torchless: Environment, tmp_path: Path
) -> None:
    requirements, said = ask_hook(torchless.python, hook, tmp_path)
    assert [line for line in requirements if "torch" in line] == ["torch==2.13.0"]
    assert "no usable torch found; adding torch==2.13.0" in said
    requirements, _ = ask_hook(
        torchless.python, hook, tmp_path, BITNET_TORCH_REQUIREMENT="torch==2.12.1"
    )
    assert [line for line in requirements if "torch" in line] == ["torch==2.12.1"]


def test_hook_asks_for_no_torch_when_there_is_one(tmp_path: Path) -> None:
    requirements, said = ask_hook(Path(sys.executable), "wheel", tmp_path)
    assert not [line for line in requirements if "torch" in line]
    assert f"will use torch {metadata.version('torch')} (visible to the build)" in said


def fake_torch(directory: Path, version: str, with_header: bool) -> Path:
    """A directory that looks like an installed torch package."""
    root = directory / "torch"
    header = root / "include" / "torch" / "csrc" / "stable" / "library.h"
    library = root / "lib" / "libtorch_cpu.so"
    for path in (header, library) if with_header else (library,):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "version.py").write_text(f"__version__ = {version!r}\n")
    (root / "__init__.py").touch()
    info = directory / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return root


def test_torch_root_variable_wins(torchless: Environment, tmp_path: Path) -> None:
    root = fake_torch(tmp_path, "2.10.0", with_header=True)
    requirements, said = ask_hook(torchless.python, "wheel", tmp_path, BITNET_TORCH_ROOT=str(root))
    assert not [line for line in requirements if "torch" in line]
    assert "will use torch 2.10.0 (BITNET_TORCH_ROOT)" in said


@pytest.mark.parametrize(
    ("version", "with_header", "complaint"),
    [("2.9.1", True, "torch 2.9.1 is older than 2.10"), ("2.11.0", False, "lacks include/torch")],
)
def test_unusable_torch_is_named_and_passed_over(
    torchless: Environment, tmp_path: Path, version: str, with_header: bool, complaint: str
) -> None:
    elsewhere = tmp_path / "site"
    elsewhere.mkdir()
    fake_torch(elsewhere, version, with_header)
    paths = f"{ROOT / 'build_backend'}:{elsewhere}"
    requirements, said = ask_hook(torchless.python, "wheel", tmp_path, PYTHONPATH=paths)
    assert "torch==2.13.0" in requirements
    assert complaint in said


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_build_without_torch_is_one_clear_line(
    hook: str, torchless: Environment, tmp_path: Path
) -> None:
    done = subprocess.run(
        [str(torchless.python), "-c", f"import bitnet_build as b; b.{hook}('.')"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "build_backend")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(
        "expected an installed torch >= 2.10 to build against, found none; "
        "run: pip install torch==2.13.0"
    )


def test_wrong_torch_root_is_one_clear_line(torchless: Environment, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(torchless.python), "-c", "import bitnet_build as b; b.find_torch()"],
        env={"PYTHONPATH": str(ROOT / "build_backend"), "BITNET_TORCH_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "BITNET_TORCH_ROOT: expected the directory of an installed torch" in done.stderr


# --- the build folder ----------------------------------------------------------------------------

LISTS = """cmake_minimum_required(VERSION 3.25)
project(x NONE)
include("${pybind11_DIR}/config.cmake")
"""


@pytest.mark.parametrize("owner", ["there", "gone"])
def test_a_wheel_of_another_environment_leaves_the_folder_as_it_was(
    tmp_path: Path, owner: str
) -> None:
    """pip's isolated environment vanishes, and the folder could not be built in any more."""
    (tmp_path / "CMakeLists.txt").write_text(LISTS)
    for environment in ("first", "isolated"):
        (tmp_path / environment).mkdir()
        (tmp_path / environment / "config.cmake").touch()
    tree = tmp_path / "build" / f"{TAG}-{TAG}-linux"
    first, isolated = (
        ["cmake", "-S", tmp_path, "-B", tree, "-G", "Ninja", f"-Dpybind11_DIR={tmp_path / name}"]
        for name in ("first", "isolated")
    )
    run(*first)
    info = tree / ".skbuild-info.json"
    info.write_text(json.dumps({"skbuild_path": "/first"}))
    if owner == "gone":
        shutil.rmtree(tmp_path / "first")
    sys.path.insert(0, str(ROOT / "build_backend"))
    try:
        bitnet_build = importlib.import_module("bitnet_build")
    finally:
        sys.path.pop(0)
    with bitnet_build._trees_left_as_they_were(tmp_path / "build"):
        told = json.loads(info.read_text())["skbuild_path"]  # or it would remove object files
        assert Path(told) == Path(bitnet_build.scikit_build_core.__file__).resolve().parent
        run(*isolated)
    if owner == "there":
        shutil.rmtree(tmp_path / "isolated")
        assert "no work to do" in run("cmake", "--build", tree)
        assert json.loads(info.read_text()) == {"skbuild_path": "/first"}
    cache = (tree / "CMakeCache.txt").read_text()
    expected = "first" if owner == "there" else "isolated"
    assert f"{tmp_path / expected}\n" in cache


# --- scripts/quickstart and scripts/test on an incomplete system ---------------------------------


@pytest.mark.parametrize("script", ["quickstart", "test"])
@pytest.mark.parametrize(
    ("variable", "fails_when_asked_for", "complaint", "package"),
    [
        ("PYTHON", "sys.version_info", "expected Python 3.10 or newer", "python3"),
        ("PYTHON", "ensurepip", "Python has no venv module", "python3-venv"),
        ("PYTHON", "Python.h", "no Python headers (Python.h)", "python3-dev"),
        ("CXX", "std=c++20", "cannot compile C++20", "g++"),
    ],
)
def test_setup_names_the_missing_system_package(
    tmp_path: Path,
    script: str,
    variable: str,
    fails_when_asked_for: str,
    complaint: str,
    package: str,
) -> None:
    real = sys.executable if variable == "PYTHON" else "g++"
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(
        f'#!/bin/sh\ncase "$*" in *{fails_when_asked_for}*) exit 1;; esac\nexec {real} "$@"\n'
    )
    stand_in.chmod(0o755)
    environment = tmp_path / "venv"
    env = {**os.environ, "BITNET_VENV": str(environment), variable: str(stand_in)}
    done = subprocess.run(
        [str(ROOT / "scripts" / script)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and complaint in line and package in line
    assert not environment.exists()


def test_a_build_shows_a_count_and_keeps_the_rest(tmp_path: Path) -> None:
    """On a terminal it moves; elsewhere it has few lines, the last file's among them."""
    told = ["  Preparing", *(f"  [{i}/20] Building" for i in range(1, 21)), "error: no space"]
    (tmp_path / "output").write_text("\n".join(told) + "\n")
    script = f"source {ROOT}/scripts/_setup.sh; compile_count {tmp_path}/log <{tmp_path}/output"
    piped = run("bash", "-c", script)
    assert re.findall(r"\[ +\d+s\] compiled (\d+) of 20\n", piped) == ["1", "20"]
    assert (tmp_path / "log").read_text() == "  Preparing\nerror: no space\n"
    terminal, end = pty.openpty()
    subprocess.run(["bash", "-c", script], stdout=end, stderr=end, check=True)
    shown = b""
    while not shown.endswith(b"\n"):  # one read may end in the middle
        shown += os.read(terminal, 4096)
    moves = re.findall(rb"\r\[ +\d+s\] compiled (\d+) of 20 ", shown)
    assert moves == [b"%d" % i for i in range(1, 21)]
    os.close(terminal)
    os.close(end)


def test_quickstart_brings_the_server_and_says_how_to_start_it(tmp_path: Path) -> None:
    """In a copy whose set-up does nothing; a later set-up keeps what an earlier one installed."""
    (tmp_path / "scripts").mkdir()
    quickstart = shutil.copy(ROOT / "scripts" / "quickstart", tmp_path / "scripts")
    setup = (ROOT / "scripts" / "_setup.sh").read_text()
    stub = '\nsetup_project() { echo "extras $1"; }\n'
    (tmp_path / "scripts" / "_setup.sh").write_text(setup + stub)
    command = tmp_path / ".venv" / "bin" / "bitnet-ops"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "ran $*"\n[ "$2" != wrong ]\n')
    command.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "BITNET_VENV"}
    done = subprocess.run([quickstart], cwd=tmp_path, env=env, capture_output=True, text=True)
    extras, ran = done.stdout.splitlines()
    assert done.returncode == 0 and extras == "extras [server]" and ran.startswith("ran generate ")
    assert "next: .venv/bin/bitnet-ops serve " in done.stderr
    failed = subprocess.run([quickstart, "wrong"], env=env, capture_output=True, text=True)
    assert failed.returncode == 1 and "next:" not in failed.stderr
    order = ["", "[server]", "[test]", "[test,dev]"]
    for number, extras in enumerate(order):
        for other in order[: number + 1]:
            for pair in (f"'{extras}' '{other}'", f"'{other}' '{extras}'"):
                script = f"source {tmp_path}/scripts/_setup.sh; wider_of {pair}"
                assert run("bash", "-c", script).strip() == extras


def test_setup_names_the_missing_compiler(tmp_path: Path) -> None:
    env = {**os.environ, "BITNET_VENV": str(tmp_path / "venv"), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [str(ROOT / "scripts" / "quickstart")], env=env, capture_output=True, text=True
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no C++ compiler found (no-such-compiler); ")
