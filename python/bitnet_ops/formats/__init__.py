"""Checkpoint formats: read and write bytes, nothing else; one module a format.

`sglbitnt` is the project's own model file (FORMAT.md). It must not know models, what a config means
beyond its private block, or how a checkpoint is converted.
"""
