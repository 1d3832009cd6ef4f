"""Servers for tests: the demo model's, and one of a model that says what it is told to."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from torch import Tensor

import bitnet_ops
from bitnet_ops.generate.engine import Engine, SchedulerOptions
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.loading.generation_config import GenerationConfig
from bitnet_ops.models.step_batch import StepBatch
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.server import connection
from bitnet_ops.server.app import make_app
from bitnet_ops.server.catalog import Catalog
from bitnet_ops.server.security import Access
from bitnet_ops.server.service import ServiceOptions
from counting_model import LONG
from tool_templates import FORMS
from tool_tokenizers import END, tokenizer_of


class Scripted:
    """A model whose answer to a prompt is the text of that key of `answers` which comes last in it.

    It ends with the end of a turn; to other prompts it says nothing. `seconds` of a step; `broken`:
    a step raises while it is set.
    """

    summary = "scripted"

    def __init__(
        self, tokenizer: Tokenizer, answers: Mapping[str, str], seconds: float = 0.0
    ) -> None:
        self.config = dataclasses.replace(LONG, vocab_size=tokenizer.vocab_size + 5)
        self.tokenizer, self.answers, self.seconds = tokenizer, answers, seconds
        self.broken = False
        self.steps = 0
        self._texts: dict[int, list[int]] = {}  # ids so far, by a sequence's first block
        self._said: dict[int, tuple[tuple[int, int], list[int]]] = {}

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(())

    def step(self, batch: StepBatch, pool: KVPool) -> Tensor:
        self.steps += 1
        if self.broken:
            raise RuntimeError("broken for a test")
        if self.seconds:
            time.sleep(self.seconds)
        parts = batch.token_ids.tensor_split(batch.query_start_loc[1:-1])
        wanted, next_ids = batch.logit_rows.tolist(), dict.fromkeys(batch.logit_rows.tolist(), 0)
        for i, part in enumerate(parts):
            first, end = int(batch.block_table[i, 0]), int(batch.seq_lens[i])
            start = end - len(part)
            ids = self._texts.setdefault(first, [])
            ids[start:] = part.tolist()
            before = int(batch.query_start_loc[i])
            rows = sorted(row for row in wanted if before <= row < before + len(part))
            for row in rows:  # behind the newest token, and behind drafts that are right
                at = start + row - before + 1
                if row > rows[0] and next_ids[row - 1] != ids[at - 1]:
                    break
                next_ids[row] = self._next(first, ids[:at], start if row == rows[0] else at - 1)
        one_hot = torch.nn.functional.one_hot(
            torch.tensor([next_ids[row] for row in wanted], dtype=torch.int64),
            self.config.vocab_size,
        )
        return one_hot.float() * 9

    def _next(self, first: int, ids: list[int], start: int) -> int:
        """The answer's next id; of a prompt, whose last part may be one token, its first."""
        expected, rest = self._said.get(first, (None, []))
        if expected != (start, ids[start:][-1]):
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            last = max(self.answers, key=text.rfind)  # of a conversation, in the newest message
            answer = self.answers[last] if last in text else ""
            end = self.tokenizer.token_id(END)
            assert end is not None
            rest = [*self.tokenizer.encode(answer, add_special_tokens=False), end]
        said = rest.pop(0) if rest else 0
        self._said[first] = ((len(ids), said), rest)
        return said


def scripted_lm(
    answers: Mapping[str, str],
    form: str = "hermes",
    seconds: float = 0.0,
    context: int = 4096,
    **options: Any,
) -> LanguageModel:
    """A language model of `Scripted`; form: of tool calls, one of tool_templates.FORMS."""
    tokenizer = tokenizer_of(template=FORMS[form])
    model: Any = Scripted(tokenizer, answers, seconds)
    model.config = dataclasses.replace(model.config, max_position_embeddings=context)
    end = tokenizer.token_id(END)
    assert end is not None
    lm = LanguageModel(model, tokenizer, frozenset([end]))
    lm.engine = Engine(model, scheduling=SchedulerOptions(prefix_cache=False, **options))
    return lm


def greedy_demo(**options: Any) -> LanguageModel:
    """The demo, greedy where a request does not say how to sample; options: of load."""
    lm = bitnet_ops.load(**options)
    lm.generation = GenerationConfig(lm.generation.stop_ids)
    return lm


def app_of(
    models: Mapping[str, LanguageModel] | None = None,
    access: Access | None = None,
    adapters: Mapping[str, str] | None = None,
    **options: Any,
) -> FastAPI:
    """The app over `models`, or over the demo; options: of ServiceOptions."""
    return make_app(
        lambda: Catalog(models or {"demo": greedy_demo()}, adapters or {}),
        ServiceOptions(**options),
        access,
    )


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of a server of `app`, which is ready, in a thread of this process."""
    config = uvicorn.Config(
        app,
        port=0,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=2,
        **connection.options(),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not (server.started and app.state.service.state == "ready"):
        assert thread.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
