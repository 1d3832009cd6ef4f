"""The catalogue as a whole: every op has a wrapper, a fake and a spec, and is right.

The list of ops comes from torch's own registry, so an op without a spec fails here. What the tests
know of an op is in its spec (tests/helpers/ops_*.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitnet_ops import _runtime, ops
from bounds import assert_equal
from isa_control import torch_threads
from op_catalogue import (
    ALL_SAMPLES,
    COMPARABLE_SAMPLES,
    LARGE,
    SAMPLES,
    SPECS,
    Sample,
    assert_agrees,
    reference,
    results,
)
from op_schema import MUTATED, SCHEMAS, defaults, names
from op_values import FLOATS, KV_DTYPES, activations, gain


def test_the_registry_holds_the_catalogue() -> None:
    assert sorted(SCHEMAS) == sorted(ops.__all__) == sorted(SPECS)


def test_dir_of_the_namespace_lists_every_public_op() -> None:
    listed = set(dir(torch.ops.bitnet))
    assert set(SCHEMAS) <= listed


@pytest.mark.parametrize("op", sorted(SCHEMAS))
def test_every_op_has_wrapper_reference_and_samples_of_the_same_signature(op: str) -> None:
    # a composed reference is bound by the schema itself
    functions = [getattr(ops, op)] + [SPECS[op].function] * (not SPECS[op].composed)
    for function in functions:
        parameters = inspect.signature(function).parameters
        assert list(parameters) == names(op), function.__module__
        empty = inspect.Parameter.empty
        given = {n: p.default for n, p in parameters.items() if p.default is not empty}
        assert given == defaults(op)
    assert SPECS[op].calls
    assert SAMPLES[op]


@pytest.mark.parametrize("op", sorted(SCHEMAS))
def test_every_op_has_a_cpu_kernel_and_a_fake(op: str) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"bitnet::{op}", "CPU")
    assert (
        has(f"bitnet::{op}", "Meta")
        or torch._library.simple_registry.singleton.find(f"bitnet::{op}").fake_impl.kernel
    )


@pytest.mark.parametrize("op", sorted(SCHEMAS))
def test_every_wrapper_documents_itself(op: str) -> None:
    text = inspect.getdoc(getattr(ops, op)) or ""
    for section in ("Args:", "Raises:", "Source:"):
        assert section in text, section
    assert ("Returns:" in text) == bool(SCHEMAS[op].returns)
    body = text[text.index("Args:") :]
    for argument in SCHEMAS[op].arguments:
        assert argument.name in body, argument.name


@pytest.mark.parametrize("op", sorted(SCHEMAS))
def test_an_op_mutates_caches_and_their_scales_alone_and_no_result_aliases(op: str) -> None:
    assert {names(op)[index] for index in MUTATED[op]} == SPECS[op].mutates
    assert SPECS[op].mutates <= {
        "key_cache", "value_cache", "key_pool", "value_pool", "key_scale", "value_scale", "caches",
        "states", "key_bounds",
    }  # fmt: skip
    assert all(value.alias_info is None for value in SCHEMAS[op].returns)


@pytest.mark.parametrize("sample", ALL_SAMPLES, ids=lambda sample: sample.id)
@pytest.mark.sampled(2)
def test_opcheck(sample: Sample) -> None:
    overload = getattr(torch.ops.bitnet, sample.op).default
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if sample.name != "not_finite":
        # opcheck compares NaN as unequal; test_compile.py traces that sample and compares it well.
        utils.append("test_aot_dispatch_dynamic")
    if sample.op == "bind_program":
        utils.remove("test_aot_dispatch_dynamic")  # two calls give two handles
    if any(_is_float8(arg) for arg in flat(sample.args())):
        # torch's check of the schema multiplies tensors to compare them, which it cannot for these.
        utils.remove("test_schema")
    torch.library.opcheck(overload, sample.args(), test_utils=utils)


def flat(args: tuple[Any, ...]) -> list[Any]:
    """The arguments, lists of tensors taken apart."""
    return [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]


def _is_float8(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.itemsize == 1


@pytest.mark.parametrize("op", [op for op, spec in SPECS.items() if spec.passes_gradient])
def test_opcheck_with_an_input_that_requires_grad(op: str) -> None:
    x, *rest = SAMPLES[op][0].args()
    x.requires_grad_()
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    utils = (*utils, "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.bitnet, op).default, (x, *rest), test_utils=utils)


def _floating(op: str) -> tuple[dict[str, Any], list[str]]:
    """The good call of `op`; its float tensors that may not require grad."""
    call = SPECS[op].calls[""].arguments()
    floats = [n for n, a in call.items() if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return call, [name for name in floats if name not in SPECS[op].passes_gradient]


@pytest.mark.parametrize("op", [op for op in sorted(SPECS) if _floating(op)[1]])
def test_a_raw_op_rejects_what_it_has_no_gradient_for(op: str) -> None:
    """As the wrappers do; torch itself would give None, or a warning."""
    call, floating = _floating(op)
    overload = getattr(torch.ops.bitnet, op).default
    for name in floating:
        tensor = call[name]
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match=f"^{op}: expected {name} without gradient"):
            overload(**call)
        with torch.no_grad():
            overload(**call)
        tensor.requires_grad_(False)


@pytest.mark.parametrize("sample", COMPARABLE_SAMPLES + LARGE, ids=lambda sample: sample.id)
@pytest.mark.by_turns
def test_result_agrees_with_the_reference(sample: Sample, isa: str) -> None:
    args, expected_args = sample.args(), sample.args()
    actual = results(getattr(ops, sample.op)(*args), args, sample.op)
    expected = results(getattr(reference, sample.op)(*expected_args), expected_args, sample.op)
    assert len(actual) == len(expected) > 0
    for ours, theirs in zip(actual, expected, strict=True):
        assert_agrees(sample.op, expected_args, ours, theirs)


@pytest.mark.parametrize("sample", ALL_SAMPLES, ids=lambda sample: sample.id)
def test_arguments_are_left_alone_and_never_returned(sample: Sample) -> None:
    args = sample.args()
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    returned = getattr(ops, sample.op)(*args)
    fresh = [] if returned is None else [returned] if torch.is_tensor(returned) else list(returned)
    tensors = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    for index, tensor in tensors.items():
        if index not in MUTATED[sample.op]:
            assert_equal(tensor, before[index], str(index))
        for output in fresh:
            assert output.is_contiguous()
            shared = output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert not (shared and output.numel() and tensor.numel())


@pytest.mark.parametrize("form", [(1, 0), (1, 4096), (2, 0), (4, 0), (4, 2048)])
def test_probe_read_reads_every_byte_of_whole_pages(isa: str, form: tuple[int, int]) -> None:
    buffer = torch.zeros(25 * 4096 + 77, dtype=torch.uint8)
    where = buffer.data_ptr(), buffer.nbytes
    before = _runtime.probe_read(*where, *form)
    for index in (0, 31, 32, 63, 64, 50_001, 25 * 4096 - 1):
        buffer[index] = 1
        assert _runtime.probe_read(*where, *form) != before, index
        buffer[index] = 0


def test_probe_int8_peak_counts_what_its_threads_execute(isa: str) -> None:
    counts = {}
    for threads in (1, 2):
        with torch_threads(threads):
            counts[threads] = [_runtime.probe_int8_peak(n) for n in (10, 1000)]
    assert counts[1][1] == 100 * counts[1][0] > 0
    assert counts[2] == [2 * count for count in counts[1]]
    assert _runtime.probe_int8_peak(0) == 0  # enters and leaves its region, no more


@pytest.mark.parametrize(
    "call",
    [
        lambda: _runtime.probe_read(0, -1),
        lambda: _runtime.probe_read(0, 0, 3),
        lambda: _runtime.probe_read(0, 0, 1, -1),
        lambda: _runtime.probe_read(0, 0, 1, 65537),
        lambda: _runtime.probe_int8_peak(-1),
        lambda: _runtime.probe_int8_peak(2**31),
    ],
)
def test_probes_reject_what_they_cannot_do(call: Callable[[], int]) -> None:
    with pytest.raises(ValueError, match="^probe_.*: expected .*, got "):
        call()


def _float_samples() -> list[Any]:
    return [pytest.param(x, w, id=f"{x}-{w}") for x in FLOATS for w in FLOATS]


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), _float_samples())
def test_gain_of_any_dtype_gives_the_dtype_of_x(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, rng: torch.Generator
) -> None:
    args = (activations(rng, 4, 90, dtype=x_dtype), gain(rng, 90, weight_dtype), 1e-5)
    y = ops.rms_norm(*args)
    assert y.dtype == x_dtype
    assert_agrees("rms_norm", args, y, reference.rms_norm(*args))


def test_supported_dtypes_are_those_the_samples_cover() -> None:
    for op, index, dtypes in (("linear", 0, FLOATS), ("paged_attention", 1, KV_DTYPES)):
        seen = {sample.args()[index].dtype for sample in SAMPLES[op]}
        assert seen == set(dtypes)
