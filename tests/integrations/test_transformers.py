"""accelerate(model) and quantization_config=BitnetOpsConfig(), against transformers' own modules.

Layers are compared on the same inputs within float32's rounding of the longer way; whole models by
logits and greedy tokens. Checkpoints are written by hf_writer, which shares no code with the
package; transformers reads what was saved.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.bitnet import AutoBitLinear

import bitnet_ops
import hybrids
from bitnet_ops.integrations import CheckpointError
from bitnet_ops.integrations.transformers import BitnetOpsConfig, accelerate, layers
from hf_writer import FAMILIES, Family, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]

# A norm inside each projection, under transformers' name.
_NORMED = Family("bitnet-rms-norm", mode="online", inner_norms="rms_norm",
                 quantization_extra={"use_rms_norm": True, "rms_norm_eps": 1e-6})  # fmt: skip
_BIASED = Family("qwen2-biased", model_type="qwen2", tied=False, qkv_bias=True, dtype="float32")
ALL = {**FAMILIES, _NORMED.name: _NORMED, _BIASED.name: _BIASED}
SOME = ("bitnet-offline", "bitnet-bitlinear", "bitnet-online", "llama-bitlinear", "qwen2-biased")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, family) for name, family in ALL.items()}


def theirs(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """transformers' model. Up to 5.12 it leaves an offline AutoBitLinear's weights as uint8, with
    which they cannot run: they get the dtype they have in later releases.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    for module in model.modules():
        if isinstance(module, AutoBitLinear) and module.weight.dtype == torch.uint8:
            module.weight = nn.Parameter(module.weight.view(torch.int8).to(dtype))
    return model.eval()


def oracle(folder: Path) -> Any:
    """transformers' model in float32.

    Releases from 5.21 leave norms, embedding and head in bfloat16, and fail beside float32 weights.
    """
    model = theirs(folder)
    for tensor in model.parameters():
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def some_ids(model: Any, batch: int = 2, length: int = 60) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=g)


def linears(model: nn.Module) -> dict[str, layers.TernaryLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, layers.TernaryLinear)}


def assert_same_model(ours: Any, reference: Any) -> None:
    ids = some_ids(reference)
    with torch.inference_mode():
        a, b = ours(ids).logits, reference(ids).logits
    assert a.dtype == b.dtype
    assert_same_logits(a, b)


def assert_same_logits(a: Tensor, b: Tensor) -> None:
    """As two right float32 forwards of different order agree.

    An activation at the middle between two int8 steps goes either way, and then single logits move
    by percents; a wrong row order or scale is off by all there is.
    """
    assert float((a - b).abs().max()) <= 0.1 * float(b.abs().max())
    assert float((a - b).abs().mean()) <= 0.01 * float(b.std())
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() >= 0.95


def test_a_hybrid_of_transformers_ternary_linears_is_accelerated() -> None:
    """Classes of modules decide, not the model's: gates of Gated DeltaNet stay dense."""
    model = hybrids.transformers_model(hybrids.make("plain", layers=4))
    dense = nn.Linear
    for name, module in list(model.named_modules()):
        if isinstance(module, dense) and not name.endswith(("in_proj_a", "in_proj_b", "lm_head")):
            shape = module.in_features, module.out_features
            ternary = AutoBitLinear(*shape, bias=False, online_quant=True)
            ternary.weight.data.copy_(module.weight.data)
            model.set_submodule(name, ternary.eval())
    ours = accelerate(copy.deepcopy(model))
    assert len(linears(ours)) == 3 * (3 + 3) + (4 + 3)
    assert_same_model(ours, model)


