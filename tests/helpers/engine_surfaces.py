"""Stand-ins for what our plug-ins touch of SGLang and vLLM, where these are not installed.

Tables, registries and base classes by name; they compute nothing. tests/engines holds the plug-ins
against the real packages. It must not import bitnet_ops.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import nn


class LinearMethodBase:
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    pass


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}


class LinearBase(nn.Module):
    """`tp_size` is an attribute of the real ones too."""

    def __init__(self, quant_config=None, prefix="", tp_size=1):
        super().__init__()
        self.tp_size = tp_size
        self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        assert self.quant_method is not None  # what a None for a skipped layer ends in


class ReplicatedLinear(LinearBase):
    pass


class ColumnParallelLinear(LinearBase):
    pass


class RowParallelLinear(LinearBase):
    pass


class OddLinear(LinearBase):
    """A linear of a kind that the plug-ins do not know."""


class LazyTable(Mapping):
    """A read-only registry of "module:Class" strings, as SGLang plans it."""

    def __init__(self):
        self.specs = {"awq": "somewhere:AWQConfig"}

    def __getitem__(self, key):
        module, name = self.specs[key].split(":")
        return getattr(importlib.import_module(module), name)

    def __iter__(self):
        return iter(self.specs)

    def __len__(self):
        return len(self.specs)


class FrozenTable(LazyTable):
    """A read-only registry of a kind that nobody foresaw."""

    def __init__(self):
        self.entries = ()

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return 0


def _named(*classes):
    return {cls.__name__: cls for cls in classes}


LINEARS = _named(LinearBase, ReplicatedLinear, ColumnParallelLinear, RowParallelLinear)


@dataclass
class LinearAttnModelSpec:
    config_class: type
    backend_class_name: str
    arch_names: list
    hybrid_backend_class_name: str | None = None
    support_mamba_cache_extra_buffer: bool = False


@dataclass(kw_only=True)
class Mamba2StateDType:
    conv: torch.dtype
    temporal: torch.dtype


@dataclass(kw_only=True)
class Mamba2StateShape:
    conv: list
    temporal: tuple

    @classmethod
    def create(
        cls, *, tp_world_size, intermediate_size, n_groups, num_heads, head_dim, state_size,
        conv_kernel,
    ):  # fmt: skip
        assert tp_world_size == 1
        channels = intermediate_size + 2 * n_groups * state_size
        return cls(conv=[(channels, conv_kernel - 1)], temporal=(num_heads, head_dim, state_size))


@dataclass(kw_only=True)
class Mamba2CacheParams:
    shape: Mamba2StateShape
    dtype: Mamba2StateDType
    layers: list


MAMBA_HOOK = "sglang.srt.arg_groups.mamba_hook"


def validate_mamba_extra_buffer(view, hf_config, *, mamba_cache_chunk_size_of):
    """Looks the check up where it stands, as SGLang does."""
    assert sys.modules[MAMBA_HOOK]._platform_supports_mamba_cache_extra_buffer(), "no platform"
    return view, mamba_cache_chunk_size_of


def _hybrids():
    """What SGLang knows of models with recurrent layers."""
    specs = []
    configs = "sglang.srt.configs"
    return {
        f"{configs}.linear_attn_model_registry": {
            "SPECS": specs,
            "register_linear_attn_model": specs.append,
            "get_linear_attn_spec_by_arch": lambda name: next(
                (spec for spec in specs if name in spec.arch_names), None
            ),
            **_named(LinearAttnModelSpec),
        },
        f"{configs}.mamba_utils": _named(Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape),
        MAMBA_HOOK: {
            "_platform_supports_mamba_cache_extra_buffer": lambda: False,
            "validate_mamba_extra_buffer": validate_mamba_extra_buffer,
        },
    }


class HookType(enum.Enum):
    BEFORE = "before"


def _hooks():
    found = []

    def register(target, hook, hook_type):
        found.append((target, hook, hook_type))

    registry = types.SimpleNamespace(register=register, found=found)
    return {"HookRegistry": registry, **_named(HookType)}


def sglang(table_type=dict):
    """{dotted name: its members} of SGLang's surface, with fresh tables of the given kind."""
    choices, backends, packages = ["awq", "fp8"], {"torch_native": None}, []

    def register(package_name, overwrite=False):
        packages.append((package_name, overwrite))

    layers = "sglang.srt.layers"
    return {
        f"{layers}.quantization": {
            "QUANTIZATION_METHODS": table_type(),
            "CPU_QUANTIZATION_METHODS": table_type(),
        },
        f"{layers}.quantization.base_config": _named(LinearMethodBase, QuantizationConfig),
        f"{layers}.quantization.unquant": _named(UnquantizedLinearMethod),
        f"{layers}.linear": LINEARS,
        "sglang.srt.server_args": {
            "CHOICES": choices,
            "add_quantization_method_choices": choices.extend,
        },
        f"{layers}.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": lambda n: lambda make: backends.update({n: make}),
        },
        "sglang.srt.models.registry": {
            "ModelRegistry": types.SimpleNamespace(register=register, packages=packages)
        },
        "sglang.srt.plugins.hook_registry": _hooks(),
        **_hybrids(),
    }


