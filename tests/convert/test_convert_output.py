"""The converter's output: whole or not at all, in bounded memory; and its command line.

What a right conversion holds is test_convert.py's business.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import hf_writer
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.diff import diff
from bitnet_ops.formats import atomic
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.language_model import DEMO_DIR
from hf_writer import FAMILIES
from isa_control import torch_threads
from slow_conversion import SLOW

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices this small are slower on several threads; results are the same bit for bit."""
    with torch_threads(1):
        yield


def write(tmp_path, family, **options):
    return hf_writer.write_checkpoint(tmp_path / "source", family, **options)


def leftovers(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "source")


# Whole or not at all -----------------------------------------------------------------------------


def _break_last_tensor(source, family):
    """Code 3 in the last projection that is written, so that almost all work is done before."""
    tensors = hf_writer.state_dict(family, hf_writer.make_network(family))
    tensors[f"model.layers.{family.layers - 1}.mlp.down_proj.weight"][0, 0] = 0xFF
    hf_writer.write_tensors(source, tensors)


def test_failure_leaves_nothing(tmp_path):
    family = FAMILIES["bitnet-offline"]
    source = write(tmp_path, family)
    _break_last_tensor(source, family)
    with pytest.raises(ConvertError) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.code == "code-3"
    assert leftovers(tmp_path) == []


