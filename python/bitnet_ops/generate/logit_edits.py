"""What the options of one request do to single logits, kept up to date token by token.

It must not know how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

_BIAS, _REPETITION, _SUBTRACTED = range(3)


class LogitEdits:
    """The edits of `ops.sample_tokens` for one sequence: bias, then the three penalties.

    The repetition penalty counts the prompt and the generated tokens, the frequency and presence
    penalties the generated ones.

    Args:
        bias: what is added to a token's logit.
        repetition, frequency, presence: as in SamplingParams.
        prompt: its ids.
    """

    def __init__(
        self,
        bias: Mapping[int, float],
        repetition: float,
        frequency: float,
        presence: float,
        prompt: Iterable[int] = (),
    ) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._slots: dict[int, int] = {}  # where a token's edit stands
        self._ids = np.empty(16, np.int64)
        self._values = np.empty((16, 3), np.float32)
        self._counts: dict[int, int] = {}  # of generated tokens
        self._greatest = -1
        for token, added in bias.items():
            self._edit(token)[_BIAS] = added
        if repetition != 1:
            for token in prompt:
                self._edit(token)[_REPETITION] = repetition

    def __bool__(self) -> bool:
        """Whether there are any now."""
        return bool(self._slots)

    @property
    def counts_tokens(self) -> bool:
        """Whether a generated token changes anything."""
        return self._repetition != 1 or self._frequency != 0 or self._presence != 0

    @property
    def greatest_id(self) -> int:
        """Of the tokens with an edit; -1 if there is none."""
        return self._greatest

    def add(self, token: int) -> None:
        """Count a generated token."""
        if not self.counts_tokens:
            return
        count = self._counts[token] = self._counts.get(token, 0) + 1
        edit = self._edit(token)
        edit[_REPETITION] = self._repetition
        edit[_SUBTRACTED] = self._frequency * count + self._presence

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The ids [n] and their edits [n, 3]; views that the next `add` may change."""
        n = len(self._slots)
        return self._ids[:n], self._values[:n]

    def copy(self) -> LogitEdits:
        """One that goes its own way from here."""
        other = LogitEdits({}, self._repetition, self._frequency, self._presence)
        other._slots, other._counts = dict(self._slots), dict(self._counts)
        other._ids, other._values = self._ids.copy(), self._values.copy()
        other._greatest = self._greatest
        return other

    def _edit(self, token: int) -> npt.NDArray[np.float32]:
        """The edit of a token, to be written to before another one is asked for."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._values = np.concatenate([self._values, np.empty_like(self._values)])
            self._ids[slot] = token
            self._values[slot] = 0, 1, 0
            self._greatest = max(self._greatest, token)
        return self._values[slot]
