"""The converter on checkpoints of an independent writer: every family, bit for bit, nothing half.

Expected bytes come from hf_writer (which shares no code with the package) and from golden vectors;
the canonical packing is unpacked here by the layout's definition. Rejections are in
test_convert_rejections.py, full logits against transformers in test_oracle_hf.py.
"""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import forward_fp64
import golden
import hf_writer
from bitnet_ops.convert import ConvertError, convert, hf_source
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.comparison import verify_conversion
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.oracles import HfOracle, OracleUnavailable, PlainOracle
from bitnet_ops.formats.sglbitnt import Reader
from hf_writer import FAMILIES
from isa_control import torch_threads

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path(__file__).resolve().parents[1] / "data" / "demo-model"


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices this small are slower on several threads; results are the same bit for bit."""
    with torch_threads(1):
        yield


def write(tmp_path, family, **options):
    return hf_writer.write_checkpoint(tmp_path / "source", family, **options)


def unpack_canonical(packed, in_features):
    """uint8 [N, R] -> int [N, K]: block of 32 bytes, lane 0 of 128 weights in the highest bits."""
    blocks = np.asarray(packed).reshape(packed.shape[0], -1, 1, 32)
    lanes = (blocks >> np.array([6, 4, 2, 0], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3
    codes = lanes.reshape(packed.shape[0], -1).astype(np.int64) - 1
    assert (codes[:, in_features:] == 0).all(), "padding must be weight 0"
    return codes[:, :in_features]


def leftovers(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "source")


# The writer itself -------------------------------------------------------------------------------


def test_writer_packs_the_documented_example():
    rows = np.array(golden.HF_DOC_ROWS)
    assert hf_writer.pack_quarters(rows).tolist() == golden.HF_DOC_BYTES
    wrong = np.array(golden.HF_DOC_ROWS_INTERLEAVED)
    assert hf_writer.unpack_strided(hf_writer.pack_quarters(rows)).tolist() == wrong.tolist()


def test_writer_packs_the_golden_matrix():
    codes = golden.golden_codes().numpy().reshape(16, 16)
    assert hf_writer.pack_quarters(codes).tobytes().hex() == golden.HF_HEX


def test_canonical_unpacking_of_these_tests_reads_the_golden_row():
    row = np.frombuffer(bytes.fromhex(golden.I2S_A_HEX), dtype=np.uint8).reshape(1, 64)
    assert unpack_canonical(row, 256)[0].tolist() == golden.golden_codes().tolist()


# Every family ------------------------------------------------------------------------------------


class Converted:
    """A family's network, its checkpoint, and what was made of it with --verify."""

    def __init__(self, folder, family):
        self.family, self.network = family, hf_writer.make_network(family)
        self.source = write(folder, family, network=self.network)
        self.out = folder / "out"
        self.report = convert(self.source, self.out, verify=True)


