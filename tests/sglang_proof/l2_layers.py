"""Rung L2: SGLang's REAL linear classes with our method, in one process, without an engine.

Runs in the proof's environment with the import stubs on PYTHONPATH and SGLANG_USE_CPU_ENGINE=1.
Contents are compared code by code with what an independent packer put in, outputs with
transformers' modules in fp32. Prints one line per check; exit status 1 if any fails.
Usage: l2_layers.py RESULT.json
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import traceback
import types
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

import sglang.srt.layers.linear as linear
import sglang.srt.layers.quantization as quantization
import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights
from sglang.srt.plugins import load_plugins
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, WeightQuant

from bitnet_ops import ops
from bitnet_ops.integrations import CheckpointError
from bitnet_ops.integrations.linear_method import canonical_rows
from hf_writer import pack_quarters

FLAVOURS = {
    "bitlinear": {},
    "autobitlinear offline": {"linear_class": "autobitlinear"},
    "autobitlinear online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
K, HEADS, KV_HEADS, HEAD_DIM, INNER = 192, 4, 2, 16, 80
DETAILS = []


def config_of(flavour):
    cls = quantization.get_quantization_config("bitnet")
    return cls.from_config({"quant_method": "bitnet", **FLAVOURS[flavour]})


class Matrix:
    """One random logical matrix: its codes, checkpoint tensors and transformers' module."""

    def __init__(self, flavour, rows, columns, seed):
        generator = torch.Generator().manual_seed(seed)
        self.shape = (rows, columns)
        if flavour == "autobitlinear online":
            self.stored = torch.randn(rows, columns, generator=generator) * 0.02 * (1 + seed)
            self.scale, self.stored_scale = self.stored.abs().mean(), None
            self.codes = (WeightQuant.apply(self.stored) / self.scale).round().to(torch.int8)
            self.module = AutoBitLinear(columns, rows, bias=False, online_quant=True)
            self.module.weight.data = self.stored
            return
        self.codes = torch.randint(-1, 2, self.shape, generator=generator, dtype=torch.int8)
        self.stored = torch.from_numpy(pack_quarters(self.codes.numpy()))
        self.scale = torch.tensor([0.03 + 0.02 * seed])
        if flavour == "bitlinear":
            self.stored_scale = 1 / self.scale
            self.module = BitLinear(columns, rows, bias=False, dtype=torch.float32)
            self.module.weight, self.module.weight_scale = self.stored, self.stored_scale
        else:
            self.stored_scale = self.scale
            self.module = AutoBitLinear(columns, rows, bias=False)
            self.module.load_state_dict({"weight": self.stored, "weight_scale": self.scale})

    def into(self, layer, *shard_id):
        layer.weight.weight_loader(layer.weight, self.stored, *shard_id)
        if self.stored_scale is not None:
            layer.weight_scale.weight_loader(layer.weight_scale, self.stored_scale, *shard_id)

    def bound(self, x):
        """fp32 sums of K products in any order, plus the scaling."""
        terms = x.abs().sum(-1, keepdim=True) * self.scale.max()
        return ((x.shape[-1] + 8) * 2.0**-23 * terms).expand(*x.shape[:-1], self.shape[0])


def inputs(columns, tokens=5):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(99))


def finish(layer):
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)  # engines may, after a weight update
    return layer


def codes_in(layer, columns):
    assert layer.weight.dim() == 3, "the layer still has the file's rows"
    return ops.unpack(canonical_rows(layer), columns)


def equal(what, ours, theirs):
    assert torch.equal(ours, theirs), f"{what}: {(ours != theirs).sum()} of {ours.numel()} differ"


def close(what, ours, theirs, bound):
    ratio = ((ours - theirs).abs() / bound).max().item()
    assert ratio <= 1, f"{what}: {ratio:.2f} times the bound of fp32 rounding"
    DETAILS.append(ratio)


# Registration -----------------------------------------------------------------------------------


def check_entry_point_registers():
    """load_plugins() alone, through the installed entry point, makes the method known."""
    assert "bitnet" not in quantization.QUANTIZATION_METHODS
    load_plugins()
    assert "bitnet" in quantization.QUANTIZATION_METHODS
    from bitnet_ops.integrations.sglang import doctor

    report = doctor()
    assert report["problems"] == [], report
    from sglang.srt.server_args import add_quantization_method_choices

    choices = add_quantization_method_choices.__self__
    assert choices.count("bitnet") == 1, choices


