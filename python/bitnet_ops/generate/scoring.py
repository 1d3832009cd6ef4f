"""How probable given texts are: the logarithm of each token's probability after those before it.

That is what evaluations (perplexity, multiple choice) ask for. It must not know text or files:
token ids go in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from bitnet_ops.generate.prompts import PromptError
from bitnet_ops.models import Decoder
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_pool import DEFAULT_BLOCK_SIZE, KVPool

_TOKENS = 512  # of a step: prompts run no faster in longer ones
_POOL_TOKENS = 4096  # whose keys and values are held at once, or one text that is longer
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
    scores = [_empty() for _ in sequences]
    waiting = [i for i, ids in enumerate(sequences) if begins[i] < len(ids)]
    for group in _groups(waiting, [len(ids) - 1 for ids in sequences]):
        given = [(list(sequences[i]), begins[i]) for i in group]
        found = _score_group(model, given, kv_dtype, adapter)
        for i, one in zip(group, found, strict=True):
            scores[i] = one
    return scores


def _empty() -> Score:
    return Score(torch.empty(0), torch.empty(0, dtype=torch.bool))


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


def _groups(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sequences whose keys and values are held together, the longest ones first."""
    group: list[int] = []
    held = 0
    for i in sorted(numbers, key=lambda i: -lengths[i]):
        if group and held + lengths[i] > _POOL_TOKENS:
            yield group
            group, held = [], 0
        group.append(i)
        held += lengths[i]
    if group:
        yield group


def _score_group(
    model: Decoder,
    given: Sequence[tuple[list[int], int]],
    kv_dtype: torch.dtype,
    adapter: str | None,
) -> list[Score]:
    run = [ids[:-1] for ids, _ in given]  # nothing comes after the last token
    needed = [-(-len(ids) // DEFAULT_BLOCK_SIZE) for ids in run]
    ends = list(accumulate(needed))
    tables = [list(range(end - n, end)) for end, n in zip(ends, needed, strict=True)]
    pool = KVPool(model.config, ends[-1], dtype=kv_dtype)
    logprobs: list[list[Tensor]] = [[] for _ in given]
    greedy: list[list[Tensor]] = [[] for _ in given]
    for pieces in _steps([len(ids) for ids in run]):
        batch = StepBatch.of(
            [SequenceStep(run[i][a:b], a, tables[i], 0, adapter) for i, a, b in pieces],
            DEFAULT_BLOCK_SIZE,
        )
        rows: list[int] = []
        targets: list[int] = []
        owners: list[tuple[int, int]] = []
        begin = 0
        for i, a, b in pieces:
            ids, first = given[i]
            wanted = range(max(a, first - 1), b)
            rows += [begin + p - a for p in wanted]
            targets += [ids[p + 1] for p in wanted]
            owners.append((i, len(wanted)))
            begin += b - a
        # the batch's own order of rows is by rounds, which is for drafts
        states = model.step_states(replace(batch, logit_rows=torch.tensor(rows)), pool)
        values, best = _of_states(model, states, torch.tensor(targets))
        sizes = [count for _, count in owners]
        for (i, _), v, g in zip(owners, values.split(sizes), best.split(sizes), strict=True):
            logprobs[i].append(v)
            greedy[i].append(g)
    return [Score(torch.cat(v), torch.cat(g)) for v, g in zip(logprobs, greedy, strict=True)]


def _steps(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of at most _TOKENS tokens: (sequence, begin, end) of the pieces of each."""
    step: list[tuple[int, int, int]] = []
    room = _TOKENS
    for i, length in enumerate(lengths):
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
