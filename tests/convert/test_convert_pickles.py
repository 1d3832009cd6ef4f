"""Pickled weights: read on request, as tensors alone; everything else in a pickle is rejected.

test_convert_rejections.py has what is rejected without --allow-pickle.
"""

import json
import pickle
import zipfile

import pytest
import torch
from test_convert_rejections import check_rejected
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

import hf_writer
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.formats.sglbitnt import Reader
from hf_families import CASES

FAMILY = CASES["1bitllm-3b"].family


@pytest.fixture
def tensors(tmp_path):
    """The tensors of a checkpoint whose safetensors lie in `same` and whose config in `source`."""
    hf_writer.write_checkpoint(tmp_path / "same", FAMILY)
    hf_writer.write_checkpoint(tmp_path / "source", FAMILY)
    (tmp_path / "source" / "model.safetensors").unlink()
    return hf_writer.state_dict(FAMILY, hf_writer.make_network(FAMILY))


def check_equal(tmp_path):
    report = convert(tmp_path / "source", tmp_path / "out", allow_pickle=True)
    assert any("weights_only=True" in remark for remark in report.remarks)
    convert(tmp_path / "same", tmp_path / "expected")
    with Reader(tmp_path / "out" / "model.bin") as a:
        with Reader(tmp_path / "expected" / "model.bin") as b:
            assert list(a.tensors) == list(b.tensors)
            assert all(bytes(a.memory(name)) == bytes(b.memory(name)) for name in a.tensors)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_tensors_converts_on_request(zipped, tensors, tmp_path):
    path = tmp_path / "source" / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    check_equal(tmp_path)


def test_shards(tensors, tmp_path):
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
        torch.save({n: tensors[n] for n in part}, tmp_path / "source" / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "source" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_equal(tmp_path)
    weight_map.popitem()
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConvertError) as caught:
        convert(tmp_path / "source", tmp_path / "again", allow_pickle=True)
    assert caught.value.code == "index-mismatch"


class Malicious:
    def __reduce__(self):
        return open, ("pwned", "w")


REJECTED = {
    "code": (lambda t: {**t, "x": Malicious()}, "pickle-unsafe", "tensors alone"),
    "a list": (lambda t: list(t.values()), "pickle-content", "a dict of tensors.*list"),
    "nothing": (lambda t: {}, "pickle-content", "a dict of tensors"),
    "a number": (lambda t: {**t, "step": 5}, "pickle-content", "step"),
    "sparse": (lambda t: {**t, "s": torch.eye(3).to_sparse()}, "pickle-content", "dense tensors"),
    "a repeated value": (
        lambda t: {
            n: v.flatten()[:1].clone().expand(v.numel()).view(v.shape) for n, v in t.items()
        },
        "pickle-content",
        "with fewer",
    ),
    "one storage for many": (
        lambda t: {**t, **{f"x{i}": t["model.embed_tokens.weight"] for i in range(99)}},
        "pickle-content",
        "values of its own",
    ),
    "float64": (lambda t: {n: v.double() for n, v in t.items()}, "dtype", "F64"),
    "a missing one": (lambda t: dict(list(t.items())[1:]), "missing-tensor", "embed_tokens"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_pickles(name, tensors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoil, code, words = REJECTED[name]
    torch.save(spoil(tensors), tmp_path / "source" / "pytorch_model.bin")
    check_rejected(tmp_path, code, words, allow_pickle=True)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", pickle.dumps({"a": 1})])
def test_damaged_pickles(content, tensors, tmp_path):
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(content)
    check_rejected(tmp_path, "pickle-unsafe", "pytorch_model.bin", allow_pickle=True)


def nested(times, repeat=b"\x85"):
    """The bytes of a pickle that puts an empty tuple into tuples, one in another."""
    return b")" + repeat * times


DEEP, DOUBLED = nested(300000), nested(60, b"2\x86")  # TUPLE1; DUP, TUPLE2: the same one twice
PICKLES = {
    "a deep key": (b"}" + DEEP + b"K\x01s.", "a tuple of more than 1000 parts"),
    "a key of 2^60 parts": (b"}" + DOUBLED + b"K\x01s.", "a tuple of more than 1000 parts"),
    "by the memo": (
        b"})" + b"".join(b"q%ch%ch%c\x87" % (i, i, i) for i in range(60)) + b"K\x01s.",
        "a tuple of more than 1000 parts",
    ),
    "a wide key": (b"}((" + b"K\x01" * 2000 + b"ttK\x01s.", "a tuple of more than 1000 parts"),
    "a deep value": (b"}K\x01" + DEEP + b"s.", "a tuple of more than 1000 parts"),
    "a shallow key": (b"}" + nested(20) + b"K\x01s.", "dense tensors alone"),
    "a call with too little": (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "TypeError"),
    "a call with other things": (b"ctorch._utils\n_rebuild_tensor_v2\n(]]]]]]tR.", "Error"),
    "an empty stack": (b"s.", "IndexError"),
    "no such memo": (b"h\x07.", "KeyError"),
    "nested lists": (b"]" * 300000 + b"a" * 299999 + b".", "a dict of tensors"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.sampled(9)
def test_pickles_that_no_save_writes(name, zipped, tensors, tmp_path):
    """Each ended the process, or in an exception of Python's."""
    body, words = PICKLES[name]
    torch.save(tensors, tmp_path / "plain", _use_new_zipfile_serialization=zipped)
    target = tmp_path / "source" / "pytorch_model.bin"
    if zipped:
        with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(target, "w") as made:
            for record in plain.namelist():
                hostile = record.endswith("data.pkl")
                made.writestr(record, b"\x80\x02" + body if hostile else plain.read(record))
    else:
        head = [pickle.dumps(value, 2) for value in (MAGIC_NUMBER, PROTOCOL_VERSION, {})]
        target.write_bytes(b"".join([*head, b"\x80\x02" + body, pickle.dumps([], 2)]))
    with pytest.raises(ConvertError, match=words) as caught:
        convert(tmp_path / "source", tmp_path / "out", allow_pickle=True)
    assert len(str(caught.value)) < 400 and not (tmp_path / "out").exists()


def test_compressed_archives(tensors, tmp_path):
    """A few bytes could stand for a thousand times as many."""
    torch.save(tensors, tmp_path / "plain")
    target = tmp_path / "source" / "pytorch_model.bin"
    with zipfile.ZipFile(tmp_path / "plain") as plain:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in plain.namelist():
                packed.writestr(name, plain.read(name))
    check_rejected(tmp_path, "pickle-unsafe", "compressed records", allow_pickle=True)


def test_another_name(tensors, tmp_path):
    torch.save(tensors, tmp_path / "source" / "consolidated.00.pth")
    check_rejected(tmp_path, "pickle", "rename the file", allow_pickle=True)
