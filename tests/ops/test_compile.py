"""Every op under torch.compile(fullgraph=True), some under torch.export: bit-equal to eager.

A graph break or a wrong fake fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from bitnet_ops import ops
from bitnet_ops.nn.kv_pool import attend_rectangular, update_rectangular
from bounds import assert_equal
from op_catalogue import COMPARABLE_SAMPLES, SAMPLES, Sample, results

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """conftest.py switches torch.compile off for the oracles; here it is the subject."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _run(function: Callable[..., Any], sample: Sample) -> list[torch.Tensor]:
    args = sample.args()
    return results(function(*args), args, sample.op)


def _compare(compiled: Callable[..., Any], sample: Sample) -> None:
    expected = _run(getattr(ops, sample.op), sample)
    actual = _run(compiled, sample)
    assert len(actual) == len(expected) > 0
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.stride() == theirs.stride()
        assert_equal(ours, theirs, sample.id)


def _assert_traced() -> None:
    """Dynamo really captured one graph: without it the comparison would be of eager with eager."""
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("op", sorted({sample.op for sample in COMPARABLE_SAMPLES}))
def test_compiled_wrapper_equals_eager(op: str) -> None:
    """Through Inductor, with the wrapper's own Python inside the graph."""
    compiled = torch.compile(getattr(ops, op), fullgraph=True)
    _compare(compiled, SAMPLES[op][0])
    _assert_traced()


# opcheck in test_ops.py traces every sample below the wrapper; here some of each op do for it.
TRACED = [s for s in COMPARABLE_SAMPLES if s in SAMPLES[s.op][1::3] or s.name == "not_finite"]


@pytest.mark.parametrize("sample", TRACED, ids=lambda sample: sample.id)
@pytest.mark.sampled(1)
def test_traced_wrapper_equals_eager(sample: Sample) -> None:
    """Through dynamo and AOT autograd with symbolic shapes, without the compiling backend."""
    compiled = torch.compile(
        getattr(ops, sample.op), fullgraph=True, backend="aot_eager", dynamic=True
    )
    _compare(compiled, sample)
    _assert_traced()


def test_ops_in_one_graph_with_mutation_and_changing_shapes() -> None:
    """A decode step in small: the cache is written, then read, for several lengths in turn."""

    def step(
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        new: torch.Tensor,
        start: torch.Tensor,
    ) -> torch.Tensor:
        update_rectangular(*caches, new, new * 2, start)
        out = attend_rectangular(query, *caches, start, 0.25)
        return ops.silu_and_mul(out.flatten(2)) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    caches = [[torch.zeros(2, 2, 32, 16) for _ in "kv"] for _ in "ab"]
    for tokens, start in ((4, 0), (1, 4), (1, 5), (7, 6)):
        generator = torch.Generator().manual_seed(tokens)
        query = torch.randn(2, tokens, 4, 16, generator=generator)
        new = torch.randn(2, tokens, 2, 16, generator=generator)
        starts = torch.tensor([start, start])
        expected = step(query, tuple(caches[0]), new, starts)
        assert_equal(compiled(query, tuple(caches[1]), new, starts), expected)
        assert_equal(caches[1][0], caches[0][0])
        assert_equal(caches[1][1], caches[0][1])


class _Wrapped(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = getattr(ops, op)

    def forward(self, *args: Any) -> Any:
        return self.op(*args)


@pytest.mark.parametrize("op", ["linear", "gemm", "mlp_forward", "paged_attention", "rope"])
def test_exported_program_equals_eager(op: str) -> None:
    sample = SAMPLES[op][0]
    program = torch.export.export(_Wrapped(op), sample.args())
    nodes = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert getattr(torch.ops.bitnet, op).default in nodes
    _compare(program.module(), sample)
    _compare(program.run_decompositions().module(), sample)


def test_export_keeps_a_symbolic_batch() -> None:
    x, *rest = SAMPLES["linear"][0].args()
    shapes = ({0: torch.export.Dim("tokens", min=1, max=64)}, None, None)
    program = torch.export.export(_Wrapped("linear"), (x, *rest), dynamic_shapes=(shapes,))
    wide = x.repeat(9, 1)
    assert_equal(program.module()(wide, *rest), ops.linear(wide, *rest))


def test_grad_rejection_is_raised_under_compile_too() -> None:
    x, *rest = SAMPLES["rms_norm"][0].args()
    compiled = torch.compile(ops.rms_norm, backend="eager")
    with pytest.raises(RuntimeError, match="rms_norm: expected x without gradient"):
        compiled(x.requires_grad_(), *rest)
