"""A model as a listing of blocks: one class a kind of block says everything about that kind.

Which tensors a line needs, which buffers it keeps between steps, and its maths by single operators
(`run`). Whatever depends on the architecture walks the lines of a listing: files, modules, caches,
memory budgets, programs. It must not know values, files, caches of sequences or requests.
"""