def check_config_class_with_and_without_amx():
    """get_quantization_config consults another table where it sees AMX; both know us."""
    from bitnet_ops.integrations.sglang.quantization import BitNetConfig

    seen = quantization.cpu_has_amx_support
    assert quantization.get_quantization_config("bitnet") is BitNetConfig
    try:
        quantization.cpu_has_amx_support = lambda: True
        assert quantization.get_quantization_config("bitnet") is BitNetConfig
        entry = quantization.CPU_QUANTIZATION_METHODS.pop("bitnet")
        try:  # the check above can fail: without the second table it does
            quantization.get_quantization_config("bitnet")
        except ValueError as error:
            assert "on CPU" in str(error), error
        else:
            raise AssertionError("AMX was not faked: the CPU table was not consulted")
        quantization.CPU_QUANTIZATION_METHODS["bitnet"] = entry
    finally:
        quantization.cpu_has_amx_support = seen
    assert torch.float16 not in BitNetConfig().get_supported_act_dtypes()


# Layers -----------------------------------------------------------------------------------------


def build(cls, flavour, *args, **options):
    """A real SGLang linear in fp32 with our config."""
    layer = cls(*args, bias=False, quant_config=config_of(flavour), prefix="proof", **options)
    assert type(layer.quant_method).__name__ == "SGLangLinearMethod"
    return layer


def check_replicated():
    for flavour in FLAVOURS:
        matrix = Matrix(flavour, INNER, K, 1)
        layer = build(linear.ReplicatedLinear, flavour, K, INNER, params_dtype=torch.float32)
        matrix.into(layer)
        equal(flavour, codes_in(finish(layer), K), matrix.codes)
        x = inputs(K)
        close(flavour, layer(x)[0], matrix.module(x), matrix.bound(x))
        close(flavour, layer(x[None])[0][0], matrix.module(x), matrix.bound(x))


def check_column_parallel():
    for flavour in FLAVOURS:
        for ranks in (1, 2):
            matrix, x = Matrix(flavour, INNER, K, 2), inputs(K)
            layers = [
                build(linear.ColumnParallelLinear, flavour, K, INNER, tp_rank=r, tp_size=ranks)
                for r in range(ranks)
            ]
            for layer in layers:
                matrix.into(layer)
            equal(flavour, torch.cat([codes_in(finish(la), K) for la in layers]), matrix.codes)
            ours = torch.cat([layer(x)[0] for layer in layers], -1)
            close(flavour, ours, matrix.module(x), matrix.bound(x))


def fused(cls, flavour, matrices, ids, ranks, *args, **options):
    """Both ranks of a fused layer, loaded shard by shard."""
    layers = []
    for rank in range(ranks):
        layer = build(cls, flavour, *args, tp_rank=rank, tp_size=ranks, **options)
        for matrix, shard_id in zip(matrices, ids, strict=True):
            matrix.into(layer, shard_id)
        layers.append(finish(layer))
    return layers


def check_merged_gate_up():
    for flavour in FLAVOURS:
        for ranks in (1, 2):
            pair, x = [Matrix(flavour, INNER, K, s) for s in (3, 4)], inputs(K)
            layers = fused(
                linear.MergedColumnParallelLinear, flavour, pair, (0, 1), ranks, K, [INNER, INNER]
            )
            halves = [layer(x)[0].chunk(2, -1) for layer in layers]
            codes = [codes_in(layer, K).chunk(2) for layer in layers]
            for i, matrix in enumerate(pair):
                equal(flavour, torch.cat([rank[i] for rank in codes]), matrix.codes)
                ours = torch.cat([rank[i] for rank in halves], -1)
                close(flavour, ours, matrix.module(x), matrix.bound(x))


def check_fused_qkv():
    """q splits over the ranks; k and v too, or are replicated where heads are fewer than ranks."""
    for flavour in FLAVOURS:
        for ranks, kv_heads in ((1, KV_HEADS), (2, KV_HEADS), (2, 1)):
            rows = (HEADS * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM)
            three = [Matrix(flavour, size, K, 5 + i) for i, size in enumerate(rows)]
            shape = (K, HEAD_DIM, HEADS, kv_heads)
            layers = fused(linear.QKVParallelLinear, flavour, three, ("q", "k", "v"), ranks, *shape)
            x, replicated = inputs(K), kv_heads < ranks
            for i, matrix in enumerate(three):
                local = [layer.output_partition_sizes for layer in layers]
                codes = [codes_in(la, K).split(s)[i] for la, s in zip(layers, local, strict=True)]
                parts = [la(x)[0].split(s, -1)[i] for la, s in zip(layers, local, strict=True)]
                if replicated and i > 0:
                    equal("replicas", codes[0], codes[1])
                    codes, parts = codes[:1], parts[:1]
                equal(flavour, torch.cat(codes), matrix.codes)
                close(flavour, torch.cat(parts, -1), matrix.module(x), matrix.bound(x))


