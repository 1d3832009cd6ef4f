"""Activation sparsity: inputs of the last projection of MLPs that are 0 are not multiplied.

    auto                    those that are 0 anyway, where leaving them out is measured to pay
    threshold:0.02          and those below 2 % of the largest of their token
    top_k:0.5               and all but the largest half of them
    adaptive:min_ratio=0.3,max_ratio=0.7    fewer stay where a few stand out

`auto` changes no result; `exact` is an earlier policy with the same results, and another name of
it. The others change results, and leave out by `auto`. Keys are those of a block `mlp` of a program
(docs/reference/program.md). It must not know torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from bitnet_ops.config.policy_words import Key, Number, keys_of, share
from bitnet_ops.errors import BitNetError


class ActivationSparsityError(BitNetError, ValueError):
    """A policy that is none, or that a model cannot follow; the message says which part."""


# kind -> its keys
KINDS: dict[str, dict[str, Key]] = {
    "auto": {},
    "threshold": {"threshold": share()},
    "top_k": {"top_k": share()},
    "adaptive": {"min_ratio": share(), "max_ratio": share()},
}
_OTHER_NAMES = {"exact": "auto"}


@dataclass(frozen=True)
class ActivationSparsity:
    """What becomes of the inputs of `down`; `keys`: those of a program's line, in their order."""

    kind: str
    keys: tuple[tuple[str, Number | str], ...]

    @property
    def drops(self) -> bool:
        """Whether results change."""
        return self.kind != "auto"


# Leaves out whatever that costs, with the results of `auto`: for measurements and tests.
ALWAYS = ActivationSparsity("auto", (("sparsity", "exact"),))


def read_sparsity(text: str) -> ActivationSparsity:
    """Raises ActivationSparsityError for anything that is not clear."""
    if not isinstance(text, str):
        _fail("a policy as text", f"a {type(text).__name__}")
    kind, colon, rest = text.strip().partition(":")
    kind = _OTHER_NAMES.get(kind, kind)
    keys = KINDS.get(kind)
    if keys is None or bool(colon) != bool(keys):
        known = ", ".join(f"{name}:..." if keys else name for name, keys in KINDS.items())
        _fail(f"one of {known}", repr(text))
    numbers = keys_of(kind, rest, keys, _fail) if keys else ()
    return ActivationSparsity(kind, (("sparsity", "auto"), *numbers))


def _fail(expected: str, got: object) -> NoReturn:
    raise ActivationSparsityError(f"activation_sparsity: expected {expected}, got {got}")