def unpacked_qwen3(folder: Path, tied: bool, group: int) -> tuple[Any, int]:
    """A Qwen3 as packages of unpacked models hold it: float16 of -s, 0 and s; and its matrices."""
    config = transformers.Qwen3Config(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=301, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).half()
    g = torch.Generator().manual_seed(3)
    matrices = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    for weight in {id(m.weight): m.weight for m in matrices}.values():
        rows, columns = weight.shape
        codes = torch.randint(-1, 2, (rows, columns), generator=g)
        scales = (0.5 + torch.rand(rows, columns // group, generator=g)) / columns**0.5
        weight.data = (codes * scales.repeat_interleave(group, 1)).half()
    model.save_pretrained(folder)
    return theirs(folder), 2 * 7 + 1


@pytest.mark.parametrize("name", ["plain", "plain-tied", "qwen3", "qwen3-tied-64"])
def test_unpacked_ternary_matrices_are_swapped_and_saved_as_they_were(
    name: str, tmp_path: Path
) -> None:
    """Gates of Gated DeltaNet are no ternary matrices and stay.

    Layers against a float64 product of int8 codes; logits, with 16-bit activations, against those
    of transformers in float32.
    """
    if name.startswith("qwen3"):
        group = 64 if name.endswith("64") else 128
        reference, count = unpacked_qwen3(tmp_path / "source", "tied" in name, group)
    else:
        made = hybrids.make(name, layers=4)
        group, count = hybrids.GROUP, len(made.codes) - 1 + made.sizes.tied
        reference = hybrids.transformers_model(made)
    ours = accelerate(copy.deepcopy(reference))
    assert len(linears(ours)) == count
    assert all(layer.group_size == group for layer in linears(ours).values())
    before = dict(reference.named_modules())
    for path, layer in linears(ours).items():
        dense = before[path].weight.double()
        assert torch.equal(layer.packed.dequantize().double(), dense), path
        x = torch.randn(3, layer.in_features)
        parts = x.double().view(3, -1, group)
        steps = parts.abs().amax(-1, keepdim=True) / 127
        rounded = ((parts / steps).round() * steps).view(3, -1)
        with torch.inference_mode():
            torch.testing.assert_close(layer(x).double(), rounded @ dense.T, rtol=1e-4, atol=1e-5)
    for layer in linears(ours).values():
        layer.set_activation_format("int16_group")
    ids = some_ids(reference)
    with torch.inference_mode():
        a, b = ours(ids).logits, reference(ids).logits
    assert float((a - b).abs().max()) <= 1e-3 * float(b.abs().max())

    ours.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config
    held = reference.state_dict()
    tied = {"lm_head.weight"} if reference.config.tie_word_embeddings else set()
    assert saved.keys() == held.keys() - tied
    for key, tensor in saved.items():
        assert tensor.dtype == held[key].dtype and torch.equal(tensor, held[key]), key


def test_one_weight_beside_a_scale_leaves_a_matrix_floating() -> None:
    model = hybrids.transformers_model(hybrids.make("plain", layers=4))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] *= 0.5
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 0.01
    ours = accelerate(copy.deepcopy(model))
    assert type(ours.model.layers[1].mlp.up_proj) is nn.Linear
    swapped = linears(ours)
    assert "model.layers.1.mlp.gate_proj" in swapped
    for layer in swapped.values():
        layer.set_activation_format("int16_group")
    assert_same_model(ours, model)


def test_a_rotated_hybrid_without_its_rotation_is_named() -> None:
    """What rotated matrices stand for is not ternary: only their packed files are."""
    with pytest.raises(ValueError, match=r"of -s, 0 and s, got none in Qwen3_5ForCausalLM; "):
        accelerate(hybrids.transformers_model(hybrids.make("rotated", layers=4)))


def test_a_ternary_head_is_not_rounded_again() -> None:
    model = hybrids.transformers_model(hybrids.make("plain", layers=4))
    ours = accelerate(model, head="int8")
    assert isinstance(ours.lm_head, layers.TernaryLinear)


@pytest.mark.parametrize("name", ALL)
def test_every_linear_computes_what_transformers_module_does(
    folders: dict[str, Path], name: str
) -> None:
    reference = oracle(folders[name])
    ours = accelerate(copy.deepcopy(reference), norms=False, mlp=False)
    assert len(linears(ours)) == 7 * ALL[name].layers
    g = torch.Generator().manual_seed(1)
    for path, layer in linears(ours).items():
        x = torch.randn(3, layer.in_features, generator=g)
        module = reference.get_submodule(path)
        with torch.inference_mode():
            expected, got = module(x), layer(x)
        # Their weights and activations are rounded numbers, a float32 sum over K of them.
        scale = float(layer.weight_scale.abs().max())
        size = x.abs().sum(-1, keepdim=True) * scale * (4.0 if layer.rms_norm is not None else 1.0)
        bound = layer.in_features * 2.0**-24 * size + 2.0**-20 * expected.abs() + 1e-6
        assert bool(((got - expected).abs() <= bound).all()), path


@pytest.mark.parametrize("name", ALL)
def test_accelerated_models_give_transformers_tokens(folders: dict[str, Path], name: str) -> None:
    reference = oracle(folders[name])
    ours = copy.deepcopy(reference)
    assert accelerate(ours) is ours
    assert_same_model(ours, reference)
    kinds = {type(m).__name__ for m in ours.modules()}
    assert {"TernaryLinear", "RMSNorm", "GatedMLP"} <= kinds
    assert not {"BitLinear", "AutoBitLinear"} & kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SOME)
