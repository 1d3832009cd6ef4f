"""Forms that are made of a weight once and kept beside it, such as its columns."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Copies:
    """A second form of weights, made when it is first asked for, and again if a weight changes."""

    def __init__(self) -> None:
        self._made = WeakTensorKeyDictionary()  # weight -> its version then, and the form

    def get(self, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The one made before, if the weight is unchanged, or else what `make` gives."""
        version = 0 if weight.is_inference() else weight._version
        made = self._made.get(weight)
        if made is None or made[0] != version:
            made = version, make()
            self._made[weight] = made
        form: Tensor = made[1]
        return form

    def forget(self, weight: Tensor) -> None:
        """Free that of a weight, once no program reads it."""
        self._made.pop(weight, None)
