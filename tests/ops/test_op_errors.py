"""Bad calls of every op: each raises one clear error, and nothing crashes or is silently wrong.

Messages read `<op>: expected <argument> <constraint>, got <value>`; no source path is in them. The
calls are those of the specs (tests/helpers/ops_*.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from bitnet_ops import ops
from bounds import assert_equal
from op_catalogue import CALLS, SPECS
from op_changes import K, M
from op_schema import MUTATED, SCHEMAS, names
from op_spec import Change
from op_values import activations


def called(op: str) -> Callable[..., Any]:
    """The op of a row; what stands behind a blank tells variants of its arguments apart."""
    return getattr(ops, op.split()[0])


def good_call(op: str) -> dict[str, Any]:
    return CALLS[op].arguments()


# (op, {argument: change}, blamed argument, words that follow)
CASES = [(op, *rejection) for op, call in CALLS.items() for rejection in call.rejections]


def _id(case: tuple[str, dict[str, Change], str, str]) -> str:
    op, changes, _, words = case
    return f"{op}-{'+'.join(changes)}-{re.sub(r'[^a-z0-9]+', '_', words.lower())[:40]}"


@pytest.mark.parametrize("op", sorted(CALLS))
def test_the_good_calls_work(op: str) -> None:
    called(op)(**good_call(op))


def test_every_public_op_and_argument_is_in_the_table() -> None:
    blamed = {(op, name) for op, changes, _, _ in CASES for name in changes}
    assert {(op, name) for op in CALLS for name in good_call(op)} - blamed == set()
    of_any_variant = {(op.split()[0], name) for op, name in blamed}
    assert of_any_variant == {(op, name) for op in SCHEMAS for name in names(op)}
    assert len(CASES) >= 80


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_bad_call_is_rejected_by_name(case: tuple[str, dict[str, Change], str, str]) -> None:
    op, changes, argument, words = case
    arguments = good_call(op)
    for name, change in changes.items():
        arguments[name] = change(arguments)
    plain = op.split()[0]
    written = _tensors([arguments.get(names(plain)[index]) for index in MUTATED[plain]])
    before = [tensor.clone() for tensor in written]
    with pytest.raises(RuntimeError) as error:
        called(op)(**arguments)
    message = str(error.value)
    assert re.match(rf"{plain}: expected {re.escape(argument)} .+, got .+", message), message
    assert words in message
    assert "csrc" not in message and ".cpp" not in message and "\n" not in message
    for tensor, old in zip(written, before, strict=True):
        assert torch.equal(tensor, old), "a rejected call has written"


def _tensors(arguments: list[Any]) -> list[Tensor]:
    """Those that are given, and those of lists."""
    flat = [part for a in arguments for part in (a if isinstance(a, list) else [a])]
    return [part for part in flat if isinstance(part, Tensor)]


def _with_floats(change: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """An argument, or the first of a list, with what `change` makes of a float tensor."""
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return change(argument)
    if isinstance(argument, list):
        for i, one in enumerate(argument):
            if (other := _with_floats(change, one)) is not one:
                return [*argument[:i], other, *argument[i + 1 :]]
    return argument


FLOAT_ARGUMENTS = [
    (op, name)
    for op in CALLS
    for name, argument in good_call(op).items()
    if _with_floats(lambda t: t + 0, argument) is not argument
]
# straight-through: test_gradients.py
GRAD_CASES = [
    (op, name) for op, name in FLOAT_ARGUMENTS if name not in SPECS[op.split()[0]].passes_gradient
]


@pytest.mark.parametrize("raw", [False, True], ids=["wrapper", "raw"])
@pytest.mark.parametrize(("op", "name"), FLOAT_ARGUMENTS, ids=lambda part: part)
def test_a_tangent_is_rejected(op: str, name: str, raw: bool) -> None:
    """Forward mode would find derivatives of 0."""
    arguments = good_call(op)
    call = getattr(torch.ops.bitnet, op.split()[0]) if raw else called(op)
    with forward_ad.dual_level():
        arguments[name] = _with_floats(
            lambda t: forward_ad.make_dual(t, torch.ones_like(t)), arguments[name]
        )
        pattern = rf"^{op.split()[0]}: expected {name} without a tangent, got a dual number"
        with pytest.raises(RuntimeError, match=pattern):
            call(**arguments)


@pytest.mark.parametrize(("op", "name"), GRAD_CASES, ids=lambda part: part)
def test_an_input_that_requires_grad_is_rejected_with_advice(op: str, name: str) -> None:
    arguments = good_call(op)
    expected = called(op)(**good_call(op))
    arguments[name] = _with_floats(lambda t: t.clone().requires_grad_(), arguments[name])
    pattern = (
        rf"^{op.split()[0]}: expected {name} without gradient .*inference_mode.*{name}\.detach\(\)$"
    )
    with pytest.raises(RuntimeError, match=pattern):
        called(op)(**arguments)
    with torch.inference_mode():
        allowed = called(op)(**arguments)
    if isinstance(expected, Tensor) and op != "bind_program":  # which gives another handle
        assert_equal(allowed, expected)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_meta_tensor_among_cpu_tensors_is_rejected(op: str) -> None:
    arguments = good_call(op)
    tensors = [name for name, argument in arguments.items() if isinstance(argument, Tensor)]
    if len(tensors) == 1:
        arguments[tensors[0]] = arguments[tensors[0]].to("meta")
        result = called(op)(**arguments)  # torch's own rule: meta in, meta out, no data
        if result is not None:
            first = result if isinstance(result, Tensor) else result[0]
            assert first.device.type == "meta"
        return
    changes = [{name: arguments[name].to("meta")} for name in tensors]
    for name, given in arguments.items():
        if isinstance(given, list):
            places = [at for at, one in enumerate(given) if isinstance(one, Tensor)]
            for at in places if len(tensors) + len(places) > 1 else ():
                changes.append({name: [*given[:at], given[at].to("meta"), *given[at + 1 :]]})
    for change in changes:
        pattern = f"^{op.split()[0]}: expected every tensor on one device, got"
        with pytest.raises(RuntimeError, match=pattern):
            called(op)(**{**arguments, **change})


@pytest.mark.parametrize("op", sorted(CALLS))
def test_none_for_a_tensor_is_rejected_by_name(op: str) -> None:
    """torch lets None pass for a Tensor; the first look at it must not be a crash or a riddle."""
    arguments = good_call(op)
    tensors = [name for name, argument in arguments.items() if isinstance(argument, Tensor)]
    name_of_op = op.split()[0]
    schema = getattr(torch.ops.bitnet, name_of_op).default._schema
    optional = {a.name for a in schema.arguments if isinstance(a.type, torch.OptionalType)}
    for name in sorted(set(tensors) - optional):
        # Without any tensor torch's dispatcher itself rejects the call.
        alone = len(tensors) == 1
        rejection = f"^{name_of_op}: expected {name} to be a tensor, got None$"
        with pytest.raises(RuntimeError, match=f"bitnet::{name_of_op}" if alone else rejection):
            called(op)(**{**arguments, name: None})


def test_a_rejected_cache_update_has_written_nothing() -> None:
    arguments = good_call("paged_cache_update")
    before = [arguments[name].clone() for name in ("key_pool", "value_pool")]
    arguments["slot_mapping"][-1] = 12  # the others fit
    with pytest.raises(RuntimeError, match="slots in .0, 12., got 12"):
        ops.paged_cache_update(**arguments)
    assert_equal(arguments["key_pool"], before[0])
    assert_equal(arguments["value_pool"], before[1])


def test_sparse_and_foreign_arguments_are_rejected_by_torch_not_by_a_crash() -> None:
    arguments = good_call("linear")
    with pytest.raises((NotImplementedError, RuntimeError)):
        ops.linear(arguments["x"].to_sparse(), *list(arguments.values())[1:])
    for name, wrong in (("x", [1.0, 2.0]), ("weight", "packed"), ("weight_scale", 1.0)):
        with pytest.raises(RuntimeError, match=rf"^linear: expected {name} as a tensor, got "):
            ops.linear(**{**arguments, name: wrong})
    with pytest.raises(RuntimeError, match=r"^rms_norm: expected eps as float, got str 'small'$"):
        ops.rms_norm(**{**good_call("rms_norm"), "eps": "small"})


def test_lazy_negation_and_zero_tensors_are_read_by_value() -> None:
    """Views whose memory does not hold their values: the negative bit, expanded zeros."""
    x, weight = activations(torch.Generator().manual_seed(5), M, K), torch.ones(K)
    assert_equal(ops.rms_norm(torch._neg_view(x), weight, 1e-5), ops.rms_norm(-x, weight, 1e-5))
    zeros = torch.zeros(()).expand(M, K)
    assert_equal(ops.rms_norm(zeros, weight, 1e-5), torch.zeros(M, K))
