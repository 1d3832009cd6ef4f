"""CausalModel: what the engine needs of a model, and what replaces one that was closed."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.prompt import kind_of
from bitnet_ops.generate.request import ClosedError
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.lora import LoraError

CLOSED = "engine: expected an open model, got one that was closed; load it again"


class CausalModel(Protocol):
    """What the engine needs of a model.

    `step` gives the logits f32 [rows, V] of `batch.logit_rows`, of which `batch.largest` may want
    the largest alone and `batch.draws` the one that is drawn, and writes keys and values into the
    pool. A model whose weights may change has `weights_version` too, one with LoRA `adapters`, and
    one with a prefix cache on disk `identity` (Decoder).
    """

    @property
    def config(self) -> ModelConfig: ...

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor: ...


class ClosedModel:
    """In the place of a model that an engine has given up: its config, and a ClosedError."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(CLOSED)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ClosedError(CLOSED)


def cache_config(model: CausalModel) -> ModelConfig:
    """The config of the model's caches, in which a head that drafts may have a part."""
    config: ModelConfig = model.config
    return config if isinstance(model, ClosedModel) else getattr(model, "cache_config", config)


def check_model(model: object, on_disk: bool) -> None:
    """Raise TypeError for what an engine cannot run, or cannot keep prefixes of on disk."""
    if not callable(getattr(model, "step", None)) or not hasattr(model, "config"):
        raise TypeError(
            "engine: expected a model with config and step(batch, pool), got "
            f"{kind_of(model)}; models.build makes one"
        )
    if on_disk and not callable(getattr(model, "identity", None)):
        raise TypeError(
            f"engine: expected a model with identity(adapter) for prefix_dir, got "
            f"{kind_of(model)}; leave out prefix_dir"
        )


def check_adapter(model: CausalModel, name: str | None) -> None:
    """Raise LoraError unless `name` is None or that of an adapter that the model has loaded."""
    if name is None:
        return
    adapters = getattr(model, "adapters", None)
    if adapters is None:
        raise LoraError(
            f"lora: expected a model with adapters, got a {type(model).__name__}; leave out adapter"
        )
    adapters.check(name)
