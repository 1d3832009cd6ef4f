"""Measuring the ops against the limits of this machine, in one process, interleaved.

The package is installed so that `bitnet-ops bench` works from a wheel; benchmarks/ in the source
tree holds thin scripts on it. Read in this order: stats (numbers only), harness (timing),
workspace (memory), limits, shapes, cases and cases_* (what is measured), rows (one measurement),
environment, report, run_ops, command. It must not know models or files of weights.
"""
