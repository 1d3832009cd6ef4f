"""`bitnet-ops bench ops` and `bench model`: what this machine's limits allow, and what is reached.

Read in this order: stats, harness (timing), memory, limits, shapes, cases and cases_ops (what is
timed), measure (one row), run_ops, model, run_model, report. What this project measures for itself
(other engines) is in benchmarks/ of the source tree.
"""
