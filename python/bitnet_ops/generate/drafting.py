"""HeadDrafter: drafts of a model's MTP head for requests that decode.

The pairs that a head reads lie in the model's own cache (blocks/draft.py), so a request may begin
anywhere: behind a prefix hit, a fork, a restart. A draft is drawn as its request will draw the
token, with the same noise, filters, biases and penalties, so it is right whenever the head's
distribution leads to the same token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.generate.causal_model import CausalModel
from bitnet_ops.generate.head_policy import GoingOn, going_on
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.sampling import draw_ahead
from bitnet_ops.models.decoder import Decoder
from bitnet_ops.models.draft import DraftPool, keeps_drafts, kept_states
from bitnet_ops.models.draft_words import DraftWords
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.kv_pool import KVPool


def drafter_of(model: CausalModel, pool: KVPool) -> HeadDrafter | None:
    """What drafts for a model over its pool; None where it has no head."""
    if not isinstance(model, Decoder) or model.mtp is None or not keeps_drafts(pool):
        return None
    return HeadDrafter(model, pool)


class HeadDrafter:
    """Drafts for some requests at once, one token of each in a step of the head's program.

    Args:
        model: a decoder with a head.
        pool: whose states it keeps.
        words: the tokens that it may draft; None: as many as make a draft cheap.
    """

    def __init__(self, model: Decoder, pool: KVPool, words: DraftWords | None = None) -> None:
        assert model.mtp is not None
        self._model, self._head, self._pool = model, model.mtp, pool
        ends = model.config.eos_token_ids
        self.words = DraftWords(model.head, always=ends) if words is None else words
        self._draft_pool = DraftPool(pool)
        # how many tokens of a request the words have seen
        self._seen: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Request], depths: Sequence[int], judges: Sequence[GoingOn]
    ) -> tuple[list[list[int]], int]:
        """At most so many ids for each request, whose blocks have room for them.

        Each is at its newest token, of which the model's step comes next. judges: of each request,
        whether a draft is worth it. Returns these and how many steps of the head they took.
        """
        self._learn(requests)
        found: list[list[int]] = [[] for _ in requests]
        states = kept_states(self._pool, [r.slot for r in requests], [r.replays for r in requests])
        rows = list(range(len(requests)))
        for depth in range(max(depths, default=0)):
            kept = [
                row for row, i in enumerate(rows) if depths[i] > depth and len(found[i]) == depth
            ]
            if depth and kept:
                kept = [kept[k] for k in going_on([judges[rows[row]] for row in kept])]
            if not kept:
                return found, depth
            rows = [rows[row] for row in kept]
            states = states if len(kept) == len(states) else states[kept]
            batch = StepBatch.of(
                [_step(requests[i], found[i], row) for row, i in enumerate(rows)],
                self._pool.block_size,
            )
            y = self._model.draft_rows(batch, self._draft_pool.of(states))
            normed = ops.rms_norm(y, self._head.norm.weight, self._model.config.rms_norm_eps)
            states = normed if self._head.draft.feed == "after" else y
            logits = self.words.head(normed)
            tokens, sure = self._choose([requests[i] for i in rows], depth, logits)
            for i, token, logprob in zip(rows, tokens, sure, strict=True):
                if token >= 0 and judges[i].takes(math.exp(logprob)):
                    found[i].append(token)
        return found, max(depths, default=0)

    def _learn(self, requests: Sequence[Request]) -> None:
        """Tokens of prompts and answers may be drafted from now on."""
        new: list[int] = []
        for request in requests:
            new += request.ids[self._seen.get(request, 0) :]
            self._seen[request] = len(request.ids)
        self.words.learn(new)

    def _choose(
        self, requests: Sequence[Request], depth: int, logits: Tensor
    ) -> tuple[list[int], list[float]]:
        """The next token of each request by logits f32 [n, words] of the head; -1: none.

        Also the logarithm of the probability that the head's most probable word has.
        """
        samplers = [request.sampler for request in requests]
        _, top, logprobs = ops.top_logprobs(logits, _no_tokens(len(logits)), 1)
        sure: list[float] = logprobs[:, 0].tolist()
        if all(s.params.greedy and not s.edits and s.constraint is None for s in samplers):
            ids = self.words.ids.numpy()
            found = [-1 if i < 0 else int(ids[i]) for i in top[:, 0].tolist()]
            return found, sure
        if len(self.words.ids) < self._model.config.vocab_size:
            logits = self._spread(logits)
        return draw_ahead(samplers, depth, logits), sure

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits f32 [n, words] as those of all tokens, -inf for the others."""
        vocab = self._model.config.vocab_size
        whole = logits.new_full((len(logits), vocab), -torch.inf)
        whole[:, self.words.ids] = logits
        return whole


@lru_cache(64)
def _no_tokens(rows: int) -> Tensor:
    return torch.full((rows,), -1)


def _step(request: Request, drafts: Sequence[int], row: int) -> SequenceStep:
    """The newest token of a request, or of its drafts, as a step of the head."""
    at = len(request.ids) - 1 + len(drafts)
    token = drafts[-1] if drafts else request.ids[-1]
    step = SequenceStep([token], at, request.blocks, 1, None, (row, 0, 0))
    if (runs := request.runs) is None:
        return step
    return step._replace(shift=runs.shift(at), axes=runs.positions(at, at + 1))