def test_loading_by_config_equals_accelerating(
    folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    """Weights arrive packed: no float copy of a ternary matrix is ever there."""
    swapped = accelerate(theirs(folders[name], dtype))
    loaded = theirs(folders[name], dtype, quantization_config=BitnetOpsConfig())
    assert linears(loaded).keys() == linears(swapped).keys()
    for path, layer in linears(loaded).items():
        other = linears(swapped)[path]
        assert torch.equal(layer.weight, other.weight), path
        torch.testing.assert_close(layer.weight_scale, other.weight_scale, rtol=2.0**-8, atol=0)
        assert layer.weight_scale.dtype == torch.float32
    ids = some_ids(loaded)
    with torch.inference_mode():
        logits = loaded(ids).logits
        assert logits.dtype == dtype and bool(logits.isfinite().all())
    if dtype == torch.float32:
        assert_same_model(loaded, oracle(folders[name]))


def test_scales_stay_float32_in_a_bfloat16_model(folders: dict[str, Path]) -> None:
    """transformers would round a float32 weight_scale to the model's dtype."""
    name = "bitnet-offline-fp32"
    loaded = theirs(folders[name], torch.bfloat16, quantization_config=BitnetOpsConfig())
    exact = theirs(folders[name], torch.float32, quantization_config=BitnetOpsConfig())
    for path, layer in linears(loaded).items():
        assert torch.equal(layer.weight_scale, linears(exact)[path].weight_scale)


@pytest.mark.parametrize("by_config", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_what_is_saved_is_read_by_transformers_and_by_load(
    folders: dict[str, Path], name: str, by_config: bool, tmp_path: Path
) -> None:
    if by_config:
        ours = theirs(folders[name], quantization_config=BitnetOpsConfig())
    else:
        ours = accelerate(theirs(folders[name]))
    ours.save_pretrained(tmp_path / "saved")
    said = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "bitnet" and said["quantization_mode"] == "offline"
    transformers.AutoTokenizer.from_pretrained(folders[name]).save_pretrained(tmp_path / "saved")
    assert_same_model(ours, oracle(tmp_path / "saved"))
    again = theirs(tmp_path / "saved", quantization_config=BitnetOpsConfig())
    ids = some_ids(ours)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, ours(ids).logits)
    exact = {"dtype": torch.float32, "kv_dtype": torch.float32, "head_format": "float32"}
    lm = bitnet_ops.load(tmp_path / "saved", **exact)
    with torch.inference_mode():
        mine = lm.model(ids)
    assert_same_logits(mine, ours(ids).logits)


def test_generate_follows_the_models_own_logits(folders: dict[str, Path]) -> None:
    ours = accelerate(theirs(folders["bitnet-offline"]))
    ids = some_ids(ours, batch=1, length=9)
    done = ours.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert done.shape[1] > ids.shape[1] and torch.equal(done[:, :9], ids)
    with torch.inference_mode():
        logits = ours(done[:, :-1]).logits[0, 8:]
    chosen = logits.gather(1, done[0, 9:, None])[:, 0]
    # With a cache the sums of attention have another order.
    assert bool((logits.amax(-1) - chosen <= 0.02 * logits.abs().amax()).all())


def test_masters_without_a_quantization_config(folders: dict[str, Path], tmp_path: Path) -> None:
    masters = dataclasses.replace(FAMILIES["bitnet-online"], quantized=False)
    folder = write_checkpoint(tmp_path / "m", masters)
    config = BitnetOpsConfig(linear_class="autobitlinear", quantization_mode="online")
    ours = theirs(folder, quantization_config=config)
    assert_same_model(ours, oracle(folders["bitnet-online"]))


@pytest.mark.parametrize("head", ["int8", "int4"])
@pytest.mark.parametrize("name", ["bitnet-offline", "bitnet-offline-untied"])
def test_a_quantised_head(folders: dict[str, Path], name: str, head: str, tmp_path: Path) -> None:
    reference = oracle(folders[name])
    ours = accelerate(copy.deepcopy(reference), head=head)
    ids = some_ids(reference)
    with torch.inference_mode():
        a, b = ours(ids).logits, reference(ids).logits
    assert 0 < (a - b).abs().mean() < (0.02 if head == "int8" else 0.2) * b.std()
    ours.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    tied = reference.config.tie_word_embeddings
    assert tied or saved["lm_head.weight"].dtype == torch.float32  # as the model's head was
    again = theirs(tmp_path)
    with torch.inference_mode():
        c = again(ids).logits
    assert (c - b).abs().mean() < (0.02 if head == "int8" else 0.2) * b.std()


@pytest.fixture
def compile_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(module) -> (compiled as one graph, list of its graphs), also where torch.compile is off."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)

    def compiled(module: nn.Module) -> tuple[Any, list[Any]]:
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return torch.compile(module, fullgraph=True, backend=backend), graphs

    with torch._dynamo.config.patch(disable=False):
        yield compiled


def test_torch_compile_finds_no_graph_break_in_a_linear(
    folders: dict[str, Path], compile_counted: Any
) -> None:
    ours = accelerate(theirs(folders["bitnet-offline"]))
    layer = ours.model.layers[0]
    x = torch.randn(2, 3, 256)
    for module in (layer.self_attn.q_proj, layer.mlp):
        compiled, graphs = compile_counted(module)
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))
        assert len(graphs) == 1


