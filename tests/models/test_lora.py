"""LoRA adapters: reading, running beside ternary projections, merging; rejections by name.

Oracles: peft itself on transformers' model with straight-through layers (its forward is
transformers' own), and numpy. Adapters are written here or saved by peft.
"""

import dataclasses
import json
import re
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_writer
import hybrids
import rounding_ties
from bitnet_ops import training
from bitnet_ops.cli import main
from bitnet_ops.convert import ConvertError, convert
from bitnet_ops.formats.sglbitnt import Reader
from bitnet_ops.language_model import load
from bitnet_ops.nn import lora
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.lora import LoraBitLinear, LoraError, LoraWeight, read_adapter
from bitnet_ops.nn.packing import pack_ternary
from hf_writer import FAMILIES
from isa_control import torch_threads

FAMILY = dataclasses.replace(FAMILIES["bitnet-online-untied-fp32"], vocab=260)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (256, 256), DOWN: (256, 512)}  # [N, K]


@pytest.fixture(autouse=True)
def one_thread():
    torch.manual_seed(5)
    with torch_threads(1):
        yield


def factors(rank=4, shapes=SHAPES, b=0.05):
    """{tensor name: tensor} as PEFT stores it."""
    tensors = {}
    for module, (rows, columns) in shapes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns) * 0.05
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank) * b
    return tensors


def adapter(folder, tensors=None, **changes):
    """A PEFT directory."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": ["q_proj", "down_proj"],
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors or factors(), folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(masters in Hugging Face form, the converted folder)."""
    folder = tmp_path_factory.mktemp("base")
    source = hf_writer.write_checkpoint(folder / "source", FAMILY)
    convert(source, folder / "out")
    return source, folder / "out"


def prompts(count=8, tokens=12):
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, FAMILY.vocab, (count, 1, tokens), generator=generator)


def run(model, ids):
    return model(ids, KVCache(model.config, ids.shape[0], ids.shape[1], torch.float32))


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


# Against peft ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["this-cpu", "another-cpu"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}},
        {"target_modules": r".*\.(q|v|o)_proj|.*mlp\.up_proj"},
    ],
    ids=["plain", "rslora", "patterns", "regex"],
)
def test_logits_are_those_of_peft(options, rounding, base, tmp_path):
    """Torch's float kernels differ by CPU: another kind's rounding is simulated beside its own."""
    source, out = base
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **options}
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **settings)
    oracle = peft.get_peft_model(training.load_for_training(source), config)
    for name, parameter in oracle.named_parameters():
        if "lora_B" in name:  # zeros after initialisation
            torch.nn.init.normal_(parameter, std=0.05)
    oracle.eval().save_pretrained(tmp_path / "adapter")
    ours = load(out, head_format="stored", lora=tmp_path / "adapter").model
    plain = load(out, head_format="stored").model
    linears = [m for m in oracle.modules() if isinstance(m, training.TrainableBitLinear)]
    watch = rounding_ties.TieWatch(linears)
    shaken = rounding_ties.rounding_of_another_cpu(linears if rounding == "another-cpu" else [])
    with torch.no_grad(), shaken:
        rounding_ties.assert_alike(
            lambda ids: run(ours, ids)[0],
            lambda ids: oracle(input_ids=ids).logits[0],
            watch,
            rounding_ties.prompts(FAMILY.vocab, seed=11),
        )
    ids = prompts()[0]
    assert relative(run(plain, ids), run(ours, ids)) > 0.02  # the adapter does something


