"""Every way to a ternary linear ends in the layout that the kernels read fastest, by default.

The rows of a file multiply up to five times slower for more than one token, and nothing but time
tells. What is looked at is the layout, and that results stay.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitnet_ops import BitLinear, _runtime, load, ops
from bitnet_ops.nn import lora
from bitnet_ops.nn.packing import pack_ternary
from bitnet_ops.nn.storage import FORMATS
from bitnet_ops.training.linear import TrainableBitLinear
from isa_control import forced_isa

ROOT = Path(__file__).resolve().parents[2]
X = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))


def masters(rows=48, columns=200):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) * 0.02


def is_fast(layer):
    return layer.weight_format == "2bit" and layer.weight.dim() == 3


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_layer_from_floats_is_fast_unless_asked_not_to_be(weight_format):
    layer, bias = BitLinear.from_float(masters(), torch.arange(48.0)), torch.arange(48.0)
    assert is_fast(layer)
    other = BitLinear.from_float(masters(), bias, weight_format)
    assert other.weight_format == weight_format and torch.equal(layer(X), other(X))
    assert torch.equal(other.state_dict()["weight"], layer.state_dict()["weight"])


@pytest.mark.parametrize("group_size", [0, 128])
def test_an_empty_layer_is_fast_after_load_state_dict(group_size):
    codes, scale = ops.quantize_weights(masters())
    scales = torch.rand(48, 2) + 0.1 if group_size else scale
    source = BitLinear.from_packed(pack_ternary(codes, scales, group_size))
    assert source.weight_format == "canonical"  # shares the rows it was given
    layer = BitLinear(200, 48, group_size=group_size)
    assert is_fast(layer)
    layer.load_state_dict(source.state_dict())
    assert is_fast(layer) and torch.equal(layer(X), source(X))
    rows = BitLinear(200, 48, group_size=group_size, weight_format="canonical")
    rows.load_state_dict(layer.state_dict())
    assert torch.equal(rows.weight, source.weight) and torch.equal(rows(X), source(X))


def test_a_state_dict_of_a_fast_layer_fits_every_instruction_set():
    layer = BitLinear.from_float(masters(), torch.arange(48.0))
    expected, stored = layer(X), layer.state_dict()
    for isa in _runtime.available_isas():  # of 8 and 16 lanes, where the CPU has both
        with forced_isa(isa):
            again = BitLinear(200, 48, bias=True)
            again.load_state_dict(stored)
            assert is_fast(again) and torch.equal(again(X), expected)
    copied = copy.deepcopy(layer)
    assert is_fast(copied) and torch.equal(copied(X), expected)


def test_an_empty_layer_on_meta_has_the_shape_of_a_real_one():
    with torch.device("meta"):
        layer = BitLinear(200, 48)
    assert layer.weight.is_meta and layer.weight.shape == BitLinear(200, 48).weight.shape


def test_more_inputs_than_the_layout_takes_stay_rows():
    layer = BitLinear((1 << 15) + 128, 2)
    assert layer.weight_format == "canonical" and layer.weight.shape == (2, 8224)


def test_a_trained_layer_is_fast():
    layer = TrainableBitLinear(200, 48, bias=False)
    layer.weight.data = masters()
    made = layer.to_inference()
    assert is_fast(made) and torch.equal(made(X), BitLinear.from_float(masters())(X))


def test_every_linear_of_a_loaded_model_is_fast_with_and_without_an_adapter(tmp_path):
    model = load().model
    linears = {n: m for n, m in model.named_modules() if isinstance(m, BitLinear)}
    assert linears and all(is_fast(layer) for layer in linears.values())
    name, layer = next(iter(linears.items()))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [name]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.{name}.lora"
    factors = {
        f"{prefix}_A.weight": torch.randn(2, layer.in_features),
        f"{prefix}_B.weight": torch.randn(layer.out_features, 2),
    }
    save_file(factors, tmp_path / "adapter_model.safetensors")
    model.add_adapter(lora.read_adapter(tmp_path))
    linears = [m for m in model.modules() if isinstance(m, BitLinear)]
    assert linears and all(is_fast(layer) for layer in linears)


def test_the_script_that_times_apply_runs():
    script = ROOT / "benchmarks" / "bench_apply.py"
    options = "--shape 48x200 --tokens 1 3 --threads 1 --seconds 0.02".split()
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "CPUs, load" in lines[0] and "us to a call" in lines[1] and len(lines) == 5
