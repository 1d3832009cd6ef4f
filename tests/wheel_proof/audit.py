"""What the file of a wheel shows by itself, for scripts/prove_wheel; standard library and readelf.

`audit(wheel)` gives a line for each thing that is wrong.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "bitnet_ops"
# A library may look where it lies, and for torch beside the package.
RUNPATHS = {"$ORIGIN", "$ORIGIN/../torch/lib"}
STABLE = ("aoti_torch_", "torch_")
# What the linker leaves open, and a function that torch_views.cpp calls where a runtime has it.
OPTIONAL = re.compile(r"__gmon_start__|_ITM_\w+|__cxa_finalize|omp_pause_resource_all")
# A place of the machine of the build: in home folders and the like, or of a source file.
BUILDER = re.compile(
    rb"(?<![\w.+/-])/(?:(?:root|home|work|tmp|builds?|mnt|srv)/[\w.+/-]+"
    rb"|[\w.+-]+(?:/[\w.+-]+)*\.(?:cpp|cc|c|hpp|h|inl|o)\b)"
)


def audit(wheel: Path) -> list[str]:
    """One line for each fault of the file; none for a good wheel."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        files = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
        info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
        faults = [*_names(archive.namelist(), info), *_record(files, info), *_papers(files, info)]
        libraries = {}
        for name in files:
            if files[name][:4] == b"\x7fELF":
                libraries[name] = Path(archive.extract(name, folder))
        return faults + list(_libraries(libraries))


def _names(names: Iterable[str], info: str) -> Iterator[str]:
    for name, count in Counter(names).items():
        if name.split("/")[0] not in (PACKAGE, info):
            yield f"{name}: expected nothing outside {PACKAGE} and {info}"
        if count > 1:
            yield f"{name}: expected once, got {count} times"


def _record(files: dict[str, bytes], info: str) -> Iterator[str]:
    own = f"{info}/RECORD"
    told = {row[0]: row[1:] for row in csv.reader(io.StringIO(files.get(own, b"").decode())) if row}
    for name in sorted(files.keys() ^ told.keys()):
        yield f"{name}: expected in RECORD and in the wheel, got one of them"
    for name in files.keys() & told.keys() - {own}:
        sha = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        if told[name] != [f"sha256={sha}", str(len(files[name]))]:
            yield f"{name}: expected RECORD's hash and size, got other content"


def _papers(files: dict[str, bytes], info: str) -> Iterator[str]:
    if not files.get(f"{info}/licenses/LICENSE", b"").strip():
        yield f"{info}: expected licenses/LICENSE, got none"
    sboms = [name for name in files if re.fullmatch(rf"{re.escape(info)}/sboms/.+\.json", name)]
    if not sboms:
        yield f"{info}: expected an SBOM in sboms/, got none"
    for name in sboms:
        try:
            form = json.loads(files[name])["bomFormat"]
        except (ValueError, KeyError, TypeError):
            form = "no JSON with bomFormat"
        if form != "CycloneDX":
            yield f"{name}: expected CycloneDX, got {form}"


def _libraries(paths: dict[str, Path]) -> Iterator[str]:
    symbols = {name: list(_dynamic_symbols(path)) for name, path in paths.items()}
    ours = {symbol for found in symbols.values() for symbol, defined, _ in found if defined}
    for name, path in paths.items():
        for place in _runpaths(path):
            if place not in RUNPATHS:
                yield f"{name}: expected a run path of {' or '.join(sorted(RUNPATHS))}, got {place}"
        for place in sorted(set(BUILDER.findall(path.read_bytes()))):
            yield f"{name}: expected no path of the machine of the build, got {place.decode()}"
        python = Path(name).name.startswith("_runtime.")
        for symbol, defined, versioned in symbols[name]:
            known = symbol in ours or versioned or symbol.startswith(STABLE)
            of_python = python and re.match(r"_?Py", symbol)
            if not (defined or known or of_python or OPTIONAL.fullmatch(symbol)):
                yield f"{name}: expected symbols of torch's stable ABI alone, got {symbol}"


def _readelf(path: Path, *options: str) -> list[str]:
    command = ["readelf", "-W", *options, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _runpaths(path: Path) -> list[str]:
    found = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", "\n".join(_readelf(path, "-d")))
    return [place for places in found for place in places.split(":")]


def _dynamic_symbols(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """(name, whether the library has it, whether it carries a version, as those of libc do)."""
    for line in _readelf(path, "--dyn-syms"):
        row = line.split()
        if len(row) > 7 and row[0][:-1].isdigit():
            name, at, _ = row[7].partition("@")
            yield name, row[6] != "UND", bool(at)
