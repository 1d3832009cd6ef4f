"""What this project measures for itself, on top of bitnet_ops.bench; not part of the wheel.

Run from the root of the source tree, each with --help:
    python -m benchmarks.goals                the goals for speed: target, stretch, measured
    python -m benchmarks.update_performance   docs/notes/performance.md, measured or as stored
    python -m benchmarks.compare_engines      other engines on a model of the same dimensions
    python -m benchmarks.plots                pictures from the reports of `bitnet-ops bench`
    python -m benchmarks.bench_apply          a layer's apply in a serving engine, beside its op
"""
