"""The ops on logits that choose tokens. It must not know generators, requests or texts."""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet_ops.ops._operator import operator

__all__ = [
    "sample_tokens",
    "token_probabilities",
    "top_logprobs",
]


@operator
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    edit_starts: Tensor | None = None,
    edit_ids: Tensor | None = None,
    edits: Tensor | None = None,
) -> Tensor:
    """Choose a token for every row of logits.

    Edits come first: `y = x + bias; y = y / repetition if y > 0 else y * repetition; y -
    subtracted`. At temperature 0 the largest logit wins, of equals the lowest id.

    A row with a temperature and no filter (top_k 0 or at least V, top_p 1, min_p 0) gives the token
    with the largest `fma(T, g[id], logit)` in float32, of equals the lowest id: by Gumbel noise g
    each has the probability `softmax(logits / temperature)`. T is the temperature as float32,
    between 2^-100 and 2^96. g is `-log(-log(u))` within 3e-6, u in (0, 1) from a hash of id and
    uniform alone: key = mix(floor(uniform * 2^53)), SplitMix64's output of that state;
    h = id ^ low half of key; h ^= h >> 17; h *= 0xed5ad4bb; h ^= h >> 11; h += high half of key;
    h *= 0xac4c1b51; h ^= h >> 15; h *= 0x31848bab; h ^= h >> 14. As a signed number, h >= 0 gives
    u = 1 - (h + 1/2) / 2^32 and h < 0 gives u = (-1 - h + 1/2) / 2^32.

    Other rows take `p = softmax(logits / temperature)` over the top_k largest (of equals the lower
    ids); the fewest most probable stay whose sum reaches top_p (of equals the lower ids); of those
    the ones with `p >= min_p * max(p)`. The draw falls at uniform times their sum: on the first
    token with which the sum exceeds that, going by ids, or with top_k from the most probable down.
    p is float32 (exp within 1 ulp, exponents of -87 and less give 0), its sums are float64. No row
    is sorted.

    Args:
        logits: float32 [R, V]; -inf excludes a token.
        temperature: float64 [R], at least 0.
        top_k: int64 [R], at least 0; 0 or at least V keeps all.
        top_p: float64 [R], above 0 and at most 1; 1 keeps all.
        min_p: float64 [R], from 0 to 1; 0 keeps all.
        uniforms: float64 [R], in [0, 1); not used at temperature 0.
        edit_starts: int64 [R + 1]: row r has the edits edit_starts[r] .. edit_starts[r + 1].
        edit_ids: int64 [E], the tokens they are made to, each once in a row.
        edits: float32 [E, 3]: bias, repetition (above 0; 1 does nothing), subtracted.
    Returns:
        int64 [R]; -1 for a row with a NaN or whose largest logit is infinite.
    Raises:
        RuntimeError: a wrong dtype or shape, a value out of its range, some of the three arguments
            about edits without the others.
    Source: transformers' logits processors, in their order; min-p: arXiv 2407.01082; repetition:
        arXiv 1909.05858; subtracted: OpenAI's frequency and presence penalties; noise:
        Maddison et al., arXiv 1411.0030; its hash: Wellons' triple32.
    """
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


@operator
def token_probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    edit_starts: Tensor | None = None,
    edit_ids: Tensor | None = None,
    edits: Tensor | None = None,
) -> Tensor:
    """The distributions that `sample_tokens` draws from: 0 for what the filters take out.

    Args:
        logits, temperature, top_k, top_p, min_p, edit_starts, edit_ids, edits: as for
            `sample_tokens`.
    Returns:
        float32 [R, V], each row with sum 1; one 1 at temperature 0; NaN where sample_tokens gives
        -1.
    Raises:
        RuntimeError: as `sample_tokens`.
    Source: as `sample_tokens`.
    """
    return logits.new_empty(logits.shape)


@operator
def top_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of probabilities: of one token a row, and of the most probable ones.

    `log softmax(logits)`: of what the model says, before edits, temperature and filters.

    Args:
        logits: float32 [R, V].
        tokens: int64 [R], from 0 to V - 1, or -1 for none.
        top: how many of the most probable tokens, from 0 to V; of equals the lower ids.
    Returns:
        (logprobs, top_ids, top_logprobs): float32 [R], int64 [R, top] and float32 [R, top], the
        most probable first. NaN and ids of -1 for a row with a NaN or whose largest logit is
        infinite; NaN for a token of -1.
    Raises:
        RuntimeError: a wrong dtype or shape, a token or a top out of range.
    Source: torch.nn.functional.log_softmax; logprobs as in OpenAI's API.
    """
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,)),
        logits.new_empty((rows, top), dtype=torch.int64),
        logits.new_empty((rows, top)),
    )
