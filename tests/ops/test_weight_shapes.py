"""`shape`: N and K, which a padded weight does not record, and every module knows and passes.

A weight of 128 input features has the bytes of any from 1 to 128; given its shape, an op takes no
other x, and its results do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet_ops import BitLinear, KVCache, ops
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.lora import LoraBitLinear, LoraWeight
from bitnet_ops.nn.packing import pack_ternary
from bounds import assert_equal
from op_values import FORMATS, gain, int8_values, pack_codes, positive, random_codes, random_packed
from ops_packing import repacked
from tiny_models import SMALL, tiny_model

N, K, INNER = 6, 128, 100
Call = Callable[[int], Any]


def calls(g: torch.Generator) -> dict[str, tuple[Call, Call]]:
    """Of each op: the call with an x of so many features, without and with the weight's shape."""
    weight, scale = random_packed(g, N, K), positive(g, 1)
    x, q = torch.randn(3, K, generator=g), int8_values(g, 3, K)
    groups, head = positive(g, N, 1), ops.quantize_head(torch.randn(32, K, generator=g), "int4")
    down, qkv = random_packed(g, K, INNER), (weight, scale) * 3
    gate, norm = random_packed(g, INNER, K), gain(g, K)

    def mlp(k: int, **extra: Any) -> Tensor:
        gate_up = (gate, scale, gate, scale)
        return ops.mlp_forward(
            x[:, :k], norm[:k], *gate_up, None, down, scale, 1e-5, "silu", **extra
        )

    def bind(call: Callable[..., Any], **given: Any) -> tuple[Call, Call]:
        return call, lambda k: call(k, **given)

    single = {"shape": (N, K)}
    return {
        "gemv": bind(lambda k, **e: ops.gemv(weight, q[0, :k], **e), **single),
        "gemm": bind(lambda k, **e: ops.gemm(weight, q[:, :k], **e), **single),
        "linear": bind(lambda k, **e: ops.linear(x[:, :k], weight, scale, **e), **single),
        "linear of groups": bind(
            lambda k, **e: ops.linear(x[:, :k], weight, groups, **e), **single
        ),
        "qkv_forward": bind(
            lambda k, **e: ops.qkv_forward(x[:, :k], norm[:k], *qkv, 1e-5, **e),
            shape=(N, K) * 3,
        ),
        "mlp_forward": bind(mlp, shape=(INNER, K, INNER, K, K, INNER)),
        "lm_head": bind(lambda k, **e: ops.lm_head(x[:, :k], *head, **e), shape=(32, K)),
        **{
            f"linear {f}": bind(
                lambda k, f=f, shape=(): ops.linear(
                    x[:, :k], repacked(weight, K, f), scale, None, shape or (N, k)
                ),
                **single,
            )
            for f in FORMATS
        },
    }


OPS = sorted(calls(torch.Generator()))


def test_every_op_on_padded_weights_takes_it() -> None:
    have = {
        name
        for name in ops.__all__
        if {"x", "shape"} <= {argument.name for argument in _arguments(name)}
    }
    assert have == {op.split()[0] for op in OPS}


def _arguments(name: str) -> Any:
    return getattr(torch.ops.bitnet, name).default._schema.arguments


@pytest.mark.parametrize("op", OPS)
def test_given_it_changes_no_bit_and_rejects_every_other_x(op: str, rng: torch.Generator) -> None:
    without, given = calls(rng)[op]
    expected, got = without(K), given(K)
    for a, b in zip(_tuple(expected), _tuple(got), strict=True):
        assert_equal(b, a)
    name = op.split()[0]
    for k in (0, 1, 64, 65, 100, 127):
        with pytest.raises(RuntimeError, match=rf"^{name}: expected x with the 128 .*, got {k}$"):
            given(k)


def test_left_out_it_lets_pass_what_fills_as_many_blocks(rng: torch.Generator) -> None:
    """Such an x meets the first columns alone: right for a weight of so many, in silence."""
    codes, q = random_codes(rng, N, K), int8_values(rng, K)
    weight, one = pack_codes(codes), torch.ones(1)
    for k in (1, 64, 100, 127):
        sums = (codes[:, :k].int() * q[:k].int()).sum(1)
        assert_equal(ops.gemv(weight, q[:k]), sums.int())
        assert_equal(ops.linear(torch.ones(k), weight, one), codes[:, :k].sum(1).float())
    for k in (0, 129):
        with pytest.raises(RuntimeError, match="^gemv: expected "):
            ops.gemv(weight, torch.ones(k, dtype=torch.int8))


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_the_inner_width_of_an_mlp_is_checked_too(rng: torch.Generator) -> None:
    gate, down, scale = random_packed(rng, 100, K), random_packed(rng, K, 128), positive(rng, 1)
    args = torch.ones(2, K), torch.ones(K), gate, scale, gate, scale, None, down, scale
    with pytest.raises(RuntimeError, match=r"^mlp_forward: expected gate_weight with the 128 "):
        ops.mlp_forward(*args, 1e-5, "silu", (100, K, 100, K, K, 128))


def _layers(g: torch.Generator) -> dict[str, torch.nn.Module]:
    codes = random_codes(g, N, K)
    plain = BitLinear.from_float(torch.randn(N, K, generator=g))
    lora = LoraWeight(torch.randn(2, K, generator=g), torch.randn(N, 2, generator=g), 1.0)
    groups = BitLinear(K, N, group_size=128)
    groups.weight_scale.fill_(1.0)
    return {
        "from_float": plain,
        **{f: BitLinear.from_packed(pack_ternary(codes, 0.5)).repack(f) for f in FORMATS},
        "groups": groups,
        "lora": LoraBitLinear.from_base(plain, lora),
        "head int4": HeadWeight.from_dense(torch.randn(20, K, generator=g), "int4", 64),
        "head int8": HeadWeight.from_dense(torch.randn(20, K, generator=g), "int8"),
    }


@pytest.mark.parametrize("name", sorted(_layers(torch.Generator())))
def test_a_module_knows_its_width(name: str, rng: torch.Generator) -> None:
    layer = _layers(rng)[name]
    assert torch.isfinite(layer(torch.ones(2, K))).all()
    for k in (100, 127, 129, 256):
        with pytest.raises(RuntimeError, match=rf"^\w+: expected x with the 128 .*, got {k}$"):
            layer(torch.ones(1, k))


def test_a_model_gives_it_to_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed ops; a program has the sizes of its blocks to hold every width against."""
    seen: dict[str, int] = {}
    for name in ("linear", "lm_head"):
        original = getattr(ops, name)

        def watched(*args: Any, _name: str = name, _op: Any = original) -> Any:
            position = [a.name for a in _arguments(_name)].index("shape")
            assert len(args) > position and args[position], f"{_name} without a shape"
            seen[_name] = seen.get(_name, 0) + 1
            return _op(*args)

        monkeypatch.setattr(ops, name, watched)
    model = tiny_model(SMALL["bitnet-offline"])
    model.run_as = "ops"
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]), KVCache(model.config, 1, 4))
    layers = model.config.num_hidden_layers
    assert seen == {"linear": 7 * layers, "lm_head": 1}