@pytest.mark.parametrize("name", [_NORMED.name, _BIASED.name])
def test_torch_compile_takes_a_whole_model_as_one_graph(
    folders: dict[str, Path], name: str, compile_counted: Any
) -> None:
    """Linears with a norm, with a bias, in MLPs of both kinds, and an int8 head: no graph break."""
    ours = accelerate(theirs(folders[name]), head="int8")
    ids = some_ids(ours, batch=1, length=5)
    compiled, graphs = compile_counted(ours)
    with torch.no_grad():
        logits = compiled(ids, use_cache=False).logits
        assert torch.equal(logits, ours(ids, use_cache=False).logits)
    assert len(graphs) == 1


def test_a_peft_style_hook_sees_the_same_names(folders: dict[str, Path]) -> None:
    reference = oracle(folders["bitnet-offline"])
    names = {n for n, _ in reference.named_modules()}
    assert names == {n for n, _ in accelerate(copy.deepcopy(reference)).named_modules()}


def test_gradients_reach_the_inputs(folders: dict[str, Path]) -> None:
    ours = accelerate(theirs(folders["bitnet-offline"]))
    x = torch.randn(1, 4, 256, requires_grad=True)
    ours(inputs_embeds=x).logits.square().mean().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all()) and bool(x.grad.any())


# What is rejected ---------------------------------------------------------------------------


