"""What the converter rejects: one row a reason, each with its stable code and the words that help.

The rows are in rejection_rows.py, what concerns files and destinations is here; nothing may be left
at the destination, and the message is one line. test_every_code_is_tested keeps both complete.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import hf_writer
import rejection_rows
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert, export_gguf
from bitnet_ops.convert.diff import diff
from bitnet_ops.convert.inspect import inspect
from bitnet_ops.convert.quantize import quantize
from bitnet_ops.convert.verify import verify
from bitnet_ops.formats.gguf import Reader as GgufReader
from bitnet_ops.formats.sglbitnt import Reader as SglbitntReader
from bitnet_ops.language_model import DEMO_DIR
from bitnet_ops.untrusted import UntrustedFileError, read_json_object
from hf_writer import FAMILIES
from rejection_rows import EVERY, Q_PROJ, ROWS, Draft, without_quantization

CONVERT_SOURCES = Path(__file__).resolve().parents[2] / "python" / "bitnet_ops" / "convert"
AT_LEAST = 60  # bad checkpoints, each with a line of its own


def test_there_are_rows_enough():
    assert len({row[0] for row in ROWS}) == len(ROWS) >= AT_LEAST


@pytest.mark.parametrize(
    "code, family, words, change", [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_rejection(code, family, words, change, tmp_path):
    draft = Draft(tmp_path / "source", EVERY[family])
    change(draft)
    draft.write()
    check_rejected(tmp_path, code, words)


def check_rejected(tmp_path, code, words, **options):
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ConvertError) as caught:
        convert(tmp_path / "source", tmp_path / "out", **options)
    message = str(caught.value)
    assert caught.value.code == code, message
    assert message.startswith("convert: ") and "expected" in message
    assert message.endswith(f" [{code}]")
    assert re.search(words, message), message
    assert "\n" not in message and len(message) < 500
    assert sorted(p.name for p in tmp_path.iterdir()) == before, "nothing may be left behind"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("convert", lambda broken, out: convert(broken, out)),
        ("quantize", lambda broken, out: quantize(broken, out)),
        ("verify", lambda broken, out: verify(DEMO_DIR, broken)),
        ("inspect", lambda broken, out: inspect(broken)),
        ("inspect", lambda broken, out: diff(DEMO_DIR, broken)),
        ("export", lambda broken, out: export_gguf(DEMO_DIR, out, type="q4_0")),
    ],
)
def test_an_error_begins_with_the_function_that_was_called(name, call, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[]")
    with pytest.raises(ConvertError, match=f"^{name}: expected "):
        call(tmp_path / "broken", tmp_path / "out")


def test_assume_online_rejects_packed_weights(tmp_path):
    draft = Draft(tmp_path / "source", FAMILIES["llama-bitlinear"])
    without_quantization(draft)
    draft.write()
    check_rejected(tmp_path, "packed-under-online", "weight_scale", assume_online=True)


def test_assume_online_rejects_ternary_weights(tmp_path):
    """Dense weights that are ternary already (an unpacked model): their mean is not their scale."""
    draft = Draft(tmp_path / "source", FAMILIES["llama-online"])
    without_quantization(draft)
    draft.tensors[Q_PROJ] = torch.sign(draft.tensors[Q_PROJ]) * 0.25
    draft.tensors[Q_PROJ][:, ::3] = 0
    draft.write()
    check_rejected(tmp_path, "already-ternary", "only one magnitude", assume_online=True)


@pytest.mark.parametrize(
    "options, code",
    [(["--i2s-layout", "b"], "gguf-option"), (["--tokenizer", "none"], "gguf-option")],
)
def test_options_of_the_other_kind_of_source(options, code, source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "out"), *options]) == 1
    assert f" [{code}]\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--trust-scales", "--allow-pickle"])
def test_options_of_folders_with_a_file(option, tmp_path, capsys):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    assert main(["convert", str(file), str(tmp_path / "out"), option]) == 1
    code = "folder-option"
    assert f" [{code}]\n" in capsys.readouterr().err


def test_quantize_rejects_what_is_no_master(tmp_path):
    folder = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-offline"])
    with pytest.raises(ConvertError, match="bitlinear offline, ternary already") as caught:
        quantize(folder, tmp_path / "out")
    assert caught.value.code == "packed-source"


def test_quantize_needs_a_tokenizer_for_a_text(tmp_path):
    folder = tmp_path / "source"
    hf_writer.write_checkpoint(folder, FAMILIES["bitnet-online"], tokenizer=False)
    (tmp_path / "text").write_text("ten words")
    with pytest.raises(ConvertError, match="tokenizer.json in .*needs a tokenizer") as caught:
        quantize(folder, tmp_path / "out", text=tmp_path / "text")
    assert caught.value.code == "text-tokenizer"


# Files -------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    return hf_writer.write_checkpoint(
        tmp_path / "source", FAMILIES["bitnet-offline"], tokenizer=False
    )


@pytest.fixture
def sharded(tmp_path):
    family = FAMILIES["bitnet-offline"]
    return hf_writer.write_checkpoint(tmp_path / "source", family, shards=3, tokenizer=False)


INDEX = "model.safetensors.index.json"


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_no_source(tmp_path):
    check_rejected(tmp_path, "source-missing", "a folder with config.json")


def test_an_adapter_beside_a_checkpoint(source, tmp_path):
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    check_rejected(tmp_path, "adapter-beside", "--lora .*source merges it")


def test_a_name_twice_in_a_header(source, tmp_path):
    """The library takes the last one and says nothing."""
    file = source / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    name = b'"model.norm.weight":'
    entry = data[8 : 8 + size].partition(name)[2].partition(b"}")[0]
    header = b"{" + name + entry + b"}," + data[9 : 8 + size]
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    assert safe_open(file, "pt").keys(), "the library takes it"
    check_rejected(tmp_path, "safetensors-corrupt", "a key twice: 'model.norm.weight'")


@pytest.mark.parametrize("kind", ["folder", "gguf", "bin"])
def test_a_source_that_changes_while_it_is_converted(kind, source, tmp_path):
    """Written to in place, at the same size, once the first tensors are read."""
    if kind == "folder":
        path = file = source
        file = source / "model.safetensors"
    else:
        convert(source, tmp_path / "model")
        path = file = tmp_path / "model" / "model.bin"
        if kind == "gguf":
            path = file = tmp_path / "source.gguf"
            export_gguf(tmp_path / "model", file, tokenizer=False)

    def overwrite(done, total, name):
        if done == total - 1:
            with file.open("r+b") as f:
                f.seek(-1, 2)
                last = f.read(1)
                f.seek(-1, 2)
                f.write(last)

    with pytest.raises(ConvertError) as caught:
        convert(path, tmp_path / "out", progress=overwrite)
    assert caught.value.code == "source-changed" and not (tmp_path / "out").exists()


NO_WEIGHTS = {  # what lies there instead -> words
    "a shard": (["model-00001-of-00002.safetensors"], "got model-00001-of-0.*finish the download"),
    "another name": (["consolidated.safetensors"], "rename the file to model.safetensors"),
    "a link to nothing": (["model.safetensors ->"], "a link to a file that is not .*finish"),
    "a shard's link": (["model-1-of-2.safetensors ->"], "a link to a file that is not .*finish"),
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_no_weights_under_their_names(name, source, tmp_path):
    files, words = NO_WEIGHTS[name]
    (source / "model.safetensors").unlink()
    for file in files:
        plain = file.removesuffix(" ->")
        if plain == file:
            (source / plain).touch()
        else:
            (source / plain).symlink_to("../../blobs/0123")
    check_rejected(tmp_path, "weights-missing", words)


def test_links_to_nothing_in_other_places(sharded, tmp_path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    (sharded / "model-00002-of-00003.safetensors").symlink_to("../../blobs/0123")
    check_rejected(tmp_path, "shard-missing", "a link to a file that is not there")
    (sharded / "config.json").unlink()
    (sharded / "config.json").symlink_to("../../blobs/0123")
    check_rejected(tmp_path, "config-missing", "a link to a file that is not there")


def test_a_file_of_a_checkpoint(source, tmp_path):
    with pytest.raises(ConvertError, match="name the folder that it is in.*source-missing"):
        convert(source / "model.safetensors", tmp_path / "out")


def test_no_config(source, tmp_path):
    (source / "config.json").unlink()
    check_rejected(tmp_path, "config-missing", "is this a model folder")


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "valid JSON"),
        ("[]", "a JSON object"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ('{"rms_norm_eps": NaN}', "NaN"),
        ("[" * 100_000, "nested at most 64 deep"),
        (b"\xff{}", "UTF-8 in .*byte 0xff at offset 0"),
    ],
)
def test_malformed_config(text, words, source, tmp_path):
    (source / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    check_rejected(tmp_path, "config-json", words)


def test_no_weights(source, tmp_path):
    (source / "model.safetensors").unlink()
    check_rejected(tmp_path, "weights-missing", "no weights")


def test_gguf_only(source, tmp_path):
    (source / "model.safetensors").rename(source / "model.gguf")
    check_rejected(tmp_path, "weights-missing", "model.gguf")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(name, source, tmp_path):
    (source / "model.safetensors").unlink()
    (source / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    check_rejected(tmp_path, "pickle", f"{name}.*--allow-pickle")
    assert not Path("pwned").exists()


def test_two_sets_of_weights(sharded, tmp_path):
    (sharded / "model.safetensors").write_bytes(b"")
    check_rejected(tmp_path, "ambiguous-weights", "both")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_safetensors(size, source, tmp_path):
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:size])
    check_rejected(tmp_path, "safetensors-corrupt", "download it again")


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_clone_without_git_lfs(name, source, tmp_path):
    """Weights are what git-lfs has not brought; some repositories keep tokenizers there too."""
    (source / name).write_text(LFS_POINTER)
    check_rejected(tmp_path, "lfs-pointer", "got a Git LFS pointer in its place; run git lfs pull")


def test_files_that_are_git_lfs_pointers(tmp_path):
    for name, kind in (("m.bin", SglbitntReader), ("m.gguf", GgufReader)):
        (tmp_path / name).write_text(LFS_POINTER)
        with pytest.raises(ValueError, match=f"{name}: expected .*, got a Git LFS pointer .*magic"):
            kind(tmp_path / name)
    with pytest.raises(UntrustedFileError, match="got a Git LFS pointer"):
        read_json_object(tmp_path / "m.bin")


def test_an_adapter_is_no_model(source, tmp_path):
    (source / "config.json").rename(source / "adapter_config.json")
    check_rejected(tmp_path, "config-missing", "got a LoRA adapter; name the model it is for")


def test_huge_safetensors_header(source, tmp_path):
    (source / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    check_rejected(tmp_path, "safetensors-corrupt", "valid safetensors")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "nonsense"])
def test_malformed_index(text, sharded, tmp_path):
    (sharded / INDEX).write_text(text)
    check_rejected(tmp_path, "index-json", "")


@pytest.mark.parametrize(
    "path", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", 7, "x.bin"]
)
def test_index_that_points_elsewhere(path, sharded, tmp_path):
    edit_index(sharded, lambda weight_map: weight_map.update({Q_PROJ: path}))
    check_rejected(tmp_path, "index-path", "plain .*safetensors names")


def test_missing_shard(sharded, tmp_path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    check_rejected(tmp_path, "shard-missing", "without model-00002-of-00003.safetensors")


def test_index_names_a_tensor_that_is_not_there(sharded, tmp_path):
    first = "model-00001-of-00003.safetensors"
    edit_index(sharded, lambda weight_map: weight_map.update({"model.extra": first}))
    check_rejected(tmp_path, "index-mismatch", "model.extra")


def test_index_forgets_a_tensor(sharded, tmp_path):
    edit_index(sharded, lambda weight_map: weight_map.pop(Q_PROJ))
    check_rejected(tmp_path, "index-mismatch", "q_proj")


def test_tensor_in_two_shards(sharded, tmp_path):
    third = sharded / "model-00003-of-00003.safetensors"
    third.write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    check_rejected(tmp_path, "duplicate-tensor", "00001.* and .*00003")


# Destinations ------------------------------------------------------------------------------------


def test_destination_exists(source, tmp_path):
    (tmp_path / "out").mkdir()
    check_rejected(tmp_path, "destination-exists", "--force replaces it")


def test_force_does_not_delete_other_files(source, tmp_path):
    convert(source, tmp_path / "out")
    (tmp_path / "out" / "thesis.txt").write_text("ten years")
    check_rejected(tmp_path, "destination-foreign", "thesis.txt", force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "ten years"


def test_force_does_not_replace_a_file(source, tmp_path):
    (tmp_path / "out").write_text("a file")
    check_rejected(tmp_path, "destination-foreign", "which is none", force=True)


def test_force_does_not_follow_a_link(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    check_rejected(tmp_path, "destination-foreign", "which is none", force=True)


@pytest.mark.parametrize("inside", ["out", "."])
def test_destination_in_source(inside, source, tmp_path):
    with pytest.raises(ConvertError) as caught:
        convert(source, source / inside, force=True)
    assert caught.value.code == "destination-in-source"
    assert (source / "model.safetensors").is_file()


def test_destination_without_parent(source, tmp_path):
    with pytest.raises(ConvertError, match="an existing folder") as caught:
        convert(source, tmp_path / "no" / "out")
    assert caught.value.code == "destination-parent"


# The table is complete ---------------------------------------------------------------------------


def test_every_code_is_tested():
    """Each code that the converter can reject with occurs in the tests; GGUF has its own."""
    raised = set()
    files = [path for path in CONVERT_SOURCES.rglob("*.py") if "gguf" not in str(path)]
    for path in [*files, CONVERT_SOURCES.parent / "config" / "scheme.py"]:
        text = path.read_text()
        raised |= set(re.findall(r'SchemeError\(\s*"([a-z0-9-]+)"', text))
        raised |= set(re.findall(r'reject\(\s*"([a-z0-9-]+)"', text))
        for call in re.findall(r"_read_object\((.*)\)", text):
            raised |= set(re.findall(r'"([a-z]+-[a-z]+)"', call))
        raised |= set(re.findall(r'ConvertError\(\s*"([a-z0-9-]+)"', text))
        raised |= set(re.findall(r'^    \("[^"]+", "([a-z0-9-]+)", ', text, re.MULTILINE))
    assert len(raised) >= 62
    files = [*Path(__file__).resolve().parents[1].rglob("test_*.py"), Path(rejection_rows.__file__)]
    tests = "".join(path.read_text() for path in files)
    untested = sorted(code for code in raised if not re.search(rf'["\[*]{code}\b', tests))
    assert untested == []
