"""scripts/prove_wheel sees what is wrong with a wheel: small made ones, one fault each."""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "wheel_proof"))

from audit import audit  # noqa: E402

INFO = "bitnet_ops-0.1.0.dist-info"
FILES = {
    "bitnet_ops/__init__.py": b"",
    f"{INFO}/licenses/LICENSE": b"Apache",
    f"{INFO}/sboms/bitnet_ops.cdx.json": b'{"bomFormat": "CycloneDX"}',
}
KERNELS = "int bitnet_kernels(void) { return 1; }"
OPS = """
int bitnet_kernels(void), torch_call_dispatcher(void), aoti_torch_get_dim(void), puts(const char *);
void omp_pause_resource_all(int) __attribute__((weak));
int torch(void) { return torch_call_dispatcher() + aoti_torch_get_dim(); }
int ops(void) { return bitnet_kernels() + torch() + puts("/proc/x"); }
"""
RUNTIME = "int PyLong_AsLong(void); int init(void) { return PyLong_AsLong(); }"


def library(folder: Path, source: str, *options: str) -> bytes:
    (folder / "x.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", "x.c", "-o", "x.so", *options]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "x.so").read_bytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel without a fault, but for RECORD."""
    folder = tmp_path_factory.mktemp("good")
    ours = "-Wl,-rpath,$ORIGIN:$ORIGIN/../torch/lib"
    return FILES | {
        "bitnet_ops/libbitnet_kernels.so": library(folder, KERNELS),
        "bitnet_ops/_ops.so": library(folder, OPS, ours),
        "bitnet_ops/_runtime.cpython-311-x86_64-linux-gnu.so": library(folder, RUNTIME),
    }


def record(files: dict[str, bytes]) -> str:
    def line(name: str, content: bytes) -> str:
        sha = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        return f"{name},sha256={sha},{len(content)}\n"

    return "".join(line(*item) for item in files.items()) + f"{INFO}/RECORD,,\n"


def faults(folder: Path, files: dict[str, bytes], text: str | None = None) -> list[str]:
    """What the audit says of a wheel of these files, with `text` for RECORD."""
    path = folder / "bitnet_ops-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{INFO}/RECORD", record(files) if text is None else text)
    return audit(path)


def test_a_good_wheel_has_no_fault(tmp_path: Path, good: dict[str, bytes]) -> None:
    assert faults(tmp_path, good) == []


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("bitnet_ops.libs/libgomp.so.1", b"", "expected nothing outside bitnet_ops"),
        (f"{INFO}/licenses/LICENSE", None, "expected licenses/LICENSE, got none"),
        (f"{INFO}/sboms/bitnet_ops.cdx.json", None, "expected an SBOM"),
        (f"{INFO}/sboms/bitnet_ops.cdx.json", b'{"spdxVersion": 1}', "expected CycloneDX"),
    ],
)
def test_a_file_too_many_or_too_few_is_seen(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    files = {**FILES, name: content}
    (fault, *_) = faults(tmp_path, {k: v for k, v in files.items() if v is not None})
    assert complaint in fault


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (",0\n", ",1\n", "bitnet_ops/__init__.py: expected RECORD's hash and size"),
        ("=", "=A", "expected RECORD's hash and size"),
        ("bitnet_ops/__init__.py,", "bitnet_ops/other.py,", "expected in RECORD and in the wheel"),
    ],
)
def test_a_wrong_record_is_seen(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert complaint in faults(tmp_path, FILES, record(FILES).replace(old, new, 1))[0]


@pytest.mark.parametrize(
    ("source", "options", "complaint"),
    [
        (KERNELS, ["-Wl,-rpath,/opt/lib"], "expected a run path of $ORIGIN"),
        (KERNELS, ["-Wl,-rpath,$ORIGIN/../../lib"], "got $ORIGIN/../../lib"),
        (
            'const char *place = "/home/me/x";',
            [],
            "no path of the machine of the build, got /home/me/x",
        ),
        ('const char *place = "at /src/csrc/ops.cpp";', [], "got /src/csrc/ops.cpp"),
        (
            "int _ZN2at5emptyEv(void); int f(void) { return _ZN2at5emptyEv(); }",
            [],
            "got _ZN2at5emptyEv",
        ),
        (RUNTIME, [], "expected symbols of torch's stable ABI alone, got PyLong_AsLong"),
    ],
)
def test_a_library_that_would_not_load_elsewhere_is_seen(
    tmp_path: Path, source: str, options: list[str], complaint: str
) -> None:
    (fault,) = faults(
        tmp_path, {**FILES, "bitnet_ops/_ops.so": library(tmp_path, source, *options)}
    )
    assert fault.startswith("bitnet_ops/_ops.so: ") and complaint in fault


def test_the_digest_is_of_results_not_of_where_they_came_from() -> None:
    loader = importlib.machinery.SourceFileLoader("prove_wheel", str(ROOT / "scripts/prove_wheel"))
    spec = importlib.util.spec_from_loader("prove_wheel", loader)
    assert spec
    prove = importlib.util.module_from_spec(spec)
    loader.exec_module(prove)
    x86 = "avx2 1 ops-a 12\nscalar 1 ops-a 12\navx2 1 ops-b 34\n"
    assert prove.digest_of(x86) == prove.digest_of(
        "sve not here\nneon 1 ops-b 34\nneon 1 ops-a 12\n"
    )
    assert prove.digest_of(x86) != prove.digest_of(x86.replace("34", "35", 1))
