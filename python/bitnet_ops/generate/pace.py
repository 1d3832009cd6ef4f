"""Pace: how many prompt tokens a step may take beside streams that decode.

A step with a whole budget of prompt tokens lasts many times as long as one that only decodes, and
every stream waits for it. What a step costs is learnt from the steps themselves. It decides when
tokens are computed, never which.
"""

from __future__ import annotations

import math

_LEARNT = 0.2  # weight of the newest step
_LEAST = 8  # prompt tokens of a step: fewer would waste the reading of the weights
_SPREADS = 3.0  # mean deviations of room: one step in a hundred lasts longer, if they are normal
_LEAST_ROOM = 0.5  # of what most_steps leaves, however much steps deviate: the prompt goes on


class Pace:
    """Learns the seconds of a step without prompt tokens and of a prompt token in a step.

    Args:
        most_steps: a step with prompt tokens may last as long as so many without; hardly any lasts
            longer, since room is left for what steps deviate from their prediction.
    """

    def __init__(self, most_steps: float) -> None:
        self.most_steps = most_steps
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._deviation = 0.0  # mean share by which a step with prompt tokens misses its prediction

    def prompt_tokens(self, most: int) -> int:
        """How many prompt tokens the next step beside streams may have, at most `most`."""
        if self.most_steps == math.inf:
            return most
        if self._decode_s is None or self._token_s is None:
            return min(most, 4 * _LEAST)  # a first step, to learn from
        more = self.most_steps / (1 + _SPREADS * self._deviation) - 1
        more = max(more, _LEAST_ROOM * (self.most_steps - 1))
        room = self._decode_s * more / self._token_s
        return max(min(most, _LEAST), int(min(most, room)))

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Enter a step of `decoding` streams and so many prompt tokens."""
        if not decoding:
            return
        if not prompt_tokens:
            self._decode_s = _mean(self._decode_s, seconds)
        elif self._decode_s is not None:
            if self._token_s is not None:
                missed = seconds / (self._decode_s + self._token_s * prompt_tokens) - 1
                self._deviation += _LEARNT * (abs(missed) - self._deviation)
            # never nothing: a step that was faster by chance does not open the gates
            more = max(seconds - self._decode_s, 0.05 * self._decode_s)
            self._token_s = _mean(self._token_s, more / prompt_tokens)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _LEARNT * (now - before)