@pytest.fixture(scope="module", params=FAMILIES)
def converted(request, tmp_path_factory):
    return Converted(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def test_family_converts_and_verifies(converted):
    report, family = converted.report, converted.family
    proof = report.verification
    assert proof["passed"] and proof["failures"] == []
    assert proof["oracle"].startswith("transformers "), proof["why_not_transformers"]
    assert proof["projections"] == 7 * family.layers
    assert proof["weights_different"] == 0
    assert proof["logits"]["tokens"] == 256
    assert proof["logits"]["relative_logit_difference"] < 0.1
    stored = json.loads((converted.out / "report.json").read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert report.remarks == [], "of an ordinary checkpoint"


def test_codes_scales_and_dense_bits_are_those_of_the_writer(converted):
    family, network = converted.family, converted.network
    with Reader(converted.out / "model.bin") as reader:
        assert len(reader.tensors) == len(network)
        checked = 0
        for name, value in network.items():
            tensor = reader.tensor(f"{name}.weight")
            if not isinstance(value, dict):
                assert tensor.dtype == hf_writer.DTYPES[family.dtype]
                assert torch.equal(tensor.double(), torch.from_numpy(value)), name
                continue
            expected, scale = forward_fp64.ternary(value, family.reciprocal)
            codes = unpack_canonical(tensor, expected.shape[1])
            assert (codes == expected.numpy()).all(), name
            assert reader.tensors[f"{name}.weight"].scale == pytest.approx(scale, rel=2e-7)
            checked += 1
        assert checked == 7 * family.layers


def test_config_is_kept_and_says_how_it_was_read(converted):
    family = converted.family
    with Reader(converted.out / "model.bin") as reader:
        config = dict(reader.config)
    block = config.pop("bitnet_ops")
    assert config == hf_writer.config_dict(family)
    assert block["format_version"] == 1
    assert block["source_linear_class"] == (family.linear_class or "bitlinear")
    assert block["source_mode"] == (family.mode or "offline")
    assert block["rope_theta"] == family.theta and block["rms_norm_eps"] == family.eps


def test_plain_forward_agrees_with_transformers_and_fp64(converted):
    """The two references of --verify and the float64 forward, on a prompt without rounding ties."""
    source = HfSource(Checkpoint(converted.source))
    ids, margin = forward_fp64.clear_prompt(converted.family.name)
    assert margin > 2e-5
    expected, _ = forward_fp64.forward(converted.family, converted.network, ids)
    for oracle in (PlainOracle(source), HfOracle(source)):
        difference = (oracle.logits([ids])[0] - expected).abs().max()
        assert difference < 5e-6 * expected.abs().max(), oracle.name


# One of each kind of storage: packed with a scale that divides, that multiplies, and masters.
KINDS = ("bitnet-offline", "llama-autobitlinear", "bitnet-online", "bitnet-odd-k")


@pytest.mark.parametrize("name", KINDS)
def test_sharded_equals_unsharded(name, tmp_path):
    family = FAMILIES[name]
    network = hf_writer.make_network(family)
    hf_writer.write_checkpoint(tmp_path / "one", family, network=network)
    hf_writer.write_checkpoint(tmp_path / "three", family, shards=3, network=network)
    assert len(list((tmp_path / "three").glob("*.safetensors"))) == 3
    one = convert(tmp_path / "one", tmp_path / "out-one")
    three = convert(tmp_path / "three", tmp_path / "out-three")
    assert one.sha256 == three.sha256


@pytest.mark.parametrize("name", KINDS)
def test_verify_without_transformers_uses_the_plain_forward(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes `import transformers` fail
    report = convert(write(tmp_path, FAMILIES[name]), tmp_path / "out", verify=True)
    assert report.verification["oracle"] == "plain fp64 forward"
    assert "not installed" in report.verification["why_not_transformers"]
    assert report.verification["passed"] and report.verification["weights_different"] == 0


# What travels along ------------------------------------------------------------------------------


def test_tokenizer_travels(tmp_path):
    source = write(tmp_path, FAMILIES["bitnet-offline"])
    (source / "chat_template.jinja").write_text("{{ messages }}")
    report = convert(source, tmp_path / "out")
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    names.append("chat_template.jinja")
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(report.files) == sorted(["model.bin", *names])
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*report.files, "report.json"])


def test_without_tokenizer_random_ids_are_compared(tmp_path):
    source = write(tmp_path, FAMILIES["llama-bitlinear"], tokenizer=False)
    report = convert(source, tmp_path / "out", verify=True)
    assert report.verification["text"] == "random token ids, seed 0"
    assert report.verification["logits"]["tokens"] == 3 * 64
    assert sorted(os.listdir(tmp_path / "out")) == ["model.bin", "report.json", "report.txt"]


def test_report_says_what_was_done(tmp_path):
    family = FAMILIES["bitnet-odd-k"]
    network = hf_writer.make_network(family)
    source = write(tmp_path, family, network=network)
    (source / "modeling_bitnet.py").write_text("raise SystemExit('never run')")
    report = convert(source, tmp_path / "out").to_dict()
    codes = [v["codes"] for v in network.values() if isinstance(v, dict)]
    assert report["ternary"]["projections"] == len(codes)
    assert report["ternary"]["weights"] == sum(c.size for c in codes)
    assert report["ternary"]["zeros"] == sum((c == 0).sum() for c in codes)
    assert report["output_bytes"] == (tmp_path / "out" / "model.bin").stat().st_size
    assert report["verification"] is None
    assert {"bitnet-ops", "torch", "safetensors", "python"} <= set(report["versions"])
    assert any("modeling_bitnet.py" in remark for remark in report["remarks"])


def _edited(tmp_path, family, config=None, tensors=None):
    """The family's checkpoint with changed config keys and added or replaced tensors."""
    source = write(tmp_path, family)
    settings = {**hf_writer.config_dict(family), **(config or {})}
    (source / "config.json").write_text(json.dumps(settings))
    state = hf_writer.state_dict(family, hf_writer.make_network(family))
    hf_writer.write_tensors(source, {**state, **(tensors or {})})
    return source


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
REMARKS = [
    ("auto_map", "bitnet-offline", {"auto_map": {"AutoConfig": "x.Y"}}, {}, "auto_map.*never run"),
    ("inv-freq", "llama-bitlinear", {},
     {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}, "1 rotary inv_freq"),
    ("zeros", "bitnet-online", {}, {Q_PROJ: torch.zeros(256, 256)}, "zeros alone"),
    ("ternary-masters", "bitnet-online", {}, {Q_PROJ: torch.eye(256)}, "one magnitude beside zero"),
    ("diffusion", "bitnet-online",
     {"architectures": ["BitnetForCausalLM"], "bd_size": 32, "mask_token_id": 299}, {},
     "block-diffusion model"),
]  # fmt: skip


@pytest.mark.parametrize(
    "family, config, tensors, words", [r[1:] for r in REMARKS], ids=[r[0] for r in REMARKS]
)
def test_what_is_odd_is_said(family, config, tensors, words, tmp_path):
    """Accepted, but worth a remark in the report."""
    report = convert(_edited(tmp_path, FAMILIES[family], config, tensors), tmp_path / "out")
    assert any(re.search(words, remark) for remark in report.remarks), report.remarks


def test_repeated_tied_head_is_dropped(tmp_path):
    family = FAMILIES["bitnet-offline"]
    source = write(tmp_path, family)
    tensors = hf_writer.state_dict(family, hf_writer.make_network(family))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    hf_writer.write_tensors(source, tensors)
    report = convert(source, tmp_path / "out", verify=True)
    assert any("repeats the embedding" in remark for remark in report.remarks)
    with Reader(tmp_path / "out" / "model.bin") as reader:
        assert "lm_head.weight" not in reader.tensors


def test_assume_online_equals_the_declared_one(tmp_path):
    family = FAMILIES["llama-online"]
    declared = convert(write(tmp_path, family), tmp_path / "declared")
    config = hf_writer.config_dict(family)
    del config["quantization_config"]
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assumed = convert(tmp_path / "source", tmp_path / "assumed", assume_online=True, verify=True)
    assert assumed.assumed_online and not declared.assumed_online
    assert assumed.verification["oracle"] == "plain fp64 forward"
    assert any("on the caller's word" in remark for remark in assumed.remarks)
    with (
        Reader(tmp_path / "declared" / "model.bin") as a,
        Reader(tmp_path / "assumed" / "model.bin") as b,
    ):
        assert list(a.tensors) == list(b.tensors)
        assert all(bytes(a.memory(name)) == bytes(b.memory(name)) for name in a.tensors)


def test_r7_masters_are_ternarised_by_their_mean(tmp_path):
    """R7: absmean rounding gives Gaussian masters 31 % zeros; a sign or an absmax would not."""
    family = FAMILIES["bitnet-online"]
    network = hf_writer.make_network(family)
    source = write(tmp_path, family, network=network)
    report = convert(source, tmp_path / "out")
    assert report.to_dict()["ternary"]["zero_share"] == pytest.approx(0.31, abs=0.01)
    means = [np.abs(v["masters"]).mean() for v in network.values() if isinstance(v, dict)]
    assert report.ternary.smallest_scale == pytest.approx(min(means), rel=2e-7)
    assert report.ternary.largest_scale == pytest.approx(max(means), rel=2e-7)


def test_k10_masters_made_offline_elsewhere_convert_alike(tmp_path):
    """K10: masters ternarised and packed by another script, then read as offline weights."""
    online = FAMILIES["bitnet-online-untied-fp32"]
    network = hf_writer.make_network(online)
    convert(write(tmp_path, online, network=network), tmp_path / "online")
    packed = {}
    for name, value in network.items():
        packed[name] = value
        if isinstance(value, dict):
            codes, scale = forward_fp64.ternary(value, reciprocal=False)
            packed[name] = {"codes": codes.numpy().astype(np.int8), "stored_scale": scale}
    offline = dataclasses.replace(online, mode="offline")
    hf_writer.write_checkpoint(tmp_path / "packed", offline, network=packed)
    convert(tmp_path / "packed", tmp_path / "offline")
    with Reader(tmp_path / "online" / "model.bin") as a:
        with Reader(tmp_path / "offline" / "model.bin") as b:
            assert list(a.tensors) == list(b.tensors)
            for name, info in a.tensors.items():
                assert bytes(a.memory(name)) == bytes(b.memory(name)), name
                other = b.tensors[name].scale
                if info.packed:
                    assert info.scale == pytest.approx(other, rel=2e-7)


def test_demo_model_converts_and_verifies(tmp_path):
    report = convert(DEMO, tmp_path / "out", verify=True)
    assert report.verification["passed"], report.verification
    assert report.verification["oracle"].startswith("transformers ")
    assert report.verification["weights_different"] == 0
    assert report.verification["text"] == "sample text through tokenizer.json"


# What --verify would catch -----------------------------------------------------------------------


def _strided(name, packed, out_features):
    return torch.from_numpy(hf_writer.unpack_strided(packed.numpy()))


def _wrong_sense(name, weight_scale, scheme):
    return 1.0 / float(weight_scale)


MISTAKES = [
    ("from_packed", _strided, "weights of"),
    ("packed_scale", _wrong_sense, "the scale of"),
]


@pytest.mark.parametrize("function, mistake, sign", MISTAKES)
@pytest.mark.parametrize("reference", ["transformers", "plain"])
def test_verify_catches_a_wrong_converter(
    function, mistake, sign, reference, tmp_path, monkeypatch
):
    if reference == "plain":
        monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(hf_source, function, mistake)
    with pytest.raises(ConvertError, match=sign) as caught:
        convert(write(tmp_path, FAMILIES["bitnet-offline"]), tmp_path / "out", verify=True)
    assert caught.value.code == "verification-failed"
    assert "a logit off by" in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("key, value", [("rms_norm_eps", 0.1), ("rope_theta", 30.0)])
def test_verify_catches_a_wrong_config(key, value, tmp_path):
    """A result whose config differs from its source's: weights agree, logits do not."""
    family = FAMILIES["bitnet-offline"]
    source = write(tmp_path, family)
    convert(source, tmp_path / "out")
    config = {**hf_writer.config_dict(family), key: value}
    (source / "config.json").write_text(json.dumps(config))
    opened = HfSource(Checkpoint(source))
    result = verify_conversion(opened, tmp_path / "out", oracle=PlainOracle(opened))
    assert result.weights_different == 0
    assert any("a logit off by" in failure for failure in result.failures), result.to_dict()


def test_oracle_rejects_what_it_would_not_ternarise(tmp_path):
    family = FAMILIES["llama-online"]
    source = write(tmp_path, family)
    opened = HfSource(Checkpoint(source))
    config = hf_writer.config_dict(family)
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(OracleUnavailable, match="as Linear"):
        HfOracle(opened)
