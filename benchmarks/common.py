"""Entry to the benchmark harness for the scripts in this directory.

The harness itself (timing, limits of the machine measured in the same process, statistics, shapes,
JSON) is installed with the package as bitnet_ops.bench, because `bitnet-ops bench` has to work from
a wheel. Scripts here import it through this one file; it must not hold code of its own.
"""

from bitnet_ops.bench.cases import Case, cycle, equal_to_scalar
from bitnet_ops.bench.harness import Budget, Run, interleave
from bitnet_ops.bench.limits import PeakLimit, ping_pong_ns, read_limit
from bitnet_ops.bench.rows import measure, measure_bulk
from bitnet_ops.bench.shapes import MODELS, ModelShape, parse_shapes
from bitnet_ops.bench.stats import Summary, paired_ratios, percentile, summarize
from bitnet_ops.bench.workspace import Arena, Workspace

__all__ = [
    "MODELS",
    "Arena",
    "Budget",
    "Case",
    "ModelShape",
    "PeakLimit",
    "Run",
    "Summary",
    "Workspace",
    "cycle",
    "equal_to_scalar",
    "interleave",
    "measure",
    "measure_bulk",
    "paired_ratios",
    "parse_shapes",
    "percentile",
    "ping_pong_ns",
    "read_limit",
    "summarize",
]
