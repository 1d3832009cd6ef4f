"""A model whose best next token is the last one plus 1, and what an engine gives over it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.generate.engine import Engine, Event, Finished, NewToken
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from tiny_models import SMALL, config_of

VOCAB = 50
CONFIG = dataclasses.replace(
    config_of(SMALL["bitnet-offline"]),
    vocab_size=VOCAB,
    max_position_embeddings=40,
    eos_token_ids=(),
)
LONG = dataclasses.replace(CONFIG, max_position_embeddings=4096)


class Counting:
    """A model whose best next token is the last one plus 1.

    `calls`: of every step, the new tokens of its sequences and where they begin. `before`: called
    with each batch; `broken`: tokens after which the logits are NaN; `seconds` of a step.
    """

    def __init__(
        self,
        config: ModelConfig = CONFIG,
        before: Callable[[StepBatch], None] | None = None,
        broken: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.config, self.before, self.broken, self.seconds = config, before, broken, seconds
        self.calls: list[tuple[list[list[int]], list[int]]] = []

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
        ids = [part.tolist() for part in batch.token_ids.tensor_split(batch.query_start_loc[1:-1])]
        ends = batch.seq_lens.tolist()
        self.calls.append((ids, [end - len(new) for end, new in zip(ends, ids, strict=True)]))
        if self.before is not None:
            self.before(batch)
        if self.seconds:
            time.sleep(self.seconds)
        last = batch.token_ids[batch.logit_rows]
        logits = torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float() * 9
        if self.broken is not None:
            logits[last == self.broken] = float("nan")
        return logits


def used(engine: Engine) -> int:
    return engine.stats().used_blocks


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def answers(events: list[Event]) -> dict[int, tuple[list[int], Any]]:
    """By request: its tokens and its reason, or its error."""
    found: dict[int, tuple[list[int], Any]] = {}
    for event in events:
        tokens, ending = found.get(event.request_id, ([], None))
        assert ending is None, "nothing comes after the end"
        if isinstance(event, NewToken):
            tokens.append(event.token_id)
        else:
            ending = event.reason if isinstance(event, Finished) else event.error
        found[event.request_id] = tokens, ending
    return found