M = TypeVar("M")


class AttentionLayerBase:
    pass


class AttentionBackend:
    pass


class AttentionMetadataBuilder(Generic[M]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        pass


class KVCacheLayout(enum.Enum):
    LBHNC = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def page_size_bytes(self):
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


class MambaAttentionBackendEnum(enum.Enum):
    GDN_ATTN = "gdn"


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    shapes: tuple
    dtypes: tuple
    block_size: int
    page_size_padded: int | None = None
    mamba_type: MambaAttentionBackendEnum
    mamba_cache_mode: str = "none"


class MambaBase(AttentionLayerBase):
    def bind_kv_cache(self, kv_cache):
        """As vLLM cuts a page: the states one behind the other."""
        pages, begin, states = kv_cache.squeeze(dim=(1, 2)), 0, []
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            states.append(pages[:, begin:end].view(dtype).view(-1, *shape))
            begin = end
        self.kv_cache = tuple(states)


class CPUModelRunner:
    """Of vLLM's what seeds need: a token is drawn behind every chunk, and some are forgotten."""

    def __init__(self, generators, discarded):
        mask = np.array(discarded)
        self.discard_request_mask = types.SimpleNamespace(np=np.append(mask, True))
        self.input_batch = types.SimpleNamespace(generators=generators, num_reqs=len(mask))

    def _sample(self):
        return [float(torch.rand(1, generator=g)) for g in self.input_batch.generators.values()]

    def _bookkeeping_sync(self):
        for row in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            if (one := self.input_batch.generators.get(int(row))) is not None:
                one.set_offset(one.get_offset() - 4)


def mamba_get_block_table_tensor(block_table, seq_lens, kv_cache_spec, mamba_cache_mode):
    if mamba_cache_mode == "none":
        return block_table
    columns = (seq_lens - 1) // kv_cache_spec.block_size
    return torch.gather(block_table, 1, columns[:, None].long())


class ForwardContext:
    """What get_forward_context returns; a test sets attn_metadata."""

    attn_metadata = None


def _kv_dtype(kv_cache_dtype, model_config):
    named = {"bfloat16": torch.bfloat16, "fp8": torch.uint8}
    return model_config.dtype if kv_cache_dtype == "auto" else named[kv_cache_dtype]


def vllm():
    """{dotted name: its members} of vLLM's surface, with fresh tables."""
    methods, classes, models = ["awq", "fp8"], {}, {"LlamaForCausalLM": "vllm's own"}
    ForwardContext.attn_metadata = None

    def register_quantization_config(name):
        def enter(cls):
            if name not in methods:
                methods.append(name)
            classes[name] = cls
            return cls

        return enter

    registry = types.SimpleNamespace(
        models=models,
        get_supported_archs=models.keys,
        register_model=models.__setitem__,
    )
    layers = "vllm.model_executor.layers"
    return {
        f"{layers}.quantization": {
            "QUANTIZATION_METHODS": methods,
            "CLASSES": classes,
            "register_quantization_config": register_quantization_config,
        },
        f"{layers}.quantization.base_config": _named(QuantizationConfig),
        f"{layers}.linear": LINEARS | _named(LinearMethodBase, UnquantizedLinearMethod),
        f"{layers}.attention_layer_base": _named(AttentionLayerBase),
        "vllm.model_executor.models": {"ModelRegistry": registry},
        "vllm.config": {},
        "vllm.forward_context": {"get_forward_context": lambda: ForwardContext},
        "vllm.utils.torch_utils": {"kv_cache_dtype_str_to_dtype": _kv_dtype},
        "vllm.v1.attention.backend": _named(AttentionBackend, AttentionMetadataBuilder),
        "vllm.v1.kv_cache_interface": _named(FullAttentionSpec, KVCacheLayout, MambaSpec),
        f"{layers}.mamba.abstract": _named(MambaBase),
        f"{layers}.mamba.mamba_utils": {"get_temporal_copy_spec": lambda *where: where},
        "vllm.v1.worker.cpu_model_runner": {
            "CPUModelRunner": type("CPUModelRunner", (CPUModelRunner,), {})
        },
        "vllm.v1.attention.backends.registry": _named(MambaAttentionBackendEnum),
        "vllm.v1.attention.backends.utils": {
            "mamba_get_block_table_tensor": mamba_get_block_table_tensor
        },
    }


def install(monkeypatch, contents, hidden=()):
    """Put the modules into sys.modules for one test, `hidden` left out; {dotted name: module}.

    Modules of ours that import the engine are loaded afresh.
    """
    engine = next(iter(contents)).split(".")[0]
    ours = f"bitnet_ops.integrations.{engine}."
    for name in list(sys.modules):
        free = name.removeprefix(ours) in ("launch", "serving")
        if name.split(".")[0] == engine or (name.startswith(ours) and not free):
            monkeypatch.delitem(sys.modules, name)
    parents = {".".join(name.split(".")[:i]): {} for name in contents for i in range(1, 9)}
    modules = {}
    for name, members in {**parents, **contents}.items():
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = []
        vars(modules[name]).update(members)
        if name not in hidden:
            monkeypatch.setitem(sys.modules, name, modules[name])
    return modules
