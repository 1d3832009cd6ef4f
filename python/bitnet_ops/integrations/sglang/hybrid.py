"""What SGLang has to know of a converted hybrid: which layers keep states, of which sizes.

SGLang decides by the class of a model's config whether it has recurrent layers, so the folder of
`serving.py` names a config class of our own. Its pools, its prefix tree and its copies of states
are then made for the model as for SGLang's own hybrids; the layers themselves are run by the one op
of `models/whole.py`, so there is no backend for them. Loaded by `register()` only, since it imports
sglang.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.configs import linear_attn_model_registry as hybrids
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from transformers import AutoConfig, PretrainedConfig

from bitnet_ops.integrations.sglang import HYBRID, PLATFORM_CHECK
from bitnet_ops.integrations.sglang.serving import MODEL_TYPE, model_of


class BitnetHybridConfig(PretrainedConfig):
    """The config.json of a hybrid's folder."""

    model_type = MODEL_TYPE

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """Sizes of a slot; float32 throughout, which our op computes on, in place."""
        net = model_of(self.to_dict()).delta_net
        assert net is not None
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=net.values,
            n_groups=net.key_heads,
            num_heads=net.value_heads,
            head_dim=net.value_dim,
            state_size=net.key_dim,
            conv_kernel=net.kernel,
        )
        dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        return Mamba2CacheParams(shape=shape, layers=list(net.layers), dtype=dtype)


def no_backend(runner: Any) -> None:
    """In the place of a backend of recurrent layers.

    SGLang 0.5.20 then looks for the layers of attention in its own config, not in the model's.
    """
    config, name = runner.model_config, "full_attention_layer_ids"
    if not hasattr(config, name):
        setattr(config, name, getattr(config.hf_config, name))


def attention_alone(attention: Any, recurrent: None, layers: list[int]) -> Any:
    """In the place of a backend that chooses between two by the layer."""
    del recurrent, layers
    return attention


def put_hybrids() -> None:
    """Tell SGLang of the config class and of what our states allow. May be called repeatedly."""
    AutoConfig.register(MODEL_TYPE, BitnetHybridConfig, exist_ok=True)
    if hybrids.get_linear_attn_spec_by_arch(HYBRID) is None:
        hybrids.register_linear_attn_model(
            hybrids.LinearAttnModelSpec(
                config_class=BitnetHybridConfig,
                backend_class_name=f"{__name__}.{no_backend.__name__}",
                hybrid_backend_class_name=f"{__name__}.{attention_alone.__name__}",
                arch_names=[HYBRID],
                support_mamba_cache_extra_buffer=True,
            )
        )
        _allow_tracking()


def _allow_tracking() -> None:
    """Let SGLang ask our hybrids for states behind tokens in the middle of a prompt.

    It refuses that on CPUs, whose kernels of its own cannot give them; ours can. Versions that
    refuse it elsewhere go without, and keep the states at the ends of prompts alone.
    """
    if not hasattr(mamba_hook, PLATFORM_CHECK):
        return
    theirs = mamba_hook.validate_mamba_extra_buffer

    @functools.wraps(theirs)
    def validate(view: Any, hf_config: Any, **options: Any) -> None:
        if getattr(hf_config, "model_type", None) != MODEL_TYPE:
            return theirs(view, hf_config, **options)
        with replaced_for_now(mamba_hook, PLATFORM_CHECK, lambda: True):
            return theirs(view, hf_config, **options)

    mamba_hook.validate_mamba_extra_buffer = validate


@contextlib.contextmanager
def replaced_for_now(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def pin_nothing() -> None:
    """Without an accelerator memory is not pinned for one, which torch refuses to do.

    SGLang pins a mask at every step over tracked states. For the process that runs such a model.
    """
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
