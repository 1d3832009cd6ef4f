"""Every public name is documented: bitnet_ops.__all__, its classes' methods, every operator.

An operator's wrapper says its arguments, what it returns or changes, and what it raises; every
argument is named (CONTRIBUTING.md, house rule: the wrapper's docstring is the reference).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bitnet_ops
from bitnet_ops import ops

CLASSES = [name for name in bitnet_ops.__all__ if inspect.isclass(getattr(bitnet_ops, name))]
FUNCTIONS = ["accelerate", "load"]
OPERATORS = sorted(
    name.split("::")[1]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("bitnet::") and not name.startswith("bitnet::_") and "." not in name
)


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public functions and properties that `cls` itself defines."""
    for name, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def missing_in(doc: str, function: Any) -> list[str]:
    """Parameters of `function` that `doc` does not name."""
    names = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
    return [name for name in names if not re.search(rf"\b{name}\b", doc)]


def test_the_lists_are_complete() -> None:
    rest = set(bitnet_ops.__all__) - set(CLASSES) - set(FUNCTIONS)
    assert rest == {"__version__", "ops"}
    assert len(OPERATORS) > 30 and all(hasattr(ops, name) for name in OPERATORS)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_and_its_methods_are_documented(name: str) -> None:
    cls = getattr(bitnet_ops, name)
    assert cls.__doc__ and len(cls.__doc__) > 80
    assert [method for method, function in own_methods(cls) if not function.__doc__] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_names_arguments_results_and_errors(name: str) -> None:
    function = getattr(bitnet_ops, name)
    assert missing_in(function.__doc__, function) == []
    assert "Returns" in function.__doc__ and "Raises" in function.__doc__


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_names_arguments_results_and_errors(name: str) -> None:
    function = getattr(ops, name)
    doc = function.__doc__
    assert missing_in(doc, function) == []
    assert "Args:" in doc and "Raises:" in doc
    assert "Returns:" in doc or re.search(r"(?i)writ|chang", doc)  # those that fill a cache
    sized = re.compile(r"\[[^\]]*\]")  # shapes stand in brackets
    assert sized.search(doc)


def test_what_is_missing_is_seen() -> None:
    def function(shape: int, dtype: int) -> None:
        """Only shape."""

    assert missing_in(function.__doc__, function) == ["dtype"]