def check_weights_updated_later():
    """update_weights_from_tensor loads shards and calls no post-load hook; the layout stays."""
    for flavour in FLAVOURS:
        pair, x = [Matrix(flavour, INNER, K, s) for s in (3, 4)], inputs(K)
        cls, sizes = linear.MergedColumnParallelLinear, [INNER, INNER]
        (layer,) = fused(cls, flavour, pair, (0, 1), 1, K, sizes)
        shape = layer.weight.shape
        pair[1] = Matrix(flavour, INNER, K, 9)
        pair[1].into(layer, 1)
        assert layer.weight.shape == shape, layer.weight.shape
        for i, matrix in enumerate(pair):
            equal(flavour, codes_in(layer, K).chunk(2)[i], matrix.codes)
            close(flavour, layer(x)[0].chunk(2, -1)[i], matrix.module(x), matrix.bound(x))


def check_row_parallel():
    """Columns split; each rank quantises its own columns, so it equals a layer of only those."""
    start_gloo()
    for flavour in FLAVOURS:
        for ranks in (1, 2):
            matrix, x = Matrix(flavour, 64, K, 8), inputs(K)
            layers = [
                build(linear.RowParallelLinear, flavour, K, 64, tp_rank=r, tp_size=ranks)
                for r in range(ranks)
            ]
            for layer in layers:
                matrix.into(layer)
            width = K // ranks
            codes = [codes_in(finish(layer), width) for layer in layers]
            equal(flavour, torch.cat(codes, dim=1), matrix.codes)
            for rank, layer in enumerate(layers):
                part = x[:, rank * width : (rank + 1) * width].contiguous()
                ours = layer(part, skip_all_reduce=True)[0]
                reference = exact_product(part, codes[rank], matrix.scale)
                close(flavour, ours, reference, matrix.bound(part))
            if ranks == 1:
                close(flavour, layers[0](x)[0], matrix.module(x), matrix.bound(x))


def exact_product(x, codes, scale):
    """W1.58A8 in float64: quantise each token, integer product, scales."""
    inverse = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (x * inverse).round().clamp(-128, 127).double()
    return (q @ codes.double().T * scale.double() / inverse.double()).float()


def start_gloo():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    method = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=method
    )
    if "tensor_model_parallel_size" in inspect.signature(initialize_model_parallel).parameters:
        initialize_model_parallel(1)
        return
    from sglang.srt.runtime_context import get_parallel  # since 0.5.21 widths are stated there

    names = "tp_size moe_ep_size pp_size attn_dp_size attn_cp_size moe_dp_size attn_dcp_size"
    widths = dict.fromkeys([*names.split(), "shared_experts_tp_size"], 1)
    get_parallel().override_permanently(**widths)
    initialize_model_parallel()


# Rejections ---------------------------------------------------------------------------------------


def rejected(what, message, call):
    try:
        call()
    except CheckpointError as error:
        assert message in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what}: nothing was rejected")


def reject_short(cls, flavour, **options):
    layer = build(cls, flavour, K, 128, **options)
    short = Matrix(flavour, 32, K, 1)
    rejected(cls.__name__, "expected weight [32, 192]", lambda: short.into(layer))
    rejected("unloaded", "got none for weight", lambda: finish(layer))


def check_rejections():
    """What SGLang takes in silence on a CPU is rejected; the stock loader is shown beside it."""
    plain = linear.ColumnParallelLinear(K, 128, bias=False, tp_rank=0, tp_size=1)
    plain.weight.weight_loader(plain.weight, torch.ones(32, K))
    DETAILS.append(f"stock loader: {int(plain.weight.abs().sum(1).ne(0).sum())} of 128 rows")

    offline = "autobitlinear offline"
    reject_short(linear.ReplicatedLinear, offline)
    for cls in (linear.ColumnParallelLinear, linear.RowParallelLinear):
        reject_short(cls, offline, tp_rank=0, tp_size=1)
    merged = build(
        linear.MergedColumnParallelLinear, offline, K, [INNER, INNER], tp_rank=0, tp_size=1
    )
    Matrix(offline, INNER, K, 1).into(merged, 0)
    rejected("missing up", "weight of shard 1", lambda: finish(merged))

    def biased():
        config = config_of(offline)
        return linear.ReplicatedLinear(K, 64, bias=True, quant_config=config, prefix="proof")

    rejected("bias", "expected no bias", biased)
    half = {"params_dtype": torch.float16}
    rejected(
        "float16",
        "bfloat16 or float32",
        lambda: build(linear.ReplicatedLinear, offline, K, 8, **half),
    )


