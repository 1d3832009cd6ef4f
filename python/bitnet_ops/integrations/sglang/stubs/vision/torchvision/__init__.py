"""Import-only stand-in for torchvision, for machines where no CPU build that imports exists.

SGLang and transformers import names from it on their way to a text model and call none of them.
Every name is a function that raises when it is called, so nothing made up can reach a result.
"""

__version__ = "0.28.0"


def raising(module):
    """A module-level __getattr__: any public name of `module` is a function that raises."""

    def lookup(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def stub(*args, **kwargs):
            raise RuntimeError(f"{module}.{name} was called, but {module} is an import-only stub")

        stub.__name__ = name
        return stub

    return lookup


__getattr__ = raising(__name__)
