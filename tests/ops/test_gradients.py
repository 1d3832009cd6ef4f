"""Gradients through frozen ternary linears: straight-through, in every layout, eager and compiled.

Oracles: plain PyTorch with a detached rounding and a dense weight that numpy unpacked, and
transformers' ActQuant. Which ops reject is test_ops.py's and test_op_errors.py's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.packing import pack_ternary
from bitnet_ops.nn.storage import FORMATS
from bitnet_ops.ops import gradients

N, K = 9, 200


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """conftest.py switches torch.compile off for the oracles."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def a_layer(
    weight_format: str, scales: str = "one", dtype: torch.dtype = torch.float32
) -> tuple[BitLinear, Tensor]:
    """A layer with a bias, and the dense matrix float64 [N, K] that it stands for."""
    codes = torch.randint(-1, 2, (N, K), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    groups = -(-K // 128)
    shape = {"one": (1,), "rows": (N,), "groups": (N, groups)}[scales]
    scale = random(2, *shape).abs() + 0.1
    packed = pack_ternary(codes, scale, 128 if scales == "groups" else 0)
    wide = scale if scales == "groups" else scale.reshape(-1, 1)
    dense = codes.double() * torch.stack(
        [wide[:, min(k // 128, wide.shape[1] - 1)].double().expand(N) for k in range(K)], dim=1
    )
    layer = BitLinear.from_packed(packed, random(3, N, dtype=dtype)).repack(weight_format)
    layer.set_activation_format("int8")  # which rounded_like_the_op has
    return layer, dense


def rounded_like_the_op(x: Tensor) -> Tensor:
    """x as its int8 values stand for it, with the gradient of x itself."""
    scale = 127 / x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return x + ((x.detach() * scale).round().clamp(-128, 127) / scale - x.detach())


@pytest.mark.parametrize("scales", ["one", "rows", "groups"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_x_and_bias_get_the_straight_through_gradient(weight_format: str, scales: str) -> None:
    layer, dense = a_layer(weight_format, scales)
    layer.bias.requires_grad_()
    x, bias = random(4, 2, 5, K).requires_grad_(), layer.bias.detach().double().requires_grad_()
    plain = x.detach().double().requires_grad_()
    g = random(5, 2, 5, N)
    y = layer(x)
    expected = F.linear(rounded_like_the_op(plain), dense, bias)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    y.backward(g)
    expected.backward(g.double())
    size = float((g.double().abs() @ dense.abs()).max())
    assert float((x.grad.double() - plain.grad).abs().max()) < 2**-23 * (N + 4) * size
    torch.testing.assert_close(layer.bias.grad.double(), bias.grad, rtol=1e-5, atol=1e-5)
    assert float(plain.grad.abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_has_the_dtype_of_x_and_is_rounded_once(dtype: torch.dtype) -> None:
    layer, dense = a_layer("2bit", "rows", dtype)
    x, g = random(6, 3, K, dtype=dtype).requires_grad_(), random(7, 3, N, dtype=dtype)
    layer(x).backward(g)
    assert x.grad.dtype == dtype
    exact = g.double() @ dense
    relative = torch.finfo(dtype).eps / 2 + 2**-20
    bound = relative * exact.abs() + 2**-23 * N * (g.double().abs() @ dense.abs())
    assert bool(((x.grad.double() - exact).abs() <= bound).all())


def test_the_gradient_of_a_norm_before_is_that_of_transformers() -> None:
    """What a trained RMSNorm in front of a frozen layer gets, by transformers' rounding."""
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    layer, dense = a_layer("2bit")
    layer.bias = None
    gradients = []
    x, g = random(8, 4, K), random(9, 4, N)
    for product in (
        layer,
        lambda h: F.linear(bitnet.ActQuant.apply(h), dense.float()),
    ):
        norm = nn.RMSNorm(K)
        product(norm(x)).backward(g)
        gradients.append(norm.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_an_adapter_around_a_frozen_layer_learns() -> None:
    layer, _ = a_layer("2bit")
    target, x = random(10, 64, N), random(11, 64, K)
    norm, down, up = nn.RMSNorm(K), nn.Linear(K, 4, bias=False), nn.Linear(4, N, bias=False)
    nn.init.zeros_(up.weight)
    parameters = [*norm.parameters(), *down.parameters(), *up.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    losses = []
    for _ in range(30):
        h = norm(x)
        loss = F.mse_loss(layer(h) + up(down(h)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("call", [torch.ops.bitnet.linear, ops.linear], ids=["raw", "wrapper"])
def test_without_a_bias_and_without_grad_mode(call: Callable[..., Tensor]) -> None:
    layer, dense = a_layer("canonical")
    x = random(12, 3, K).requires_grad_()
    y = call(x, layer.weight, layer.weight_scale)
    assert y.requires_grad and y.grad_fn is not None
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient.double(), dense.sum(0).expand(3, K), rtol=1e-5, atol=1e-4)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            quiet = call(x, layer.weight, layer.weight_scale)
        assert not quiet.requires_grad and torch.equal(quiet, y)


def test_autograd_is_left_out_where_nothing_wants_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gradients, "_reject_tangents", lambda op, names, args: asked.append(op))
    x, weight = random(1, 2, K), torch.ones(K)
    torch.ops.bitnet.rms_norm(x, weight, 1e-5)
    assert asked == ["rms_norm"]
    ops.rms_norm(x, weight, 1e-5)
    assert asked == ["rms_norm"]
    with pytest.raises(RuntimeError, match="expected weight without gradient"):
        ops.rms_norm(x, weight=weight.requires_grad_(), eps=1e-5)
    assert asked == ["rms_norm", "rms_norm"]


def test_functorch_is_told() -> None:
    layer, _ = a_layer("canonical")
    for transform in (torch.func.jacfwd, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match=r"^linear: expected x without a tangent.*backward"):
            transform(layer)(random(14, 2, K))


def test_a_weight_changed_before_backward_is_an_error() -> None:
    layer, _ = a_layer("canonical")
    y = layer(random(13, 2, K).requires_grad_())
    layer.weight_scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["canonical", "2bit"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward(dynamo: None, weight_format: str, dynamic: bool) -> None:
    layer, _ = a_layer(weight_format)
    norm = nn.RMSNorm(K)

    def block(x: Tensor) -> Tensor:
        return layer(norm(x)) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 7):
        gradients = []
        for function in (block, compiled):
            x = random(14, tokens, K).requires_grad_()
            norm.weight.grad = None
            function(x).backward(random(15, tokens, N))
            gradients += [x.grad, norm.weight.grad]
        torch.testing.assert_close(gradients[:2], gradients[2:], rtol=1e-5, atol=1e-5)