def test_failure_under_force_leaves_the_earlier_result(tmp_path):
    family = FAMILIES["bitnet-offline"]
    source = write(tmp_path, family)
    sha256 = convert(source, tmp_path / "out").sha256
    _break_last_tensor(source, family)
    with pytest.raises(ConvertError, match="code-3"):
        convert(source, tmp_path / "out", force=True)
    assert leftovers(tmp_path) == ["out"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["sha256"] == sha256


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interruption_leaves_nothing(error, tmp_path):
    def interrupt(done, total, name):
        if done == total - 2:
            raise error

    expected = ConvertError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        convert(write(tmp_path, FAMILIES["bitnet-offline"]), tmp_path / "out", progress=interrupt)
    if expected is ConvertError:
        assert caught.value.code == "write-failed" and "No space left" in str(caught.value)
    assert leftovers(tmp_path) == []


def test_control_c_in_the_command_leaves_nothing(tmp_path):
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    command = [sys.executable, "-c", SLOW, "convert", str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"tensor\n"
        assert len(leftovers(tmp_path)) == 1, "the folder it is built in"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr == b""
    assert leftovers(tmp_path) == []


_FULL = """
import resource, sys
from bitnet_ops.cli import main
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(["convert", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("limit", [0, 4000, 60_000])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.sampled(3)
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, limit, version):
    """The operating system lets no file grow, like a full disk: in the header, in a tensor."""
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    arguments = [str(limit), str(source), str(tmp_path / "out"), "--format", version]
    command = [sys.executable, "-c", _FULL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "[write-failed]" in done.stderr
    assert "File too large" in done.stderr and "nothing was kept" in done.stderr
    assert leftovers(tmp_path) == []


def test_force_replaces_an_earlier_result(tmp_path):
    first = write(tmp_path, FAMILIES["bitnet-offline"])
    convert(first, tmp_path / "out")
    other = hf_writer.write_checkpoint(tmp_path / "other", FAMILIES["llama-bitlinear"])
    report = convert(other, tmp_path / "out", force=True)
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert reader.config["model_type"] == "llama"
    assert report.model_type == "llama" and leftovers(tmp_path) == ["other", "out"]


def test_failed_rename_puts_the_earlier_result_back(tmp_path, monkeypatch):
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    sha256 = convert(source, tmp_path / "out").sha256
    rename, calls = os.rename, []

    def failing(a, b):
        calls.append((a, b))
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(a, b)

    # move aside, move in (fails), move back
    monkeypatch.setattr(atomic.os, "rename", failing)
    with pytest.raises(ConvertError, match="Input/output error"):
        convert(source, tmp_path / "out", force=True)
    assert len(calls) == 3
    assert leftovers(tmp_path) == ["out"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["sha256"] == sha256


def test_result_obeys_the_umask(tmp_path):
    convert(write(tmp_path, FAMILIES["bitnet-offline"]), tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


# Memory ------------------------------------------------------------------------------------------

_MEMORY_SCRIPT = """
import sys, threading, time
from bitnet_ops.convert import convert
def resident():
    with open("/proc/self/status") as f:
        kib = {l.split()[0]: int(l.split()[1]) for l in f if l.startswith("Rss")}
    return kib["RssAnon:"] * 1024, kib["RssFile:"] * 1024
convert(sys.argv[1], sys.argv[2])  # once, so that libraries have their buffers
base, peak, stop = resident(), (0, 0), threading.Event()
def watch():
    global peak
    while not stop.is_set():
        peak = tuple(map(max, peak, resident()))
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
convert(sys.argv[1], sys.argv[3])
stop.set()
thread.join()
print(*(p - b for p, b in zip(peak, base)))
"""


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_memory_is_bounded_by_the_largest_tensor(mode, tmp_path):
    """12 layers of 3.7 million weights each: the peak stays at a few tensors, not at the model."""
    base = FAMILIES["bitnet-offline" if mode == "offline" else "bitnet-online"]
    family = hf_writer.Family(
        **{
            **base.__dict__,
            "name": "memory",
            "hidden": 512,
            "inter": 2048,
            "layers": 12,
            "heads": 8,
        }
    )
    source = write(tmp_path, family)
    largest_elems = family.inter * family.hidden
    arguments = [str(source), str(tmp_path / "a"), str(tmp_path / "b")]
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY_SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=True,
        # freed blocks go back at once: the peak is what the converter holds, not what malloc keeps
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    peak, mapped = map(int, result.stdout.split())
    whole = family.layers * (3 * largest_elems + 2 * 512 * 512 + 2 * 512 * 128)
    assert peak < 7 * largest_elems < whole / 5, f"peak {peak}, largest tensor {largest_elems}"
    # pages of the checkpoint that stay mapped count as well: those of one tensor, f32 at most
    assert mapped < 5 * largest_elems, f"{mapped} bytes of files, largest tensor {largest_elems}"


# The command line --------------------------------------------------------------------------------


def run_command(*arguments):
    return main(["convert", *map(str, arguments)])


def test_command_prints_a_summary(tmp_path, capsys):
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    assert run_command(source, tmp_path / "out", "--verify") == 0
    output = capsys.readouterr()
    assert f"wrote {tmp_path / 'out'}" in output.out
    assert "14 ternary" in output.out and "top-1" in output.out
    assert re.sub(r"\d+ s: converting .*\n", "", output.err) == ""  # said where it takes long


def test_command_prints_json(tmp_path, capsys):
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    assert run_command(source, tmp_path / "out", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_before_every_name_is_taken_away(prefix, tmp_path):
    family = FAMILIES["bitnet-online-untied-fp32"]
    plain = hf_writer.write_checkpoint(tmp_path / "plain", family)
    wrapped = hf_writer.write_checkpoint(tmp_path / "wrapped", family)
    tensors = load_file(wrapped / "model.safetensors")
    save_file({prefix + n: t for n, t in tensors.items()}, wrapped / "model.safetensors")
    report = convert(wrapped, tmp_path / "a", verify=True)
    assert f"every name begins with {prefix}, which a wrapper left; taken away" in report.remarks
    assert report.sha256 != convert(plain, tmp_path / "b").sha256  # that of the proof is in it
    assert diff(tmp_path / "a", tmp_path / "b")["equal"]


def test_what_is_wrong_with_a_tokenizer_is_said_at_once(tmp_path):
    source = hf_writer.write_checkpoint(
        tmp_path / "source", FAMILIES["bitnet-offline"], tokenizer=False
    )
    assert not any("token" in remark for remark in convert(source, tmp_path / "a").remarks)
    (source / "tokenizer.model").touch()
    remarks = convert(source, tmp_path / "b").remarks
    assert any("tokenizer.model are not read" in r and "AutoTokenizer" in r for r in remarks)
    shutil.copyfile(DEMO_DIR / "tokenizer.json", source / "tokenizer.json")  # 4,096 of 300
    remarks = convert(source, tmp_path / "c").remarks
    assert any("3796 tokens have ids from 300 on" in remark for remark in remarks)
    (source / "tokenizer_config.json").write_bytes(b'\xef\xbb\xbf{"eos_token": "</s>"}')
    convert(source, tmp_path / "d")
    assert Tokenizer.from_dir(tmp_path / "d").special_tokens == {"eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text("{")
    remarks = convert(source, tmp_path / "e").remarks
    assert any("token ids alone: tokenizer: expected valid JSON" in remark for remark in remarks)


def test_command_prints_one_line_on_rejection(tmp_path, capsys):
    assert run_command(tmp_path / "nothing", tmp_path / "out") == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("bitnet-ops: error: convert: expected a folder")
    assert output.err.endswith(" [source-missing]\n")


def test_progress_counts_every_tensor(tmp_path):
    seen = []
    family = FAMILIES["bitnet-offline"]
    convert(
        write(tmp_path, family),
        tmp_path / "out",
        progress=lambda done, total, name: seen.append((done, total, name)),
    )
    total = len(hf_writer.make_network(family))
    assert [s[0] for s in seen] == list(range(total)) and {s[1] for s in seen} == {total}
    assert seen[0][2] == "model.embed_tokens.weight"


@pytest.mark.parametrize("script", ["convert_hf.py", "convert_to_sglkernel.py"])
def test_progress_bar_on_a_terminal(tmp_path, script):
    """Under a pseudo-terminal the bar is drawn on stderr and stdout stays clean."""
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    master, slave = os.openpty()
    drawn = []

    def collect():
        try:
            while chunk := os.read(master, 4096):
                drawn.append(chunk)
        except OSError:  # Linux reports a closed terminal this way
            pass

    reader = threading.Thread(target=collect)
    reader.start()
    command = [sys.executable, str(ROOT / "scripts" / script), str(source), str(tmp_path / "out")]
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env={**os.environ, "TERM": "xterm"},
        timeout=120,
    )
    os.close(slave)
    reader.join()
    os.close(master)
    assert result.returncode == 0 and "wrote" in result.stdout
    assert b"/24" in b"".join(drawn), "24 tensors in all"
