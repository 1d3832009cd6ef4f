"""Saving, pickling and copying a model as PyTorch's users do: what comes back says the same.

A tensor is saved with its whole storage, so tensors that share one stretch of memory must not share
a storage: sizes are bounded by the data.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bitnet_ops
from bitnet_ops.dummy import model as dummy
from bitnet_ops.formats.sglbitnt import MODEL_FILE
from bitnet_ops.models import Decoder
from bitnet_ops.nn.kv_cache import KVCache
from cached_models import rewritten


def version_1(model: Path) -> Path:
    return rewritten(model / MODEL_FILE, model.with_name("v1.bin"), 1)


OPEN: dict[str, Callable[[Path], Decoder]] = {
    "demo": lambda model: bitnet_ops.load().model,
    "demo/stored head": lambda model: bitnet_ops.load(head_format="stored").model,
    "mapped rows": lambda model: bitnet_ops.load(model, weight_format="canonical").model,
    "repacked": lambda model: bitnet_ops.load(model).model,
    "version 1": lambda model: bitnet_ops.load(version_1(model)).model,
}


@pytest.fixture(params=OPEN)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    dummy.write("tiny", tmp_path / "model")
    return OPEN[request.param](tmp_path / "model")


def logits(model: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[1, 2, 3, 4, 5]]), KVCache(model.config, 1, 8))


def data_bytes(model: Decoder) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def saved(thing: object) -> bytes:
    out = io.BytesIO()
    torch.save(thing, out)
    return out.getvalue()


def bound(model: Decoder) -> float:
    """The data and a few percent, and what a small model spends on names."""
    return 1.03 * data_bytes(model) + 600 * len(model.state_dict()) + 50_000


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_state_dict_is_saved_and_loaded(model: Decoder, used: bool) -> None:
    expected = logits(copy.deepcopy(model))
    if used:
        logits(model)  # binds what a step gathers
    data = saved(model.state_dict())
    assert len(data) < bound(model)
    state = torch.load(io.BytesIO(data), weights_only=True)
    own = model.state_dict()
    assert state.keys() == own.keys() and all(torch.equal(state[k], own[k]) for k in own)
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.zero_()
    assert not torch.equal(logits(other), expected)
    other.load_state_dict(state)
    assert torch.equal(logits(other), expected)


COPY: dict[str, Callable[[Decoder], Decoder]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(io.BytesIO(saved(model)), weights_only=False),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("way", COPY)
def test_a_copy_computes_the_same_and_is_on_its_own(model: Decoder, way: str, used: bool) -> None:
    expected = logits(model) if used else logits(copy.deepcopy(model))
    other = COPY[way](model)
    assert torch.equal(logits(other), expected)
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage() for b in other.buffers()}
    assert sum(storage.nbytes() for storage in storages.values()) <= bound(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)  # in place: the copy's step reads it, the model's does not
    assert not torch.equal(logits(other), expected)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_pickles_are_as_large_as_the_data(model: Decoder, used: bool) -> None:
    if used:
        logits(model)
    assert len(pickle.dumps(model)) < bound(model)
    assert len(saved(model)) < bound(model)


def test_every_tensor_has_a_storage_of_its_own_size(model: Decoder) -> None:
    """Of a large model one shared storage would be written once for every tensor."""
    logits(model)
    for name, buffer in model.named_buffers():
        assert buffer.untyped_storage().nbytes() == buffer.nbytes, name