def check_bias_takes_our_loader():
    matrix, bias = Matrix("bitlinear", 64, K, 1), torch.randn(64)
    config = config_of("bitlinear")
    layer = linear.ColumnParallelLinear(
        K, 64, bias=True, quant_config=config, prefix="proof", tp_rank=1, tp_size=2
    )
    rejected(
        "short bias",
        "expected bias floating-point [64]",
        lambda: layer.bias.weight_loader(layer.bias, bias[:32]),
    )
    matrix.into(layer)
    rejected("bias never came", "bias of shard None", lambda: finish(layer))
    layer.bias.weight_loader(layer.bias, bias)
    x = inputs(K)
    expected = matrix.module(x)[:, 32:] + bias[32:]
    bound = matrix.bound(x)[:, 32:] + 2.0**-23 * expected.abs()
    close("bias", finish(layer)(x)[0], expected, bound)


def check_dummy_weights():
    """--load-format dummy: the real initialiser fills floats only; bytes must be valid before."""
    import sglang.srt.runtime_context as runtime_context

    layer = build(
        linear.QKVParallelLinear, "bitlinear", K, HEAD_DIM, HEADS, KV_HEADS, tp_rank=0, tp_size=1
    )
    rejected("nothing loaded", "got none for weight", lambda: finish(layer))
    model = runtime_context.get_model
    try:
        runtime_context.get_model = lambda: types.SimpleNamespace(load_format="dummy")
        finish(layer)
        initialize_dummy_weights(layer)
        finish(layer)
    finally:
        runtime_context.get_model = model
    assert torch.isfinite(layer(inputs(K))[0]).all()


def check_model_file_loads_strictly():
    """Our BitNetForCausalLM rejects a tensor without a place and a parameter without a tensor."""
    from sglang.srt.models.registry import ModelRegistry

    from bitnet_ops.integrations.sglang.models import bitnet

    model_class, _ = ModelRegistry.resolve_model_cls(["BitNetForCausalLM"])
    assert model_class is bitnet.BitNetForCausalLM, model_class
    model = model_class.__new__(model_class)  # load_weights without the engine that __init__ needs
    torch.nn.Module.__init__(model)
    model.config, model._loaded = types.SimpleNamespace(tie_word_embeddings=True), set()
    model.norm = bitnet.Norm(4, 1e-5)
    gains = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rejected("absent", "got none for ['norm.weight']", lambda: model.load_weights([]))
    for name in ("layers.0.self_attn.q_proj.bias", "layers.0.bogus.weight"):
        rejected("unknown", f"got '{name}'", lambda name=name: model.load_weights([(name, gains)]))
    model.load_weights([("norm.weight", gains), ("lm_head.weight", gains)])
    equal("gains", model.norm.weight.data, gains)


def check_several_ranks_are_refused_where_one_computes():
    """By the model classes themselves too, for who starts SGLang without our launcher."""
    from bitnet_ops.integrations.sglang.models import bitnet, whole

    two = types.SimpleNamespace(tp_size=2, pp_size=1)
    reasons = {
        bitnet: (bitnet.BitNetForCausalLM, "the sub-norms span all heads"),
        whole: (whole.BitnetOpsForCausalLM, "a converted model runs on one rank"),
    }
    for module, (model_class, reason) in reasons.items():
        seen = module.get_parallel
        try:
            module.get_parallel = lambda: two
            rejected(model_class.__name__, reason, lambda cls=model_class: cls(None))
        finally:
            module.get_parallel = seen


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def main():
    failed, lines = [], []
    with torch.no_grad():
        for check in CHECKS:
            name = check.__name__[len("check_") :].replace("_", " ")
            DETAILS.clear()
            try:
                check()
            except Exception:
                failed.append(name)
                traceback.print_exc()
                lines.append(f"FAIL {name}")
            else:
                lines.append(f"ok {name}{summary()}")
            print(lines[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps({"failed": failed, "lines": lines}))
    return 1 if failed else 0


def summary():
    ratios = [d for d in DETAILS if isinstance(d, float)]
    texts = [d for d in DETAILS if isinstance(d, str)]
    if ratios:
        texts.append(f"{len(ratios)} outputs, at most {max(ratios):.3f} of the rounding bound")
    return f" ({'; '.join(texts)})" if texts else ""


if __name__ == "__main__":
    sys.exit(main())
