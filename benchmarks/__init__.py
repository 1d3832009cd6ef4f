"""The laboratory: what this project measures for itself with bitnet_ops.bench; not in the wheel.

Run from the root of the source tree, each with --help:
    python -m benchmarks.before_after PYTHON   whole models, this version and an older one by turns
    python -m benchmarks.products_before_after PYTHON   likewise ternary products, size by size
    python -m benchmarks.interference          decode and prompts beside what disturbs threads
    python -m benchmarks.goals [--check]       the goals for speed: target, stretch, measured
    python -m benchmarks.page FILE             a page of this machine: goals, models, ops
    python -m benchmarks.plots                 pictures from the reports of `bitnet-ops bench`
    python -m benchmarks.compare_engines       other engines on a model of the same dimensions
    python -m benchmarks.compare_bonsai        Ternary-Bonsai's dimensions beside llama.cpp
    python -m benchmarks.engine_studies        arriving prompts, prefixes, drafts, sampling
    python -m benchmarks.bench_apply           a layer's apply in a serving engine, beside its op
    python -m benchmarks.bench_compat          earlier BitNet kernels' calls and layers
    python -m benchmarks.many_cores            a step's plan on machines with many cores, simulated
    python -m benchmarks.count_loops           instructions and cycles of the inner loops
    python -m benchmarks.compare_heads         what head formats cost in quality; compare_kv:
                                               caches; compare_activations: activations
    python -m benchmarks.attention_quality     what attention policies cost in quality, with --plot;
                                               needle: what they find; sparsity_quality: zeros
    python -m benchmarks.measure_convert       peak memory and speed of `bitnet-ops convert`
"""