def test_merging_is_that_of_peft(base, tmp_path):
    source, _ = base
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["v_proj", "gate_proj"])
    model = peft.get_peft_model(training.load_for_training(source), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    report = convert(source, tmp_path / "out", lora=tmp_path / "adapter", verify=True)
    assert report.verification["oracle"] == "plain fp64 forward"
    assert "LoRA adapter adapter (rank 4, 4 projections) merged into the masters" in report.remarks
    assert "adapter_model.safetensors" in report.source_sha256
    merged = model.merge_and_unload()
    changed = 0
    with Reader(tmp_path / "out" / "model.bin") as ours, Reader(base[1] / "model.bin") as before:
        for name, module in merged.named_modules():
            if isinstance(module, training.TrainableBitLinear):
                w = module.weight.detach().double().numpy()
                absmean = np.abs(w).mean()
                codes = np.clip(np.rint(w / absmean), -1, 1)
                name = f"{name}.weight"
                found = torch.ops.bitnet.unpack(ours.tensor(name), w.shape[1]).numpy()
                assert (found != codes).mean() < 1e-3  # peft adds in another order: ties
                assert ours.tensors[name].scale == pytest.approx(absmean, rel=1e-5)
                changed += not torch.equal(ours.tensor(name), before.tensor(name))
    assert changed == 4


# Hybrids, whose decoder has other names in the class that reads images too ------------------------

# the second is that of transformers; the last two are of a decoder without a head, and compiled
SPELLINGS = ["model.", "model.language_model.", "language_model.model.", "", "_orig_mod.model."]
TARGETS = ["q_proj", "o_proj", "in_proj_qkv", "out_proj", "down_proj"]


def peft_of_images(made):
    """PEFT over Qwen3_5ForConditionalGeneration with the decoder of `made`."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
              "out_hidden_size": made.sizes.hidden, "num_position_embeddings": 16}  # fmt: skip
    about = {**hybrids.nested_config(made), "vision_config": vision}
    config = transformers.Qwen3_5Config(**{k: v for k, v in about.items() if k != "architectures"})
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForConditionalGeneration(config).float()
    decoder = {n.replace("model.", SPELLINGS[1], 1): t for n, t in hybrids.state_dict(made).items()}
    assert not model.load_state_dict(decoder, strict=False).unexpected_keys
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=TARGETS)
    model = peft.get_peft_model(model, options).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def respelled(folder, adapter, spelling):
    shutil.copytree(adapter, folder)
    stored = load_file(adapter / "adapter_model.safetensors")
    assert all(f"model.{SPELLINGS[1]}layers." in name for name in stored)
    new = {name.replace(SPELLINGS[1], spelling): tensor for name, tensor in stored.items()}
    save_file(new, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["plain", "rotated"])
def tuned(request, tmp_path_factory):
    """(the hybrid, PEFT's model, its adapter's folder)."""
    folder = tmp_path_factory.mktemp("tuned")
    made = hybrids.make(request.param, layers=4)
    torch.manual_seed(7)
    model = peft_of_images(made)
    model.save_pretrained(folder / "adapter")
    return made, model, folder / "adapter"


def test_an_adapter_of_a_hybrid_beside_it(tuned, tmp_path):
    """Under each kind of names what PEFT computes; activations of 16 bits leave little rounding."""
    made, theirs, adapter = tuned
    convert(hybrids.write_mlx(tmp_path / "source", made), tmp_path / "out")
    ids = prompts(1)[0]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    found = []
    for at, spelling in enumerate(SPELLINGS):
        ours = load(tmp_path / "out", lora=respelled(tmp_path / str(at), adapter, spelling)).model
        ours.set_activation_format("int16_group")
        found.append(run(ours, ids))
        assert torch.equal(found[0], found[-1])
    assert relative(found[0], expected) < 2e-3
    plain = load(tmp_path / "out").model
    plain.set_activation_format("int16_group")
    assert relative(run(plain, ids), expected) > 0.05


@pytest.mark.parametrize("nested", [True, False])
def test_an_adapter_of_a_hybrid_in_its_masters(nested, tuned, tmp_path):
    made, _, adapter = tuned
    generator = np.random.default_rng(2)
    made = dataclasses.replace(made, signs={}, sizes=dataclasses.replace(made.sizes, block=0))
    masters = {n: generator.normal(0, 0.05, c.shape) for n, c in made.codes.items() if "_proj" in n}

    def write(name, more):
        source = hybrids.write_unpacked(tmp_path / name, made, nested=nested)
        stored = load_file(source / "model.safetensors")
        for module, values in masters.items():
            inside = module.replace("model.", SPELLINGS[1], 1) if nested else module
            total = torch.from_numpy(values).float() + more.get(module, 0)
            stored[f"{inside}.weight"] = total.contiguous()
        save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
        about = json.loads((source / "config.json").read_text())
        about["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
            "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"],
        }
        (source / "config.json").write_text(json.dumps(about))
        return source

    delta, factor = {}, {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, which = name.partition(".lora_")
        module = module.replace(f"base_model.model.{SPELLINGS[1]}", "model.")
        factor[module, which[0]] = tensor
    for module, _ in factor:
        delta[module] = (factor[module, "B"] @ factor[module, "A"]) * (6 / 4)
    convert(write("merged", delta), tmp_path / "expected")
    source = write("source", {})
    with Reader(tmp_path / "expected" / "model.bin") as expected:
        for at, spelling in enumerate(SPELLINGS):
            merged = respelled(tmp_path / f"a{at}", adapter, spelling)
            convert(source, tmp_path / f"out{at}", lora=merged)
            with Reader(tmp_path / f"out{at}" / "model.bin") as ours:
                for name in expected.tensors:
                    assert torch.equal(ours.tensor(name), expected.tensor(name)), name


def test_two_names_of_one_factor(tmp_path):
    """Taken where both are the same; otherwise both are named."""
    again = _A.replace("lora_A", "lora_A.default")
    nested = {n.replace(".model.layers.", ".model.language_model.layers."): t.clone()
              for n, t in factors().items()}  # fmt: skip
    for at, (other, words) in enumerate([
        (lambda t: {again: t[_A].clone()}, f"{re.escape(_A)} .*{re.escape(again)}|"
         f"{re.escape(again)} .*{re.escape(_A)}"),
        (lambda t: {n: nested[n].copy_(t[n.replace("language_model.", "")]) for n in nested},
         f"as {re.escape(Q)} and as model.language_model|as model.language_model.* and as "),
    ]):  # fmt: skip
        tensors = factors()
        extra = other(tensors)
        same = read_adapter(adapter(tmp_path / f"same{at}", {**tensors, **extra}))
        assert set(same.weights) == set(SHAPES)
        extra[next(iter(extra))][0, 0] += 1
        with pytest.raises(LoraError, match=words):
            read_adapter(adapter(tmp_path / f"other{at}", {**tensors, **extra}))


# LoRA beside a projection -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_the_formula(dtype):
    codes = torch.randint(-1, 2, (40, 200), dtype=torch.int8)
    bottom = BitLinear.from_packed(pack_ternary(codes, 0.3)).repack()
    a, b, x = torch.randn(3, 200), torch.randn(40, 3), torch.randn(5, 200).to(dtype)
    layer = LoraBitLinear.from_base(bottom, LoraWeight(a, b, 0.7))
    exact = x.double().numpy() @ a.double().numpy().T @ b.double().numpy().T * 0.7
    found = layer(x)
    assert found.dtype == dtype and found.shape == (5, 40)
    expected = bottom(x).double().numpy() + exact
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-21
    assert np.abs(found.double().numpy() - expected).max() <= step * np.abs(expected).max()


def test_an_adapter_of_zeros_changes_no_bit(base, tmp_path):
    adapter(tmp_path / "zero", factors(b=0.0))
    plain = load(base[1]).model
    ours = load(base[1], lora=tmp_path / "zero").model
    for ids in prompts(2):
        assert torch.equal(run(plain, ids), run(ours, ids))


def test_decoding_and_batches_are_prefill_bit_for_bit(base, tmp_path):
    ours = load(base[1], lora=adapter(tmp_path / "adapter")).model
    ids = torch.cat([*prompts(2)])
    together = run(ours, ids)
    for row in range(2):
        cache = KVCache(ours.config, 1, ids.shape[1], torch.float32)
        steps = [ours(ids[row : row + 1, t : t + 1], cache) for t in range(ids.shape[1])]
        assert torch.equal(torch.cat(steps, 1)[0], together[row])


# Merging -----------------------------------------------------------------------------------------


def test_verify_needs_the_adapter_that_was_merged(base, tmp_path, capsys):
    source, _ = base
    folder = str(adapter(tmp_path / "adapter"))
    out = str(tmp_path / "out")
    assert main(["convert", str(source), out, "--lora", folder, "--verify"]) == 0
    assert "LoRA adapter adapter (rank 4, 2 projections) merged" in capsys.readouterr().out
    assert main(["verify", out, str(source), "--lora", folder]) == 0
    assert main(["verify", out, str(source)]) == 1
    assert "weights of model.layers.0.self_attn.q_proj.weight differ" in capsys.readouterr().err


def test_packed_sources_take_adapters_at_run_time_alone(tmp_path, capsys):
    family = dataclasses.replace(FAMILIES["bitnet-offline"], vocab=260)
    source = hf_writer.write_checkpoint(tmp_path / "source", family)
    folder = adapter(tmp_path / "adapter")
    with pytest.raises(ConvertError, match="give --lora to generate.*lora-packed"):
        convert(source, tmp_path / "out", lora=folder)
    convert(source, tmp_path / "out")
    command = ["generate", str(tmp_path / "out"), "a", "-n", "3", "--json", "--ignore-eos"]
    assert main([*command, "--lora", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["lora"] == str(folder)


def test_merging_rejects_another_models_adapter(base, tmp_path):
    with pytest.raises(ConvertError, match="expected a projection model.layers.7.*lora"):
        shapes = {"model.layers.7.self_attn.q_proj": (256, 256)}
        wrong = adapter(tmp_path / "a", factors(shapes=shapes), target_modules=["q_proj"])
        convert(base[0], tmp_path / "out", lora=wrong)
    with pytest.raises(ConvertError, match="got .256, 256.; the adapter belongs to another model"):
        wrong = adapter(tmp_path / "b", factors(shapes={Q: (256, 128)}), target_modules=["q_proj"])
        convert(base[0], tmp_path / "out", lora=wrong)
    with pytest.raises(ConvertError, match="without use_dora, got True"):
        convert(base[0], tmp_path / "out", lora=adapter(tmp_path / "c", use_dora=True))


# Rejections --------------------------------------------------------------------------------------

_A = f"base_model.model.{Q}.lora_A.weight"
REJECTED_OPTIONS = {
    "peft_type": ({"peft_type": "IA3"}, "expected peft_type LORA, got 'IA3'"),
    "task": ({"task_type": "SEQ_CLS"}, "expected task_type CAUSAL_LM, got 'SEQ_CLS'"),
    "bias": ({"bias": "lora_only"}, "expected bias none, got 'lora_only'"),
    "dora": ({"use_dora": True}, "DoRA .* is not supported"),
    "lora_bias": ({"lora_bias": True}, "biases of LoRA's B is not supported"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "without modules_to_save, got"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "transposed weights"),
    "replication": ({"layer_replication": [[0, 1]]}, "without layer_replication"),
    "parameters": ({"target_parameters": ["x"]}, "adapters of bare parameters"),
    "tokens": ({"trainable_token_indices": [1]}, "trained rows of the embedding"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "which changes the base"),
    "olora": ({"init_lora_weights": "olora"}, "which changes the base"),
    "unknown": ({"use_something_new": True}, "known options of LoRA, got use_something_new = True"),
    "rank": ({"r": 0}, "expected r as a number above zero, got 0"),
    "fraction": ({"r": 2.5}, "expected r as a number above zero, got 2.5"),
    "alpha": ({"lora_alpha": None}, "expected lora_alpha as a number above zero, got None"),
    "pattern": ({"rank_pattern": [1]}, "expected rank_pattern as an object"),
    "pattern-value": ({"alpha_pattern": {"q_proj": "x"}}, "expected patterns of numbers"),
    "alpha-infinite": (
        {"lora_alpha": 1e999},
        "lora_alpha as a number above zero, got inf",
    ),
    "alpha-huge": ({"lora_alpha": 10**400}, "lora_alpha as a number above zero, got 1000"),
    "pattern-nan": ({"rank_pattern": {"q_proj": float("nan")}}, "above zero in rank_pattern, got"),
    "pattern-huge": ({"alpha_pattern": {"q_proj": 10**400}}, "above zero in alpha_pattern, got"),
    "pattern-none": ({"rank_pattern": {"(q_proj": 4}}, "expected valid regular expressions, got"),
    "pattern-endless": ({"rank_pattern": {r"(\w+\.?)+!": 4}}, "that end soon, got .* group"),
    "other-rank": ({"r": 8}, "expected rank 8 in model.layers.0.self_attn.q_proj, got lora_A .4"),
    "absent-target": ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "module 'k_proj'"),
    "extra-target": ({"target_modules": ["q_proj"]}, "another config's weights"),
}
REJECTED_TENSORS = {
    "no-b": (lambda t: t.pop(_A.replace("_A", "_B")), "expected lora_A and lora_B of .* no lora_B"),
    "nan": (lambda t: t[_A].fill_(float("nan")), "expected finite lora_A of model.layers.0"),
    "float8": (
        lambda t: t.update({_A: t[_A].to(torch.float8_e4m3fn)}),
        "of 16 bits or more, got float8_e4m3fn .4, 256.",
    ),
    "integer": (lambda t: t.update({_A: t[_A].to(torch.int8)}), "expected a floating matrix"),
    "magnitude": (
        lambda t: t.update({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(2)}),
        "DoRA is not supported",
    ),
    "embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)}),
        "an adapter of the embedding",
    ),
    "head-module": (
        lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2)}),
        "it is not part of plain LoRA",
    ),
}


@pytest.mark.parametrize("name", REJECTED_OPTIONS)
def test_options_are_rejected_by_name(name, tmp_path):
    changes, message = REJECTED_OPTIONS[name]
    with pytest.raises(LoraError, match=message) as caught:
        read_adapter(adapter(tmp_path / "adapter", **changes))
    assert str(caught.value).startswith("lora: expected") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", REJECTED_TENSORS)
def test_tensors_are_rejected_by_name(name, tmp_path):
    change, message = REJECTED_TENSORS[name]
    tensors = factors()
    change(tensors)
    with pytest.raises(LoraError, match=message):
        read_adapter(adapter(tmp_path / "adapter", tensors))


def test_files_are_rejected(tmp_path):
    with pytest.raises(LoraError, match="expected a PEFT directory with adapter_config.json"):
        read_adapter(tmp_path)
    folder = adapter(tmp_path / "adapter")
    twice = b'{"a": {}, "a": {}}'
    for data in (b"not safetensors", len(twice).to_bytes(8, "little") + twice):
        (folder / "adapter_model.safetensors").write_bytes(data)
        with pytest.raises(LoraError, match="expected a valid safetensors file"):
            read_adapter(folder)
    shutil.move(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    with pytest.raises(LoraError, match="got adapter_model.bin; pickles are never opened"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(LoraError, match="expected a JSON object"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(LoraError, match="expected valid JSON in"):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"lm_head": (260, 256)}, "expected lm_head to be a ternary projection, got a HeadWeight"),
        ({"model.layers.9.mlp.up_proj": (4, 4)}, "ternary projection, got no such module"),
        ({Q: (128, 256)}, "as .256, 256., got .128, 256.; the adapter belongs to another model"),
    ],
)
def test_what_does_not_fit_is_rejected(shapes, message, base, tmp_path):
    folder = adapter(tmp_path / "adapter", factors(shapes=shapes), target_modules=None)
    with pytest.raises(LoraError, match=message):
        load(base[1], lora=folder)


def test_command_line_error_is_one_line(base, tmp_path, capsys):
    folder = str(adapter(tmp_path / "adapter", use_dora=True))
    assert main(["generate", str(base[1]), "a", "--lora", folder]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "use_dora" in error


def test_adapter_describes_itself(tmp_path):
    described = lora.read_adapter(adapter(tmp_path / "mine")).describe()
    assert described == "LoRA adapter mine (rank 4, 2 projections)"
