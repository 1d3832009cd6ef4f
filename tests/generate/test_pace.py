"""Pace on a machine of known costs: the step it allows lasts as long as was asked for."""

from __future__ import annotations

from random import Random

import pytest

from bitnet_ops.generate.pace import Pace


def machine(decode_s: float, token_s: float, most_steps: float, steps: int = 60) -> list[float]:
    """Seconds of steps beside four streams while a long prompt is prefilled."""
    pace = Pace(most_steps)
    for _ in range(5):
        pace.learn(4, 0, decode_s)
    seconds = []
    for _ in range(steps):
        tokens = pace.prompt_tokens(256)
        seconds.append(decode_s + token_s * tokens)
        pace.learn(4, tokens, seconds[-1])
    return seconds


@pytest.mark.parametrize("most_steps", [1.5, 2.0, 4.0])
@pytest.mark.parametrize(("decode_s", "token_s"), [(0.035, 0.0025), (0.1, 0.001), (0.02, 0.0001)])
def test_steps_last_as_long_as_was_asked(
    decode_s: float, token_s: float, most_steps: float
) -> None:
    seconds = machine(decode_s, token_s, most_steps)
    full = decode_s + 256 * token_s
    expected = max(min(decode_s * most_steps, full), decode_s + 8 * token_s)
    assert max(seconds[1:]) <= expected * 1.001
    assert seconds[-1] >= min(expected, full) - token_s * 1.001


@pytest.mark.parametrize("noise", [0.03, 0.06, 0.1])
def test_hardly_any_step_of_a_restless_machine_lasts_longer(noise: float) -> None:
    decode_s, token_s, gaps = 0.035, 0.0023, list[float]()
    for seed in range(40):
        random, pace = Random(seed), Pace(2.0)
        for _ in range(8):
            pace.learn(8, 0, decode_s * random.gauss(1, noise))
        for step in range(100):
            tokens = pace.prompt_tokens(248)
            seconds = (decode_s + token_s * tokens) * random.gauss(1, noise)
            pace.learn(8, tokens, seconds)
            if step >= 10:  # it has seen some
                gaps.append(seconds / decode_s)
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] < 2 * (1 + noise)
    assert sum(gaps) / len(gaps) > 1.5, "half of what the limit leaves is the prompt's"


def test_a_prompt_always_goes_on() -> None:
    pace = Pace(2.0)
    pace.learn(1, 0, 1e-6)
    pace.learn(1, 100, 10.0)
    assert pace.prompt_tokens(256) == 8
    assert pace.prompt_tokens(3) == 3
    assert pace.prompt_tokens(0) == 0


def test_what_it_does_not_learn_from() -> None:
    pace = Pace(2.0)
    pace.learn(0, 256, 9.0)  # nobody waits for this one
    pace.learn(2, 64, 9.0)  # nothing to compare it with
    assert pace.prompt_tokens(256) == 32
