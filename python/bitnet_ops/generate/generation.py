"""What a run is given and what it gives: limits, a generation for each prompt, timing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Timing:
    """Seconds spent in the engine (not in the consumer of the stream) for one run.

    `first_token_s`: from the start to the first token(s), prefill included; `decode_s`: the steps
    after.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of the decode steps, all rows together, per second; 0 where there was none."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Logarithms of probabilities at one place of an answer, before all options of sampling.

    `top_logprobs`: (token id, logarithm) of the most probable tokens there, the first one first;
    the chosen one need not be among them.
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass
class Generation:
    """The answer to one prompt. `token_ids` leaves out the stop id.

    `logprobs`: of each of token_ids, if they were asked for; else empty.

    `finish_reason`: "stop", "length" (max_new_tokens), "context" (no position is left), "" while it
    runs or when the consumer broke off. `stop_reason` tells what "stop" was: the stop id, or the
    stop text that whoever reads the tokens has found; else None.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    seed: int | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def ending(self) -> str:
        """Why it ended, in words for people."""
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            return f"stop text {self.stop_reason!r}"
        if self.finish_reason == "stop":
            return "end of text"
        words = {
            "length": "max_new_tokens reached",
            "context": "context full: no position is left",
            "": "not finished",
        }
        return words.get(self.finish_reason, self.finish_reason)


@dataclass(frozen=True)
class Limits:
    """When to end: after max_new_tokens (0 or more), or at one of stop_ids."""

    max_new_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        n = self.max_new_tokens
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"engine: expected max_new_tokens an integer at least 0, got {n!r}")
