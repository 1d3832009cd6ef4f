"""`@operator`: an op's signature, documentation and fake kernel in one Python function.

It must not know what the ops are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from bitnet_ops.ops import _library as _library  # makes torch.ops.bitnet

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_below_autograd = torch._C._AutoDispatchBelowAutograd
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_is_compiling = torch.compiler.is_compiling


def _wants_gradient(args: Iterable[Any]) -> bool:
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.requires_grad:
                return True
        elif isinstance(arg, list) and _wants_gradient(arg):
            return True
    return False


def in_forward_ad() -> bool:
    """Whether tensors may carry tangents."""
    return forward_ad._current_level >= 0


def differentiable(fake: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`operator` for an op that has a gradient."""
    return operator(fake, always_autograd=True)


def operator(
    fake: Callable[_Arguments, _Result], *, always_autograd: bool = False
) -> Callable[_Arguments, _Result]:
    """The callable of torch.ops.bitnet.<name>, with the signature and docstring of `fake`.

    The function's body is the op's fake kernel: it makes the shape, dtype and layout of the
    outputs for torch.compile and torch.export. It sees no data and checks nothing but what shapes
    its output: the C++ kernel checks everything. always_autograd: autograd is to see every call in
    grad mode, not only those with an argument that requires a gradient.
    """
    name = fake.__name__
    overload = getattr(torch.ops.bitnet, name).default  # a look-up costs a quarter of a microsecond
    # what overload(...) calls in turn; a release of torch without it pays for the call
    kernel = getattr(overload, "_op", overload)
    defaults = {p.name: p.default for p in inspect.signature(fake).parameters.values()}
    orders: dict[tuple[object, ...], _Order] = {}  # of calls by how arguments were named

    def checked(*args: Any) -> Any:
        _require_one_device(name, args)
        return fake(*args)  # type: ignore[call-arg]  # torch passes all arguments by position

    torch.library.register_fake(f"bitnet::{name}", checked)

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Autograd's kernel, which is Python, would cost 5 us, or 40 with many arguments, to find
        # nothing to do. Inference mode leaves it out by itself, and a compiled graph has no calls.
        if _is_compiling():
            return overload(*args, **kwargs)
        if kwargs:
            key = (len(args), *kwargs)
            order = orders.get(key)
            if order is None:
                order = orders[key] = _order(defaults, len(args), kwargs)
            if order:
                args += tuple([kwargs.get(name, value) for name, value in order])
                kwargs = _NOTHING
        try:
            if _is_inference():
                return kernel(*args, **kwargs)
            if _is_grad_enabled() and (always_autograd or kwargs or _wants_gradient(args)):
                return kernel(*args, **kwargs)
            if in_forward_ad():
                return kernel(*args, **kwargs)
            with _below_autograd():
                return kernel(*args, **kwargs)
        except RuntimeError:
            _reject_a_wrong_type(name, overload._schema, args, kwargs)
            raise

    return call


_Order: TypeAlias = tuple[tuple[str, Any], ...]
_NOTHING: dict[str, Any] = {}


def _order(defaults: dict[str, Any], given: int, kwargs: dict[str, Any]) -> _Order:
    """The arguments behind the first `given`, each with its default; torch makes text of keywords.

    Empty where a call does not fit, for torch to reject as it was made.
    """
    rest = list(defaults.items())[given:]
    complete = all(name in kwargs or value is not inspect.Parameter.empty for name, value in rest)
    return tuple(rest) if complete and kwargs.keys() <= {name for name, _ in rest} else ()


_KINDS: dict[str, Any] = {  # what a schema says, and what torch takes for it
    "Tensor": (Tensor, type(None)),  # the ops reject None by themselves
    "str": str,
    "bool": (bool, np.bool_),
    "int": SupportsIndex,
    "float": SupportsFloat,
}


def _fits(kind: str, value: object) -> bool:
    """Whether a value is of a schema's kind, such as Optional[Tensor] or List[int]."""
    outer, _, inner = kind.rstrip("]").partition("[")
    if outer == "Optional":
        return value is None or _fits(inner, value)
    if outer == "List":
        return isinstance(value, list | tuple) and all(_fits(inner, one) for one in value)
    return isinstance(value, _KINDS[outer])


def _reject_a_wrong_type(name: str, schema: Any, args: Sequence[Any], named: Any) -> None:
    """Raise for an argument of another type than the schema's: torch takes five lines for that."""
    for i, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        if i >= len(args) and argument.name not in named:
            continue
        value = args[i] if i < len(args) else named[argument.name]
        if _fits(kind, value):
            continue
        wanted = {"Tensor": "a tensor", "Optional[Tensor]": "a tensor or None"}.get(kind, kind)
        shown = repr(value).partition("\n")[0][:60]
        remedy = ""
        if "tensor" in wanted and isinstance(value, float | int):
            remedy = f"; pass torch.tensor([{shown}])"
        raise RuntimeError(
            f"{name}: expected {argument.name} as {wanted}, got {type(value).__name__} "
            f"{shown}{remedy}"
        ) from None


def _require_one_device(name: str, args: tuple[Any, ...]) -> None:
    """A meta tensor among CPU tensors is dispatched here, where it would pass for a result."""
    given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,))]
    tensors = [one for one in given if isinstance(one, Tensor)]
    for tensor in tensors[1:]:
        if tensor.device != tensors[0].device:
            raise RuntimeError(
                f"{name}: expected every tensor on one device, got {tensors[0].device} and "
                f"{tensor.device}; move them to the CPU"
            )
