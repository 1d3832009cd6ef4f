"""Comparing a network with another engine's, on any CPU: prompts are chosen by margin at run time.

Float kernels of other engines round otherwise on other CPUs. An activation within that error of a
rounding tie then gets another int8 code, which later layers multiply: so two right networks agree
to fp32 rounding on prompts all of whose codes keep clear of ties, and to a few percent elsewhere.
Which prompts keep clear is measured on the oracle while it runs. Shares no code with what is
checked; knows torch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

FP32_ROUNDING = 5e-6  # of the largest logit: a few dozen roundings of 2^-24 on the way of a value
# Of a code, which may be 127: 13 units in the last place there. Errors up to 4 have been seen.
CLEAR_OF_TIES = 1e-4
ANY_TIE = 0.1  # of the largest logit: what codes that are off by one may come to
OTHER_CPU = 2.0**-22  # relative: sums in another order err by a few units in the last place


class TieWatch:
    """The smallest distance of any activation of `modules` to a rounding tie of its int8 code.

    `group`: how many features share a scale; None: all of a token.
    """

    def __init__(self, modules: Iterable[nn.Module], group: int | None = None) -> None:
        self.margin, self._group = 0.5, group
        for module in modules:
            module.register_forward_pre_hook(self._note, prepend=True)

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        whole = inputs[0].detach().double()
        for x in whole.split(self._group or whole.shape[-1], dim=-1):
            scaled = x * (127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5))
            self.margin = min(self.margin, float((scaled - scaled.floor() - 0.5).abs().min()))


@contextlib.contextmanager
def rounding_of_another_cpu(modules: Iterable[nn.Module], seed: int = 0) -> Iterator[None]:
    """The inputs of `modules` a few units in the last place off, as other float kernels have them.

    To be entered after a TieWatch was made: what it sees is then off as well.
    """
    generator = torch.Generator().manual_seed(seed)

    def shake(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        return (x * (1 + OTHER_CPU * torch.randn(x.shape, generator=generator)), *inputs[1:])

    hooks = [m.register_forward_pre_hook(shake, prepend=True) for m in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def prompts(vocab: int, seed: int) -> list[Tensor]:
    """ids [1, T]: short ones, many of which keep clear of ties, and a few longer ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (2, 3, 4, 6) * 12 + (12,) * 4
    return [torch.randint(0, vocab, (1, n), generator=generator) for n in lengths]


def assert_alike(
    ours: Callable[[Tensor], Tensor],
    oracle: Callable[[Tensor], Tensor],
    watch: TieWatch,
    cases: Iterable[Tensor],
    *,
    min_clear: int = 4,
) -> None:
    """Logits [T, V] of both on every case; at least `min_clear` of them must be clear of ties."""
    clear = agreeing = positions = 0
    for ids in cases:
        watch.margin = 0.5
        expected = oracle(ids)
        found = ours(ids)
        difference = float((found - expected).abs().max() / expected.abs().max())
        if watch.margin > CLEAR_OF_TIES:
            assert difference < FP32_ROUNDING, (ids.tolist(), watch.margin, difference)
            clear += 1
        assert difference < ANY_TIE, (ids.tolist(), watch.margin, difference)
        same = found.argmax(-1) == expected.argmax(-1)
        top = expected.topk(2).values
        # where the best token differs, the oracle's lead was within what a tie can move
        assert bool((top[..., 0] - top[..., 1])[~same].le(2 * ANY_TIE * expected.abs().max()).all())
        agreeing += int(same.sum())
        positions += same.numel()
    assert clear >= min_clear, f"only {clear} prompts keep clear of ties"
    assert agreeing >= 0.9 * positions, f"the best token agrees at {agreeing} of {positions}"
