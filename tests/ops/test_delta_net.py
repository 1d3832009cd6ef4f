"""delta_net in every division of the same tokens: chunks, batches, slots, drafts, threads; by bits.

Its values are checked against float64 by the tests over all ops (tests/helpers/ops_delta.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from bitnet_ops import ops
from bounds import assert_equal
from isa_control import every_configuration
from op_values import activations
from ops_delta import random_states

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, KERNEL, DRAFTS = 4, 2, 32, 64, 4, 8
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM


def weights() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    conv = torch.randn(KERNEL, CHANNELS, generator=g) / 2
    return conv, torch.rand(HEADS, generator=g) * 3 - 2, torch.rand(HEADS, generator=g) * 3 - 2


def text(number: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """qkv, a, b of a sequence: the same beginning for every length."""
    g = torch.Generator().manual_seed(number)
    rows = activations(g, 64, CHANNELS + 2 * HEADS)[:tokens]
    qkv, a, b = rows.split([CHANNELS, HEADS, HEADS], dim=1)
    return qkv.to(dtype), a, b


@dataclass
class Net:
    """Slots whose contents are noise until a sequence begins in them, two layers each."""

    slots: int = 5
    states: list[Tensor] = field(init=False)
    layer: int = 1

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(2)
        self.states = random_states(
            g, self.slots, 2, HEADS, KEY_DIM, VALUE_DIM, KERNEL, CHANNELS, drafts=DRAFTS
        )

    def step(self, *rows: tuple[tuple[Tensor, ...], int, int, tuple[int, int, int]]) -> Tensor:
        """rows: a text, where it begins and ends, (slot, replays, drafts)."""
        parts = [[t[begin:end] for t in given] for given, begin, end, _ in rows]
        qkv, a, b = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        counts = [0, *(end - begin for _, begin, end, _ in rows)]
        return ops.delta_net(
            qkv, a, b, *weights(), self.states, self.layer, torch.tensor(counts).cumsum(0),
            torch.tensor([end for _, _, end, _ in rows]),
            torch.tensor([state for *_, state in rows]), KEY_HEADS, KEY_DIM,
        )  # fmt: skip

    def state(self, slot: int) -> list[Tensor]:
        """What the next step begins with when nothing is a draft."""
        recurrent, inputs, _ = self.states
        return [recurrent[slot, self.layer].clone(), inputs[slot, self.layer, : KERNEL - 1].clone()]


def alone(given: tuple[Tensor, ...], end: int) -> tuple[Tensor, list[Tensor]]:
    net = Net()
    return net.step((given, 0, end, (0, 0, 0))), net.state(0)


def assert_same(ours: list[Tensor], theirs: list[Tensor], message: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other, message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_division_into_steps_gives_the_same_bits(dtype: torch.dtype) -> None:
    tokens = 7
    given = text(3, tokens, dtype)
    whole, state = alone(given, tokens)
    for cuts in range(2 ** (tokens - 1)):
        ends = [i + 1 for i in range(tokens - 1) if cuts >> i & 1] + [tokens]
        net, outputs = Net(), []
        for begin, end in zip([0, *ends], ends, strict=False):
            outputs.append(net.step((given, begin, end, (2, 0, 0))))
        assert_equal(torch.cat(outputs), whole, str(ends))
        assert_same(net.state(2), state, str(ends))


def test_neighbours_slots_threads_and_kernels_change_nothing() -> None:
    """Sequences of 0, 1 and many new tokens, which begin or go on, in slots of any order."""
    texts = [text(i, 40) for i in range(4)]
    wanted = [alone(given, 40) for given in texts]
    for configuration in every_configuration():
        for slots in ([0, 1, 2, 3], [4, 2, 0, 3]):
            net = Net()
            others = [t.clone() for t in net.states]
            lengths, outputs = [0] * 4, [[] for _ in texts]
            for new in ([9, 1, 0, 17], [1, 1, 33, 0], [0, 38, 1, 23], [30, 0, 6, 0]):
                ends = [length + count for length, count in zip(lengths, new, strict=True)]
                result = net.step(
                    *((t, *of, (slot, 0, 0))
                      for t, *of, slot in zip(texts, lengths, ends, slots, strict=True))
                )  # fmt: skip
                for output, part in zip(outputs, result.split(new), strict=True):
                    output.append(part)
                lengths = ends
            assert lengths == [40] * 4
            for i, (output, state) in enumerate(wanted):
                assert_equal(torch.cat(outputs[i]), output, f"{configuration} sequence {i}")
                assert_same(net.state(slots[i]), state, f"{configuration} sequence {i}")
            unused = ({*range(5)} - {*slots}).pop()
            for ours, before in zip(net.states, others, strict=True):
                assert_equal(ours[unused], before[unused], "a slot of nobody")
                assert_equal(ours[:, 0], before[:, 0], "another layer")


@pytest.mark.parametrize("certain", [0, 1, 5])
@pytest.mark.parametrize("drafts", range(1, DRAFTS + 1))
def test_drafts_that_were_right_are_followed_and_the_others_never_were(
    drafts: int, certain: int
) -> None:
    """For every number of right ones, the next step begins where their tokens alone end."""
    before, length = 3, 3 + certain + drafts
    given, other = text(5, 40), text(6, 40)
    for right in range(drafts + 1):
        for further in (0, 2):  # drafts of the next step
            net = Net()
            net.step((given, 0, before, (1, 0, 0)), (other, 0, 4, (3, 0, 0)))
            checked = net.step((given, before, length, (1, 0, drafts)))
            assert_equal(checked, alone(given, length)[0][before:], "the check of drafts")
            # the right ones, then a text of its own
            kept = before + certain + right
            own = tuple(
                torch.cat([t[:kept], u[:10]]) for t, u in zip(given, text(7, 40), strict=True)
            )
            message = f"{right} of {drafts} right"
            wanted, state = alone(own, kept + 4)
            result = net.step((own, kept, kept + 4, (1, right, further)), (other, 4, 6, (3, 0, 0)))
            assert_equal(result[:4], wanted[kept:], message)
            last = net.step((own, kept + 4, kept + 5, (1, further, 0)))
            assert_equal(last, alone(own, kept + 5)[0][-1:], message)
            assert_same(net.state(1), alone(own, kept + 5)[1], message)
            if not further:
                assert_same(state, alone(own, kept + 4)[1], message)


def test_a_copied_slot_goes_its_own_way() -> None:
    given, other = text(5, 20), text(6, 20)
    net = Net()
    net.step((given, 0, 9, (1, 0, 2)))
    for tensor in net.states:
        tensor[4] = tensor[1]
    both = net.step((given, 9, 12, (1, 2, 0)), (other, 9, 12, (4, 0, 0)))
    mixed = tuple(torch.cat([t[:7], u[9:12]]) for t, u in zip(given, other, strict=True))
    assert_equal(both[:3], alone(given, 12)[0][9:])
    assert_equal(both[3:], alone(mixed, 10)[0][7:])
