"""What opening a hostile file costs: memory bounded whatever its headers claim.

Runs `_runtime` alone in a process of its own, so that torch's memory does not hide the figures.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import sglbitnt_bytes as raw
from bitnet_ops import _runtime, load
from bitnet_ops.cli import main
from bitnet_ops.config import UnsupportedModelError
from bitnet_ops.convert import convert
from bitnet_ops.errors import BitNetError
from bitnet_ops.formats.sglbitnt import Reader, replace_config
from bitnet_ops.language_model import DEMO_DIR
from sglbitnt_malformed import LARGEST, MALFORMED

MIB = 1 << 20

# Loads the module from its file (the package would load torch), caps the address space at 64 MiB
# above what is mapped now, opens each file and reports the outcome and the growth of the peak RSS.
# Not ru_maxrss: it starts from the peak of the process that started this one.
CHILD = r"""
import importlib.util, json, os, re, resource, sys
spec = importlib.util.spec_from_file_location("bitnet_ops._runtime", sys.argv[1])
runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)

def peak():
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) * 1024

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGESIZE") + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
out = []
for path in sys.argv[4:]:
    before = after = peak()
    try:
        if path == "control":
            b"x" * int("20000000")  # at run time, not folded by the compiler
            raise MemoryError
        file = runtime.SglbitntFile(path, bool(int(sys.argv[3])))
        after = peak()
        outcome = f"{len(file.tensors)} tensors"
    except runtime.FormatError as error:
        outcome = error.code
    except MemoryError:
        outcome = "out of memory"
    if "tensors" not in outcome:
        after = peak()
    out.append([outcome, after - before])
print(json.dumps(out))
"""


def open_in_child(paths: list[Path], room: int, check_codes: bool = True) -> list[tuple[str, int]]:
    """(outcome, growth of the peak in bytes) of each file, opened one after the other."""
    command = [sys.executable, "-c", CHILD, _runtime.__file__, str(room), str(int(check_codes))]
    done = subprocess.run(
        [*command, *map(str, paths)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [(outcome, growth) for outcome, growth in json.loads(done.stdout)]


def test_the_measure_sees_an_allocation() -> None:
    """Otherwise the bounds below could not fail."""
    outcome, growth = open_in_child([Path("control")], room=64 * MIB)[0]
    assert outcome == "out of memory" and 18 * MIB < growth < 21 * MIB
    outcome, growth = open_in_child([Path("control")], room=4 * MIB)[0]
    assert outcome == "out of memory" and growth < 5 * MIB  # the address space really is limited


CLAIMING = (
    "cve_",
    "count_",
    "name_length",
    "config_length",
    "byte_length",
    "ndim",
    "dim",
    "packed_",
)
CLAIMS = [name for name in MALFORMED if name.startswith(CLAIMING)]


def test_claims_of_exabytes_allocate_nothing(tmp_path: Path) -> None:
    paths = []
    for name in CLAIMS:
        paths.append(tmp_path / name)
        paths[-1].write_bytes(MALFORMED[name][0])
    assert len(paths) >= 30
    largest = max(path.stat().st_size for path in paths)
    results = open_in_child(paths, room=64 * MIB)
    for name, (outcome, growth) in zip(CLAIMS, results, strict=True):
        assert outcome == MALFORMED[name][1], name
        # 65536 records at the limit of the format, the mapped file itself, the allocator's slack
        assert growth <= largest + 16 * MIB, (name, growth)
    # all but the one file that really has 65537 tensors: a page or two
    assert sorted(growth for _, growth in results)[-2] <= 2 * MIB


def test_the_largest_number_of_tensors_stays_below_the_stated_bound(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(raw.file(*(raw.tensor(b"%x" % i, 2, (1,)) for i in range(65536))))
    outcome, growth = open_in_child([path], room=128 * MIB, check_codes=False)[0]
    assert outcome == "65536 tensors"
    assert 5 * MIB < growth <= path.stat().st_size + 10 * MIB  # FORMAT.md: below 10 MB of records


@pytest.mark.parametrize("gigabytes", [1, 8])
def test_opening_reads_headers_only(tmp_path: Path, gigabytes: int) -> None:
    """A sparse file of real gigabytes, its structure right: memory does not grow with it."""
    path = tmp_path / "m.bin"
    rows = gigabytes << 15
    head = raw.file(raw.tensor(b"w", 0, (rows, 32768), b"", nbytes=rows * 32768))
    path.write_bytes(head)
    with open(path, "r+b") as file:
        file.truncate(len(head) + rows * 32768)
    room = path.stat().st_size + 64 * MIB
    outcome, growth = open_in_child([path], room, check_codes=False)[0]
    assert outcome == "1 tensors"
    assert growth <= 2 * MIB
    file_too_large_to_map = open_in_child([path], room=64 * MIB, check_codes=False)
    assert file_too_large_to_map[0][0] == "io"


def test_a_config_that_claims_two_billion_layers(tmp_path: Path) -> None:
    """No list of their names is made: the file has one tensor."""
    config = {
        "model_type": "bitnet",
        "vocab_size": 10,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_act": "relu2",
        "num_hidden_layers": LARGEST,
    }
    path = tmp_path / "model.bin"
    path.write_bytes(raw.file(raw.tensor(b"w"), config=config))
    with pytest.raises(UnsupportedModelError, match=f"of at most 4096, got {LARGEST}"):
        load(path)


@pytest.mark.parametrize(
    "size",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"]
    + ["num_attention_heads", "num_key_value_heads"],
)
def test_sizes_are_compared_with_the_file_before_memory_is_asked_for(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_DIR, folder)
    with Reader(folder / "model.bin") as reader:
        config = {**reader.config, size: 2**31 - 1 if size.endswith("size") else 2**20}
    replace_config(folder / "model.bin", config)
    tracemalloc.start()
    with pytest.raises(BitNetError):
        load(folder)
    with pytest.raises(BitNetError):
        convert(folder, tmp_path / "out")
    assert main(["inspect", str(folder)]) == 0  # its tensors, and a remark
    main(["inspect", str(folder), "--program"])
    assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    tracemalloc.stop()
    capsys.readouterr()


def test_the_claims_are_larger_than_any_memory() -> None:
    assert LARGEST * (2**31 - 32) > 2**61
