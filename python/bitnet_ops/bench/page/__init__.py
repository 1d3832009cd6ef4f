"""The page of a machine: goals for speed, tables and pictures, from runs of the other benchmarks.

`goals` measures goals.md, `measure` everything that a section shows, `render` writes it.
"""
