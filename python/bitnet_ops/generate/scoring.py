"""Given texts through a model, in batches: how probable they are, and which vectors they have.

A score is the logarithm of each token's probability after those before it, which is what
evaluations (perplexity, multiple choice) ask for. An embedding is the hidden state of the last
token after the last norm, at length 1: that is how decoder-only embedding models
(microsoft/BitNet-embedding, Qwen3-Embedding) are trained. Token ids go in, no texts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.arguments import check_integer
from bitnet_ops.generate.prompt import PromptError, check_prompt
from bitnet_ops.generate.run import TokenLogprobs
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_config import DEFAULT_BLOCK_SIZE, kept_of
from bitnet_ops.nn.kv_pool import KVPool
from bitnet_ops.nn.state_pool import slot_bytes

T = TypeVar("T")
_TOKENS = 512  # of a step: prompts run no faster in longer ones
_POOL_TOKENS = 4096  # whose keys and values are held at once, or one text that is longer
_STATES = 16  # sequences with recurrent states that are held together, at most
_LOGIT_ROWS = 32  # at once: 16 MB for a vocabulary of 128k


@dataclass(frozen=True)
class Score:
    """Of the tokens of one text from `first` on.

    logprobs: float32 [n], natural logarithms. greedy: bool [n], whether each was the most probable.
    """

    logprobs: Tensor
    greedy: Tensor


@torch.inference_mode()
def score(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    first: Sequence[int] | None = None,
    *,
    kv_dtype: torch.dtype = torch.float32,
    adapter: str | None = None,
) -> list[Score]:
    """The scores of `sequences` of token ids, each of its tokens from `first` (default 1) on.

    A score does not depend on the other sequences. Raises PromptError for a sequence without
    tokens, longer than the model's context or with an id outside its vocabulary, and for a `first`
    below 1 or above the sequence's length.
    """
    begins = [1] * len(sequences) if first is None else list(first)
    if len(begins) != len(sequences):
        raise PromptError(
            f"score: expected a first token for each of {len(sequences)} sequences, got "
            f"{len(begins)}"
        )
    for number, (ids, begin) in enumerate(zip(sequences, begins, strict=True)):
        _check(model, ids, begin, number)
    logprobs = [[torch.empty(0)] for _ in sequences]
    greedy = [[torch.empty(0, dtype=torch.bool)] for _ in sequences]
    # nothing comes after the last token, so that it is not run
    runs = {i: list(ids[:-1]) for i, ids in enumerate(sequences) if begins[i] < len(ids)}
    wanted = {i: begins[i] - 1 for i in runs}
    for parts, states in _hidden_states(model, runs, wanted, kv_dtype, adapter):
        targets = [sequences[i][p + 1] for i, positions in parts for p in positions]
        values, best = _of_states(model, states, torch.tensor(targets, dtype=torch.int64))
        sizes = [len(positions) for _, positions in parts]
        for (i, _), v, g in zip(parts, values.split(sizes), best.split(sizes), strict=True):
            logprobs[i].append(v)
            greedy[i].append(g)
    return [Score(torch.cat(v), torch.cat(g)) for v, g in zip(logprobs, greedy, strict=True)]


def embed(
    model: Decoder, sequences: Sequence[Sequence[int]], dimensions: int | None = None
) -> Tensor:
    """One vector for each sequence of token ids, f32 [len(sequences), hidden], of length 1.

    `dimensions` keeps that many of the first ones (before the length is made 1), for models trained
    so that their beginning serves alone. A vector does not depend on its neighbours. Raises
    ValueError for an empty sequence, PromptError for one that the model cannot run.
    """
    return _result(embed_steps(model, sequences, dimensions))


@torch.inference_mode()
def embed_steps(
    model: Decoder, sequences: Sequence[Sequence[int]], dimensions: int | None = None
) -> Generator[None, None, Tensor]:
    """`embed`, which yields after each step of the model, for who has other work beside it."""
    config = model.config
    if dimensions is not None:
        check_integer("embed: expected dimensions", dimensions, 1, config.hidden_size)
    for number, ids in enumerate(sequences, start=1):
        if not len(ids):
            raise ValueError(
                f"embed: expected at least one token in every text, got none in text {number} of "
                f"{len(sequences)}"
            )
        check_prompt(ids, config.vocab_size, config.max_position_embeddings)
    vectors = torch.empty(len(sequences), config.hidden_size, dtype=torch.float32)
    runs = {i: list(ids) for i, ids in enumerate(sequences)}
    wanted = {i: len(ids) - 1 for i, ids in runs.items()}
    for parts, states in _hidden_states(model, runs, wanted, torch.float32, None):
        vectors[[i for i, positions in parts if positions]] = states
        yield
    return torch.nn.functional.normalize(vectors[:, :dimensions], dim=-1)


@torch.inference_mode()
def prompt_logprobs_steps(
    model: Decoder,
    ids: Sequence[int],
    top: int,
    kv_dtype: torch.dtype,
    adapter: str | None = None,
) -> Generator[None, None, list[TokenLogprobs]]:
    """Of each token of `ids` from the second one on, with the `top` most probable ones there.

    It yields after each step of the model. Raises PromptError as `score` does.
    """
    _check(model, ids, 1, 0)
    found: list[TokenLogprobs] = []
    runs = {0: list(ids[:-1])} if len(ids) > 1 else {}
    for parts, states in _hidden_states(model, runs, {0: 0}, kv_dtype, adapter):
        targets = torch.tensor([ids[p + 1] for _, positions in parts for p in positions])
        for begin in range(0, len(targets), _LOGIT_ROWS):
            rows = slice(begin, begin + _LOGIT_ROWS)
            logits, chosen = model.head(states[rows]), targets[rows]
            columns = [part.tolist() for part in ops.top_logprobs(logits, chosen, top)]
            for token, logprob, tokens, values in zip(chosen.tolist(), *columns, strict=True):
                found.append(TokenLogprobs(token, logprob, tuple(zip(tokens, values, strict=True))))
            yield
    return found


def _result(steps: Generator[None, None, T]) -> T:
    """What a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _check(model: Decoder, ids: Sequence[int], begin: int, number: int) -> None:
    context, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    if not 1 <= len(ids) <= context + 1:  # the last token is not run
        raise PromptError(
            f"score: expected 1 to {context + 1} tokens in sequence {number}, got {len(ids)}"
        )
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise PromptError(
            f"score: expected token ids from 0 to {vocabulary - 1} in sequence {number}, got "
            f"{min(ids)} to {max(ids)}"
        )
    if not 1 <= begin <= len(ids):
        raise PromptError(
            f"score: expected the first token to score from 1 to {len(ids)} in sequence {number}, "
            f"got {begin}"
        )


