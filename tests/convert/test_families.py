"""Every published family as a tiny checkpoint: converts, agrees with an oracle, is recognised.

The checkpoints and the oracles are those of measured_family (transformers in fp32 and a float64
forward), whose figures docs/reference/families.md shows. Bounds: on a prompt that keeps
clear of rounding ties only fp32 rounding is left; elsewhere a code may move by a step.
"""

import io
import json
from pathlib import Path

import pytest
import torch

import forward_fp64
import hf_writer
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.convert.comparison import MIN_TOP1
from bitnet_ops.convert.quantize import quantize
from bitnet_ops.convert.verify import verify
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.models import expected_tensors
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.training import TrainingError, load_for_training
from hf_families import CASES
from isa_control import torch_threads
from measured_family import Measured, relative

ROOT = Path(__file__).resolve().parents[2]
FP32_ROUNDING = 5e-6


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", params=CASES)
def measured(request, tmp_path_factory):
    with torch_threads(1):
        return Measured(CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_family_agrees_with_its_oracle(measured, record_property):
    """Must show: family x (converts, oracle, largest logit error, top-1)."""
    row = measured.row()
    print("\n" + row.line())
    record_property("table_row", row.line())
    assert row.exact < FP32_ROUNDING
    assert row.weights_different == 0
    if measured.family.dense_ternary:  # the oracle has no int8 activations: their error shows
        assert 1e-4 < row.clear < 0.1 and row.top1 > 0.9
    else:
        assert row.clear < FP32_ROUNDING
        assert row.top1 >= MIN_TOP1


def test_verify_has_an_oracle_for_it(measured):
    proof = measured.report.verification
    assert proof["passed"] and proof["weights_different"] == 0
    loadable = measured.case.twin is None and not measured.family.dense_ternary
    assert proof["oracle"].startswith("transformers" if loadable else "plain fp64 forward")
    if not loadable:
        assert proof["why_not_transformers"]


def test_verify_later_on(measured):
    """`bitnet-ops verify FILE SOURCE`: the file says enough to read its source once more."""
    assert verify(measured.result, measured.source)["verification"]["passed"]


@torch.inference_mode()
def test_every_way_of_running_it_is_the_same_bit_for_bit(measured):
    """Prefill, token by token, composed ops, and beside another sequence."""
    model = measured.lm.model
    ids = torch.randint(0, measured.family.vocab, (2, 9), generator=torch.manual_seed(4))

    def run(*sizes):
        cache = KVCache(model.config, 2, 9, torch.float32)
        return torch.cat([model(part, cache) for part in ids.split(list(sizes), 1)], 1)

    expected = run(9)
    assert torch.equal(run(4, 1, 1, 1, 1, 1), expected)
    model.run_as = "ops"
    assert torch.equal(run(*[1] * 9), expected)
    model.run_as = "program"
    alone = model(ids[:1], KVCache(model.config, 1, 9, torch.float32))
    assert torch.equal(alone, expected[:1])
    assert model.program is not None  # every family is one call
    for fused in (True, False):
        model.run_as = "program" if fused else "ops"
        pool = KVPool(model.config, 6, 4, torch.float32)
        for begin, end in ((0, 4), (4, 5), (5, 9)):  # chunks, in blocks of both that alternate
            steps = [SequenceStep(row[begin:end].tolist(), begin, blocks, end - begin)
                     for row, blocks in zip(ids, ([5, 1, 3], [0, 4, 2]), strict=True)]  # fmt: skip
            logits = model.step(StepBatch.of(steps, 4), pool)
            assert torch.equal(logits, expected[:, begin:end].transpose(0, 1).flatten(0, 1))
    model.run_as = "program"


@torch.inference_mode()
def test_bfloat16_activations(measured):
    """The composed parts in bfloat16: still one result for every way, and near the float32 one."""
    model = load(measured.result, dtype=torch.bfloat16, head_format="stored").model
    ids, _ = forward_fp64.clear_prompt_of(measured.family.name, measured.family)
    caches = [KVCache(model.config, 1, len(ids), torch.float32) for _ in range(2)]
    logits = model(torch.tensor([ids]), caches[0])[0]
    steps = [model(torch.tensor([[i]]), caches[1])[0] for i in ids]
    assert torch.equal(torch.cat(steps), logits)
    exact, _ = forward_fp64.forward(measured.family, measured.network, ids)
    assert relative(logits, exact) < 0.25  # bfloat16 moves a fifth of all codes by a step
    assert (logits - exact).square().mean() < 0.01 * exact.square().mean()


@torch.inference_mode()
def test_hidden_states_are_what_the_head_reads(measured):
    model = measured.lm.model
    ids, _ = forward_fp64.clear_prompt_of(measured.family.name, measured.family)
    hidden = model.hidden(torch.tensor([ids]), KVCache(model.config, 1, len(ids)))[0]
    network = forward_fp64.Network(measured.family, measured.network)
    exact = network.hidden(ids, forward_fp64.Margins())
    assert (hidden - exact).abs().max() < FP32_ROUNDING * exact.abs().max()


def test_the_file_says_how_it_was_read(measured):
    """The config travels whole; what names have shown stands in the private block."""
    config = json.loads((measured.source / "config.json").read_text())
    ours = measured.lm.config
    family = measured.family
    assert ours.sub_norms == family.sub_norms and ours.linear_norms == bool(family.inner_norms)
    assert ours.qk_norm == family.qk_norm and bool(ours.biases) == family.qkv_bias
    if family.spelling == "subln":
        assert ours.sub_norm_eps == 1e-6 != ours.rms_norm_eps == config["rms_norm_eps"]
    if family.inner_norms:
        assert ours.linear_norm_eps == family.inner_eps
    names = set(hf_writer.state_dict(family, measured.network))
    assert len(names) == len(expected_tensors(ours)) + sum(n.endswith("_scale") for n in names)


REMARKS = {
    "diffusion": "run as an ordinary causal model",
    "subln-smollm2": "config.json does not state its epsilon",
    "trilm": "without activation quantisation",
    "trilm-blocks": "without activation quantisation",
    "bonsai": "without activation quantisation",
    "qwen3-embedding": "embedding model",
    "bitcpm-llama": "without activation quantisation",
    "bitcpm-minicpm": "code shipped with a checkpoint is never run",
    "bitnet-embedding-270m": "norms inside projections multiply by w, not by 1 + w",
}


def test_what_a_user_must_know_is_said(measured):
    words = REMARKS.get(measured.family.name)
    remarks = measured.report.remarks
    assert (remarks == []) if words is None else any(words in remark for remark in remarks)


def test_trilm_reports_what_rounding_the_activations_costs(measured):
    cost = measured.report.verification["floating_activations"]
    if not measured.family.dense_ternary:
        assert cost is None, "the other families quantise activations themselves"
        return
    assert 0 < cost["relative_logit_difference"] < 0.1
    assert cost["top1_agreement"] > 0.9
    assert any("with the source's floating activations" in x for x in measured.report.lines())


@pytest.mark.parametrize("name", ["1bitllm-3b", "subln-smollm2", "qwen3-embedding"])
def test_what_transformers_has_no_class_for_is_not_written_for_it(name, tmp_path):
    """Training and packed folders run through transformers, which would drop the norms."""
    source = hf_writer.write_checkpoint(tmp_path / "source", CASES[name].family)
    with pytest.raises(ConvertError, match="--form bin") as caught:
        quantize(source, tmp_path / "out", form="packed", assume_trained=True)
    assert caught.value.code == "packed-form"
    with pytest.raises(TrainingError, match="other norms than"):
        load_for_training(source)
    convert(source, tmp_path / "bin", **CASES[name].options)
    with pytest.raises(TrainingError, match="other norms than"):
        load_for_training(tmp_path / "bin")


def test_trilm_keeps_every_scale(tmp_path):
    """One a matrix, one a row or one a group of 128: the fewest that say the same."""
    family = CASES["trilm-blocks"].family
    source = hf_writer.write_checkpoint(tmp_path / "source", family)
    convert(source, tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        shapes = {
            name: tuple(reader.scales(f"model.layers.0.{name}.weight").shape)
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
        }
    rows, groups = family.hidden, family.inter // 128
    assert list(shapes.values()) == [(1,), (rows,), (rows, groups)]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """The embedding model: its folder and the LanguageModel over it, loaded as users do."""
    folder = tmp_path_factory.mktemp("embedding")
    hf_writer.write_checkpoint(folder / "source", CASES["qwen3-embedding"].family)
    convert(folder / "source", folder / "out")
    return folder / "out", load(folder / "out")


def test_embed_is_the_last_state_at_length_one(embedding):
    """Last-token pooling and L2, against the float64 forward; a text alone or among others."""
    family = CASES["qwen3-embedding"].family
    network = forward_fp64.Network(family, hf_writer.make_network(family))
    ids, _ = forward_fp64.clear_prompt_of(family.name, family)
    texts = [ids, ids[:5], [7] * 300]
    vectors = embedding[1].embed(texts)
    for vector, text in zip(vectors[:2], texts, strict=False):
        last = network.hidden(text, forward_fp64.Margins())[-1]
        assert (vector - last / last.norm()).abs().max() < 1e-5
    assert torch.equal(embedding[1].embed([texts[2]])[0], vectors[2])
    assert vectors.shape == (3, family.hidden) and vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    short = embedding[1].embed(texts, dimensions=64)
    torch.testing.assert_close(short, vectors[:, :64] / vectors[:, :64].norm(dim=1, keepdim=True))


def test_embed_runs_texts_together_and_changes_no_bit(embedding):
    """Against each text alone over a rectangular cache; in few steps."""
    _, lm = embedding
    texts = [
        [(7 * n + i) % 200 for i in range(n)] for n in (1, 2, 300, 63, 64, 65, 5, 5, 17, 256, 9)
    ]
    texts += [[n] * 3 for n in range(100)]
    steps = []
    original = lm.model.step_states

    def counted(batch, pool):
        steps.append(len(batch.token_ids))
        return original(batch, pool)

    lm.model.step_states = counted
    try:
        vectors = lm.embed(texts)
    finally:
        del lm.model.step_states
    total = sum(map(len, texts))
    assert sum(steps) == total and len(steps) <= -(-total // 256) + 2
    for ids, vector in zip(texts, vectors, strict=True):
        cache = KVCache(lm.config, 1, len(ids))
        last = lm.model.hidden(torch.tensor([ids]), cache)[0, -1]
        assert torch.equal(vector, torch.nn.functional.normalize(last, dim=-1))
    assert lm.embed([]).shape == (0, lm.config.hidden_size)


def test_embed_reads_texts(embedding, capsys, monkeypatch):
    folder, lm = embedding
    texts = ["rain on the roof", "sun"]
    expected = lm.embed(texts)
    assert torch.equal(lm.embed(texts[0])[0], expected[0])
    assert main(["embed", str(folder), *texts]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == texts and rows[1]["tokens"] == 4
    assert torch.equal(torch.tensor([row["embedding"] for row in rows]), expected)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    assert main(["embed", str(folder), "-", "--similarity"]) == 0
    table_row = capsys.readouterr().out.splitlines()[0].split("\t")
    assert float(table_row[0]) == 1 and abs(float(table_row[1]) - expected[0] @ expected[1]) < 1e-5


def test_what_embed_and_embedding_models_reject(embedding, capsys, tmp_path):
    folder, lm = embedding
    with pytest.raises(ValueError, match="at least one token"):
        lm.embed([[]])
    with pytest.raises(ValueError, match="dimensions an integer from 1 to 192, got 193"):
        lm.embed(["a"], dimensions=193)
    assert main(["generate", str(folder), "once"]) == 1
    assert "got an embedding model; use embed" in capsys.readouterr().err


def st_modules(*kinds):
    """modules.json as sentence-transformers writes it."""
    return [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]


POOLING, BODY = "1_Pooling/config.json", ("Transformer", "Pooling")
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
ST_FILES = {  # what is written -> the code it is rejected with, None: it is not
    "flags": ({POOLING: LAST}, None),
    "word": ({POOLING: {"pooling_mode": "lasttoken", "embedding_dimension": 192}}, None),
    "modules": (
        {POOLING: LAST, "modules.json": st_modules(*BODY, "Normalize"),
         "config_sentence_transformers.json": {"default_prompt_name": None, "prompts": {}},
         "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False}}, None),
    "mean by flags": ({POOLING: {"pooling_mode_mean_tokens": True}}, "pooling"),
    "mean by a word": ({POOLING: {"pooling_mode": "mean"}}, "pooling"),
    "mean and last": ({POOLING: {"pooling_mode": ["mean", "lasttoken"]}}, "pooling"),
    "mean by silence": ({POOLING: {"word_embedding_dimension": 192}}, "pooling"),
    "another folder": ({"2_Pool/config.json": {"pooling_mode": "cls"},
                        "modules.json": [*st_modules("Transformer"),
                                         {"path": "2_Pool", "type": "x.Pooling"}]}, "pooling"),
    "no settings": ({"modules.json": st_modules(*BODY)}, "pooling"),
    "a dense layer": ({POOLING: LAST, "modules.json": st_modules(*BODY, "Dense")}, "embedding"),
    "no list": ({"modules.json": {"a": 1}}, "embedding"),
    "a path outside": ({"modules.json": [*st_modules("Transformer"),
                                         {"path": "../x", "type": "x.Pooling"}]}, "index-path"),
    "a default prompt": (
        {POOLING: LAST, "config_sentence_transformers.json": {"default_prompt_name": "query"}},
        "embedding"),
    "lower case": ({"sentence_bert_config.json": {"do_lower_case": True}}, "embedding"),
}  # fmt: skip


@pytest.mark.parametrize("name", ST_FILES)
def test_files_of_sentence_transformers(name, tmp_path):
    """Whoever asks for more than the last token's state at length 1 is not given just that."""
    files, code = ST_FILES[name]
    source = hf_writer.write_checkpoint(tmp_path / "source", CASES["qwen3-embedding"].family)
    for file, value in files.items():
        (source / file).parent.mkdir(exist_ok=True)
        (source / file).write_text(json.dumps(value))
    if code is None:
        assert convert(source, tmp_path / "out").tensors
        return
    with pytest.raises(ConvertError) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.code == code


def test_the_page_lists_every_family():
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    for case in CASES.values():
        assert f"| {case.row} | {case.checkpoints} | {case.recognised} | yes |" in page