def test_norms_and_mlps_that_compute_something_else_stay() -> None:
    """Gemma's norm scales by 1 + weight, its MLP has another activation."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class PlusOneRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * 2

    assert layers.faster_norm(PlusOneRMSNorm(64)) is None
    assert layers.faster_norm(GemmaRMSNorm(64)) is None
    assert isinstance(layers.faster_norm(LlamaRMSNorm(64)), layers.RMSNorm)


def test_a_model_without_ternary_layers_is_named() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=50,
    )  # fmt: skip
    with pytest.raises(ValueError, match="BitLinear or AutoBitLinear layers.*LlamaForCausalLM"):
        accelerate(transformers.LlamaForCausalLM(config))


def test_what_is_no_model_and_what_has_been_accelerated_are_named(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(TypeError, match=r"expected a loaded transformers model, got a str; load"):
        accelerate(str(folders["bitnet-offline"]))  # type: ignore[arg-type]
    model = accelerate(theirs(folders["bitnet-offline"]))
    with pytest.raises(ValueError, match="got one that has been accelerated"):
        accelerate(model)


def test_what_transformers_leaves_in_bfloat16_of_a_float32_model(folders: dict[str, Path]) -> None:
    """Releases from 5.21 leave norms, embedding and head as a packed checkpoint stores them."""
    model, reference = theirs(folders["bitnet-offline"]), oracle(folders["bitnet-offline"])
    for part in (model.model.norm, model.model.embed_tokens, model.lm_head):
        part.weight.data = part.weight.data.bfloat16()
    assert_same_model(accelerate(model), reference)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "3bit"}, "weight_format"),
        ({"head": "int3"}, "head_format"),
    ],
)
def test_wrong_options(folders: dict[str, Path], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accelerate(theirs(folders["bitnet-offline"]), **options)
    with pytest.raises(ValueError, match=message):
        BitnetOpsConfig(**options)


def test_floats_that_are_no_codes_are_rejected(folders: dict[str, Path]) -> None:
    model = theirs(folders["bitnet-offline"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 0.5
    with pytest.raises(CheckpointError, match=r"-1, 0 and 1 .* in model.layers.1.mlp.up_proj"):
        accelerate(model)


def test_the_weights_that_transformers_leaves_as_uint8_are_taken(folders: dict[str, Path]) -> None:
    reference = oracle(folders["bitnet-offline"])
    ours = copy.deepcopy(reference)
    for module in ours.modules():
        if isinstance(module, AutoBitLinear):
            codes = module.weight.to(torch.int8).view(torch.uint8)
            module.weight = nn.Parameter(codes, requires_grad=False)
    assert_same_model(accelerate(ours), reference)


def test_a_code_3_is_rejected(folders: dict[str, Path]) -> None:
    model = theirs(folders["bitnet-bitlinear"])
    model.model.layers[0].mlp.up_proj.weight[0, 0] = 255
    with pytest.raises(CheckpointError, match=r"code 3.* in model.layers.0.mlp.up_proj"):
        accelerate(model)


def test_a_missing_tensor_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", FAMILIES["bitnet-offline"])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight_scale of model.layers.1.self_attn.k_proj"):
        theirs(folder, quantization_config=BitnetOpsConfig())


def test_other_methods_stay_transformers_business(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", FAMILIES["bitnet-offline"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match='quant_method "bitnet", got .awq'):
        theirs(folder, quantization_config=BitnetOpsConfig())
    folder = write_checkpoint(tmp_path / "n", FAMILIES["bitnet-offline"])
    other = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="BitNetQuantConfig.*BitsAndBytesConfig"):
        theirs(folder, quantization_config=other)


def test_importing_bitnet_ops_does_not_import_transformers() -> None:
    code = "import sys, bitnet_ops; bitnet_ops.BitLinear; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_page_run(number: int, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "transformers.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[number]
    assert code.count("microsoft/bitnet-b1.58-2B-4T") == 1
    demo = ROOT / "tests" / "data" / "demo-model"
    code = code.replace("microsoft/bitnet-b1.58-2B-4T", str(demo))
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "In the beginning" in done.stdout if number == 0 else (tmp_path / "saved").is_dir()