Parts = list[tuple[int, range]]  # of each sequence in a step, the positions whose states are wanted


def _hidden_states(
    model: Decoder,
    runs: dict[int, list[int]],
    wanted: dict[int, int],
    kv_dtype: torch.dtype,
    adapter: str | None,
) -> Iterator[tuple[Parts, Tensor]]:
    """Run sequences of ids, by number, step by step: what the head would read, f32 [n, hidden].

    wanted: of each sequence, the first position whose state is wanted.
    """
    states = bool(slot_bytes(kept_of(model.config)))
    maximum = _STATES if states else len(runs)
    for group in _groups({i: len(ids) for i, ids in runs.items()}, maximum):
        needed = [-(-len(runs[i]) // DEFAULT_BLOCK_SIZE) for i in group]
        ends = accumulate(needed)
        tables = {
            i: list(range(end - n, end)) for i, n, end in zip(group, needed, ends, strict=True)
        }
        slots = {i: (n, 0, 0) if states else None for n, i in enumerate(group)}
        pool = KVPool(model.config, sum(needed), dtype=kv_dtype, state_slots=len(group))
        for pieces in _steps([(i, len(runs[i])) for i in group]):
            batch = StepBatch.of(
                [
                    SequenceStep(runs[i][a:b], a, tables[i], 0, adapter, slots[i])
                    for i, a, b in pieces
                ],
                DEFAULT_BLOCK_SIZE,
            )
            parts = [(i, range(max(a, wanted[i]), b)) for i, a, b in pieces]
            begins = batch.query_start_loc.tolist()
            rows = [
                begin + p - a
                for begin, (_, a, _), (_, positions) in zip(begins, pieces, parts, strict=False)
                for p in positions
            ]
            at = torch.tensor(rows, dtype=torch.int64)
            yield parts, model.step_states(replace(batch, logit_rows=at), pool)


def _groups(lengths: dict[int, int], maximum: int) -> Iterator[list[int]]:
    """Sequences whose keys and values are held together, `maximum` at most, longest first."""
    group: list[int] = []
    held = 0
    for i in sorted(lengths, key=lambda i: -lengths[i]):
        if group and (held + lengths[i] > _POOL_TOKENS or len(group) == maximum):
            yield group
            group, held = [], 0
        group.append(i)
        held += lengths[i]
    if group:
        yield group


def _steps(lengths: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of at most _TOKENS tokens: (sequence, begin, end) of the pieces of each."""
    step: list[tuple[int, int, int]] = []
    room = _TOKENS
    for i, length in lengths:
        begin = 0
        while begin < length:
            end = min(length, begin + room)
            step.append((i, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield step
                step, room = [], _TOKENS
    if step:
        yield step


def _of_states(model: Decoder, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(logprobs, greedy) of `targets` where the head reads `states`; few rows at once."""
    logprobs = torch.empty(len(targets), dtype=torch.float32)
    greedy = torch.empty(len(targets), dtype=torch.bool)
    for begin in range(0, len(targets), _LOGIT_ROWS):
        part = slice(begin, begin + _LOGIT_ROWS)
        logits, wanted = model.head(states[part]), targets[part]
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        logprobs[part] = chosen - logits.logsumexp(-1)
        greedy[part] = logits.argmax(-1) == wanted
    return logprobs, greedy
