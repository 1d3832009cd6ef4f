"""Metrics: what a server has done, for /metrics (Prometheus' text) and the status page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bitnet_ops.generate.images import Images
from bitnet_ops.generate.scheduler import EngineStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
INTERVAL_S, _POINTS = 2.0, 150


class Metrics:
    """Counts since the start. For the event loop alone.

    Attributes: `requests` by outcome: answers that are "ok", "error" or "cancelled", and requests
    that are "rejected" for want of a place, or "invalid" (another status from 400 to 498);
    `generated`, `prompt` and `cached` tokens, the last spared by the prefix cache.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.requests = dict.fromkeys(("ok", "error", "cancelled", "rejected", "invalid"), 0)
        self.generated = self.prompt = self.cached = 0
        self._history: deque[tuple[int, int]] = deque(maxlen=_POINTS)  # tokens in each interval
        self._before = 0, 0
        self.registry = CollectorRegistry()
        self._outcomes = Counter(
            "bitnet_requests", "Requests by how they ended.", ["outcome"], registry=self.registry
        )
        for outcome in self.requests:
            self._outcomes.labels(outcome)
        self._first = Histogram(
            "bitnet_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._pages_skipped = Gauge(
            "bitnet_attention_skipped_ratio",
            "Share of the pages of cached positions that attention policies left out.",
            ["model"],
            registry=self.registry,
        )
        self._columns_skipped = Gauge(
            "bitnet_columns_skipped_ratio",
            "Share of down's columns that activation sparsity left out, of single tokens.",
            ["model"],
            registry=self.registry,
        )
        self._drafted = Gauge(
            "bitnet_drafted_tokens",
            "Tokens that were guessed and verified, by what guessed them.",
            ["model", "source"],
            registry=self.registry,
        )
        self._accepted = Gauge(
            "bitnet_accepted_drafts",
            "How many of the drafted tokens were right.",
            ["model", "source"],
            registry=self.registry,
        )
        self._pictures = Gauge(
            "bitnet_pictures", "Pictures that a tower has read.", ["model"], registry=self.registry
        )
        self._tower = Gauge(
            "bitnet_tower_seconds",
            "What reading pictures has taken.",
            ["model"],
            registry=self.registry,
        )
        self.show("bitnet_generated_tokens", "Tokens generated.", lambda: self.generated)
        self.show("bitnet_prompt_tokens", "Prompt tokens computed.", lambda: self.prompt)
        self.show("bitnet_cached_tokens", "Prompt tokens not computed.", lambda: self.cached)

    def show(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Have `value()` in the text."""
        Gauge(name, help, registry=self.registry).set_function(value)

    def show_skipped(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """Have in the text what the policies of a model's engine have left out."""
        self._pages_skipped.labels(model).set_function(lambda: 1 - stats().attention_read)
        self._columns_skipped.labels(model).set_function(lambda: stats().inputs_skipped)

    def show_drafts(self, model: str, stats: Callable[[], EngineStats], *, head: bool) -> None:
        """Have in the text what was drafted for a model; `head`: whether it has a draft head."""
        ngram = self._drafted.labels(model, "ngram"), self._accepted.labels(model, "ngram")
        ngram[0].set_function(lambda: stats().drafts.ngram.drafted)
        ngram[1].set_function(lambda: stats().drafts.ngram.accepted)
        if head:
            heads = self._drafted.labels(model, "head"), self._accepted.labels(model, "head")
            heads[0].set_function(lambda: stats().drafts.head.drafted)
            heads[1].set_function(lambda: stats().drafts.head.accepted)

    def show_pictures(self, model: str, images: Images) -> None:
        """Have in the text how many pictures a model has read."""
        self._pictures.labels(model).set_function(lambda: images.computed)
        self._tower.labels(model).set_function(lambda: images.seconds)

    def ended(self, outcome: str) -> None:
        self.requests[outcome] += 1
        self._outcomes.labels(outcome).inc()

    def answered(self, status: int) -> None:
        """A response of this status has begun."""
        if 400 <= status < 499:
            self.ended("rejected" if status == 429 else "invalid")

    def first_token(self, seconds: float, prompt: int, cached: int) -> None:
        """A prompt of so many tokens, some of them cached, has its first token."""
        self._first.observe(seconds)
        self.prompt += prompt - cached
        self.cached += cached

    def tick(self) -> None:
        """Close an interval of the history; called every INTERVAL_S seconds."""
        now = self.generated, self.prompt
        self._history.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now

    def history(self) -> dict[str, object]:
        """Tokens per second over the last minutes, the oldest first."""
        return {
            "seconds_per_point": INTERVAL_S,
            "generated": [g / INTERVAL_S for g, _ in self._history],
            "prompt": [p / INTERVAL_S for _, p in self._history],
        }

    def text(self) -> bytes:
        """In Prometheus' form."""
        return generate_latest(self.registry)
