"""A hand-written stand-in for the part of SGLang that a quantisation plug-in touches.

It behaves as sglang 0.5.20 does where the plug-in can notice: which members are abstract, how the
five linears call `create_weights`, what they set before and after it, and which tables are
consulted. It computes nothing itself. tests/sglang_proof/l2_layers.py holds it against the real
package (`CONFORMANCE` below), so it cannot drift unnoticed. It must not import bitnet_ops.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod

import torch
from torch import nn

# Engine modules of ours that were loaded against another surface must be loaded afresh.
PLUGIN_MODULES = (
    "bitnet_ops.integrations.sglang.attention",
    "bitnet_ops.integrations.sglang.config",
    "bitnet_ops.integrations.sglang.linear",
    "bitnet_ops.integrations.sglang.models",
    "bitnet_ops.integrations.sglang.models.bitnet",
)


class QuantizeMethodBase(ABC):
    def create_weights(self, layer, *weight_args, **extra_weight_attrs):
        raise NotImplementedError

    @abstractmethod
    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        return


class LinearMethodBase(QuantizeMethodBase):
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        raise NotImplementedError

    @abstractmethod
    def apply(self, layer, x, bias=None): ...


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        rows = sum(output_partition_sizes)
        weight = torch.zeros(rows, input_size_per_partition, dtype=params_dtype)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)


class QuantizationConfig(ABC):
    def __init__(self):
        self.packed_modules_mapping = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant):
        return None

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...

    @abstractmethod
    def get_scaled_act_names(self): ...


class LinearBase(nn.Module):
    def __init__(
        self, input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix=""
    ):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        if quant_config is None:
            self.quant_method = UnquantizedLinearMethod()
        else:
            self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        assert self.quant_method is not None  # what a None for a skipped layer ends in


class _StockLinear(LinearBase):
    """What the stand-ins of the concrete linears share; the real ones each have their own."""

    def weight_loader(self, param, loaded_weight):
        """The stock loader on a CPU: takes what rows there are, fills the rest with zeros."""
        rows = min(param.shape[0], loaded_weight.shape[0])
        param.data.zero_()
        param.data[:rows] = loaded_weight[:rows]

    def _make_bias(self, bias, rows):
        if not bias:
            self.register_parameter("bias", None)
            return
        self.bias = nn.Parameter(torch.zeros(rows, dtype=self.params_dtype), requires_grad=False)
        self.bias.weight_loader = self.weight_loader

    def forward(self, x):
        bias = None if self.skip_bias_add else self.bias
        return self.quant_method.apply(self, x, bias), self.bias if self.skip_bias_add else None


class ReplicatedLinear(_StockLinear):
    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
    ):
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)
        self.with_bias = bias
        self.quant_method.create_weights(
            self,
            input_size,
            [output_size],
            input_size,
            output_size,
            self.params_dtype,
            weight_loader=self.weight_loader,
        )
        self._make_bias(bias, output_size)


class ColumnParallelLinear(_StockLinear):
    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        tp_rank=0,
        tp_size=1,
        use_presharded_weights=False,
    ):
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)
        self.with_bias = bias
        self.use_presharded_weights = use_presharded_weights
        self.tp_rank, self.tp_size = tp_rank, tp_size
        sizes = getattr(self, "output_sizes", [output_size])
        self.output_partition_sizes = [size // tp_size for size in sizes]
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=input_size,
            output_partition_sizes=self.output_partition_sizes,
            input_size=input_size,
            output_size=output_size,
            params_dtype=self.params_dtype,
            skip_block_quant_check=False,
            weight_loader=self.weight_loader,
        )
        self._make_bias(bias, sum(self.output_partition_sizes))


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_sizes, bias=True, **options):
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(output_sizes), bias=bias, **options)


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        hidden_size,
        head_size,
        total_num_heads,
        total_num_kv_heads=None,
        bias=True,
        tp_rank=0,
        tp_size=1,
        **options,
    ):
        kv_heads = total_num_kv_heads or total_num_heads
        heads_here = total_num_heads // tp_size
        kv_here = max(1, kv_heads // tp_size)
        self.num_kv_head_replicas = max(1, tp_size // kv_heads)
        self.kv_tp_rank, self.kv_tp_size = tp_rank, tp_size
        here = [heads_here * head_size, kv_here * head_size, kv_here * head_size]
        self.output_sizes = [size * tp_size for size in here]
        super().__init__(
            hidden_size,
            sum(self.output_sizes),
            bias=bias,
            tp_rank=tp_rank,
            tp_size=tp_size,
            **options,
        )


class RowParallelLinear(_StockLinear):
    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        tp_rank=0,
        tp_size=1,
        use_presharded_weights=False,
    ):
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)
        self.with_bias = bias
        self.use_presharded_weights = use_presharded_weights
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.input_size_per_partition = input_size // tp_size
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=self.input_size_per_partition,
            output_partition_sizes=[output_size],
            input_size=input_size,
            output_size=output_size,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )
        self._make_bias(bias, output_size)


class OddLinear(LinearBase):
    """A linear of a kind that the plug-in does not know."""

    def __init__(self, input_size, output_size, quant_config=None, prefix=""):
        super().__init__(input_size, output_size, False, None, quant_config, prefix)


class ModelRegistry:
    """Records what was registered."""

    def __init__(self):
        self.packages = []

    def register(self, package_name, overwrite=False, strict=False):
        self.packages.append((package_name, overwrite))


BASE = (QuantizeMethodBase, LinearMethodBase, QuantizationConfig)
LINEARS = (
    LinearBase,
    ReplicatedLinear,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
# (real module, classes of this file that must agree with it in abstract members and in parameters)
CONFORMANCE = (
    ("sglang.srt.layers.quantization.base_config", BASE),
    ("sglang.srt.layers.quantization.unquant", (UnquantizedLinearMethod,)),
    ("sglang.srt.layers.linear", LINEARS),
)


def _modules(table_type):
    """{dotted name: module} of the surface, with fresh tables of the given kind."""
    choices, backends = ["awq", "fp8"], {"torch_native": None}

    def register_attention_backend(name):
        return lambda make: backends.update({name: make})

    contents = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.quantization": {
            "QUANTIZATION_METHODS": table_type(),
            "CPU_QUANTIZATION_METHODS": table_type(),
        },
        "sglang.srt.layers.quantization.base_config": {c.__name__: c for c in BASE},
        "sglang.srt.layers.quantization.unquant": {
            "UnquantizedLinearMethod": UnquantizedLinearMethod
        },
        "sglang.srt.layers.linear": {c.__name__: c for c in LINEARS},
        "sglang.srt.server_args": {
            "CHOICES": choices,
            "add_quantization_method_choices": choices.extend,
        },
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": register_attention_backend,
        },
        "sglang.srt.models": {},
        "sglang.srt.models.registry": {"ModelRegistry": ModelRegistry()},
    }
    modules = {}
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        modules[name] = module
    return modules


def install(monkeypatch, table_type=dict, registry_imported=False):
    """Put the surface into sys.modules for one test; returns {dotted name: module}."""
    for name in [m for m in sys.modules if m == "sglang" or m.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in PLUGIN_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = _modules(table_type)
    hidden = set() if registry_imported else {"sglang.srt.models.registry"}
    for name, module in modules.items():
        if name not in hidden:
            monkeypatch.setitem(sys.modules, name, module)
    return modules
