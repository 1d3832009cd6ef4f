"""`bitnet-ops bench ops|model|engine`: how fast this machine is, beside what its limits allow.

Read in this order: harness (timing), memory, limits, shapes, cases (what is timed), ops, model,
run_model, engine, session (the frame of every report), report. What this project measures for
itself is in benchmarks/ of the source tree.
"""
