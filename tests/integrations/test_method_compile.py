"""BitNetLinearMethod under torch.compile(fullgraph=True): both of its calls, every packing.

Compiled has to equal eager, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from bitnet_ops import BitNetLinearMethod, ops
from bitnet_ops.integrations import ScaleRule
from bitnet_ops.integrations._core import make_params
from bitnet_ops.nn.packing import pack_hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:apply. a consecutive weight"),
]
CODES = torch.randint(-1, 2, (40, 256), generator=torch.Generator().manual_seed(1)).to(torch.int8)
X = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def dynamo(monkeypatch):
    """conftest.py switches torch.compile off for the oracles; here it is the subject."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compare(function, *args):
    with torch.no_grad():
        expected = function(*args)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*args), expected)
    assert counters["stats"]["unique_graphs"] == 1  # else eager was compared with eager


@pytest.mark.parametrize("repacked", [False, True], ids=["rows", "repacked"])
@pytest.mark.parametrize("form", ["apply", "apply_layer"])
def test_the_engines_call(form, repacked):
    layer, method = nn.Module(), BitNetLinearMethod()
    make_params(layer, 256, [40], rule=ScaleRule.MULTIPLY)
    layer.weight.weight_loader(layer.weight, pack_hf(CODES))
    layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor([0.5]))
    if repacked:
        method.process_weights_after_loading(layer)
    compare(lambda x: getattr(method, form)(layer, x), X)


@pytest.mark.parametrize("repacked", [False, True], ids=["as it is", "repacked"])
@pytest.mark.parametrize("name", ["interleaved", "consecutive"])
def test_the_plain_call(name, repacked):
    method = BitNetLinearMethod(packing=name)
    weight = ops.pack(CODES)  # of 256 inputs: both packings have this shape, and all codes are good
    if repacked:
        weight = method.repack(weight, 40, 256)
    compare(lambda weight, x: method.apply(weight, 0.5, x, 40, 256), weight, X)
