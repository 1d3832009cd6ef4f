"""A hand-written stand-in for the part of vLLM that a quantisation plug-in touches.

It behaves as vllm 0.32.0 does where the plug-in can notice: which members are abstract, how the
linears call `create_weights`, what they set before and after it. It computes nothing itself.
tests/vllm_proof/l2_layers.py holds it against the real package (`CONFORMANCE` below). It must not
import bitnet_ops.
"""

from __future__ import annotations

import enum
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

# Engine modules of ours that were loaded against another surface must be loaded afresh.
PLUGIN_MODULES = (
    "bitnet_ops.integrations.vllm.config",
    "bitnet_ops.integrations.vllm.linear",
    "bitnet_ops.integrations.vllm.kv_layer",
    "bitnet_ops.integrations.vllm.model",
)


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer, *weight_args, **extra_weight_attrs): ...

    @abstractmethod
    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        return


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ): ...

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
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        return None

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...

    def maybe_update_config(self, model_name, hf_config=None, revision=None):
        return None


class LinearBase(nn.Module):
    def __init__(
        self,
        input_size,
        output_size,
        bias=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        return_bias=True,
        disable_tp=False,
        tp_rank=None,
        tp_size=None,
    ):
        super().__init__()
        self.input_size, self.output_size, self.has_bias = input_size, output_size, bias
        self.skip_bias_add, self.prefix = skip_bias_add, prefix
        self.params_dtype = params_dtype or torch.get_default_dtype()
        if quant_config is None:
            self.quant_method = UnquantizedLinearMethod()
        elif (method := quant_config.get_quant_method(self, prefix)) is not None:
            self.quant_method = method
        else:
            raise ValueError("All linear layers should support quant method.")
        self.tp_rank, self.tp_size = tp_rank or 0, tp_size or 1


class _StockLinear(LinearBase):
    """What the stand-ins of the concrete linears share; the real ones each have their own."""

    def _make_bias(self, bias, rows):
        if not bias:
            self.register_parameter("bias", None)
            return
        self.bias = nn.Parameter(torch.zeros(rows, dtype=self.params_dtype), requires_grad=False)
        self.bias.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight):
        assert param.data.shape == loaded_weight.shape
        param.data.copy_(loaded_weight)

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
        *,
        return_bias=True,
        disable_tp=False,
    ):
        super().__init__(
            input_size, output_size, bias, skip_bias_add, params_dtype, quant_config, prefix
        )
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
        gather_output=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        return_bias=True,
        disable_tp=False,
        tp_rank=None,
        tp_size=None,
    ):
        self.tp_rank, self.tp_size = tp_rank or 0, tp_size or 1
        sizes = getattr(self, "output_sizes", [output_size])
        self.output_partition_sizes = [size // self.tp_size for size in sizes]
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
        )
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=input_size,
            output_partition_sizes=self.output_partition_sizes,
            input_size=input_size,
            output_size=output_size,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )
        self._make_bias(bias, sum(self.output_partition_sizes))


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size, output_sizes, bias=True, **options):
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(output_sizes), bias=bias, **options)


class QKVParallelLinear(ColumnParallelLinear):
    """The real one asks the process group for rank and size; here they are arguments."""

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
        heads_here, kv_here = total_num_heads // tp_size, max(1, kv_heads // tp_size)
        self.num_kv_head_replicas = max(1, tp_size // kv_heads)
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
    """The real one asks the process group for rank and size; here they are arguments."""

    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        params_dtype=None,
        reduce_results=True,
        quant_config=None,
        prefix="",
        tp_rank=0,
        tp_size=1,
    ):
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.input_size_per_partition = input_size // tp_size
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
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
        super().__init__(input_size, output_size, quant_config=quant_config, prefix=prefix)


class ModelRegistry:
    """Records what was registered."""

    def __init__(self):
        self.models = {"LlamaForCausalLM": "vllm's own"}

    def get_supported_archs(self):
        return self.models.keys()

    def register_model(self, model_arch, model_cls):
        self.models[model_arch] = model_cls


M = TypeVar("M")


class AttentionLayerBase(ABC):
    def bind_kv_cache(self, kv_cache):
        self.kv_cache = kv_cache

    @abstractmethod
    def get_attn_backend(self): ...

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config): ...


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...


class AttentionMetadataBuilder(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class KVCacheLayout(enum.Enum):
    LBHNC = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


def kv_cache_dtype_str_to_dtype(kv_cache_dtype, model_config):
    named = {"bfloat16": torch.bfloat16, "fp8": torch.uint8}
    return model_config.dtype if kv_cache_dtype == "auto" else named[kv_cache_dtype]


class ForwardContext:
    """What get_forward_context returns; a test sets attn_metadata."""

    attn_metadata = None


BASE = (QuantizeMethodBase, QuantizationConfig)
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
    ("vllm.model_executor.layers.quantization.base_config", BASE),
    (
        "vllm.model_executor.layers.linear",
        (LinearMethodBase, UnquantizedLinearMethod, LinearBase, ReplicatedLinear)
        + (ColumnParallelLinear,),
    ),
    ("vllm.model_executor.layers.attention_layer_base", (AttentionLayerBase,)),
    ("vllm.v1.attention.backend", (AttentionBackend, AttentionMetadataBuilder)),
)


def _modules():
    """{dotted name: module} of the surface, with fresh tables."""
    methods = ["awq", "fp8"]
    classes = {}

    def register_quantization_config(name):
        def enter(cls):
            if name not in methods:
                methods.append(name)
            classes[name] = cls
            return cls

        return enter

    linear = (LinearMethodBase, UnquantizedLinearMethod, *LINEARS)
    contents = {
        "vllm": {},
        "vllm.config": {},
        "vllm.forward_context": {"get_forward_context": lambda: ForwardContext},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"kv_cache_dtype_str_to_dtype": kv_cache_dtype_str_to_dtype},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            c.__name__: c for c in (AttentionBackend, AttentionMetadataBuilder)
        },
        "vllm.v1.kv_cache_interface": {c.__name__: c for c in (FullAttentionSpec, KVCacheLayout)},
        "vllm.model_executor.layers.attention_layer_base": {
            "AttentionLayerBase": AttentionLayerBase
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {c.__name__: c for c in linear},
        "vllm.model_executor.layers.quantization": {
            "QUANTIZATION_METHODS": methods,
            "CLASSES": classes,
            "register_quantization_config": register_quantization_config,
        },
        "vllm.model_executor.layers.quantization.base_config": {c.__name__: c for c in BASE},
        "vllm.model_executor.models": {"ModelRegistry": ModelRegistry()},
    }
    modules = {}
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        modules[name] = module
    return modules


def install(monkeypatch):
    """Put the surface into sys.modules for one test; returns {dotted name: module}."""
    for name in [m for m in sys.modules if m == "vllm" or m.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    ForwardContext.attn_metadata = None
    for name in PLUGIN_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = _modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules
