"""Import-only stand-in for sgl_kernel, whose wheels hold CUDA libraries only.

SGLang imports a handful of names on its way to a CPU engine and calls none. Each is a function
that raises when it is called. No torch.ops.sgl_kernel.* is defined, so SGLang sees no AMX support
and uses torch's own kernels throughout.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def stub(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} was called, but sgl_kernel is an import-only stub")

    stub.__name__ = name
    return stub
