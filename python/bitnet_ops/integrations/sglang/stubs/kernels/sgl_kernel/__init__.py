"""Import-only stand-in for sgl_kernel, whose wheels hold CUDA libraries only.

SGLang imports a handful of names on its way to a CPU engine and calls none. Each is a function
that raises when it is called. None of the operators by which SGLang knows its kernels for AMX is
there, so it uses torch's own throughout.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def stub(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} was called, but sgl_kernel is an import-only stub")

    stub.__name__ = name
    return stub
