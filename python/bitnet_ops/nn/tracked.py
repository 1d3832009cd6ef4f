"""Tracked: modules that count exchanges of what they hold.

A bound program (models/program.py) reads tensors without asking their modules at every step. So
whoever replaces a tensor, a module or a setting of a tracked module raises one number, and a
program that was bound at another number looks again. It must not know who reads the number.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn

from bitnet_ops.nn.packing import Cast

_numbers = itertools.count(1)  # each one drawn once, whatever threads do
_last = 0


def changes() -> int:
    """Another number whenever a tracked module of this process has been changed."""
    return _last


def changed() -> None:
    """Say that something has been exchanged."""
    global _last
    _last = next(_numbers)


class Tracked(nn.Module):
    """A module each of whose exchanges is counted: of tensors, of modules inside it, of settings.

    Values that change in place need no count: the memory is the same.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        changed()

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        changed()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        changed()

    def _apply(self, fn: Cast, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # may replace the buffers
        changed()
        return self


class TrackedList(Tracked, nn.ModuleList):
    """A list of modules each of whose exchanges is counted."""

    def insert(self, index: int, module: nn.Module) -> None:
        super().insert(index, module)
        changed()
