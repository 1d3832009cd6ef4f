"""Checkpoint formats: read and write bytes, nothing else; one module a format.

`sglbitnt` is the project's own model file (FORMAT.md).
"""
