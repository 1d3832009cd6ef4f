"""Admission: from the arguments of a caller to checked requests, in the caller's thread.

Everything that can be wrong with a request is found here, so that a step never meets it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from bitnet_ops.generate.causal_model import CausalModel, check_adapter
from bitnet_ops.generate.constraint import Constraint
from bitnet_ops.generate.draft_choice import Speculation, check_draft_head
from bitnet_ops.generate.prompt import (
    PromptError,
    PromptRows,
    check_prompt,
    kind_of,
    split_prompt,
    token_ids,
)
from bitnet_ops.generate.request import Limits, Request
from bitnet_ops.generate.sampling import SamplingParams


def make_request(
    model: CausalModel,
    id: int,
    prompt: Sequence[int | PromptRows],
    params: SamplingParams | None,
    limits: Limits | None,
    *,
    adapter: str | None,
    max_drafts: Speculation,
    constraint: Constraint | None,
    keep_prefix: bool = True,
) -> Request:
    """A request that `model` can run. Raises what `Engine.add` raises."""
    if constraint is not None and not (
        callable(getattr(constraint, "mask", None)) and callable(getattr(constraint, "add", None))
    ):
        raise TypeError(
            f"engine: expected constraint with mask() and add(token), got {kind_of(constraint)}"
        )
    config = model.config
    given, runs = split_prompt(prompt, config.hidden_size)
    ids = token_ids(given, "engine")
    check_prompt(ids, config.vocab_size, config.max_position_embeddings)
    check_adapter(model, adapter)
    check_draft_head(max_drafts, model, "engine: expected max_drafts")
    request = Request(
        id,
        ids,
        params,
        limits,
        adapter=adapter,
        max_drafts=max_drafts,
        constraint=constraint,
        keep_prefix=keep_prefix,
        runs=runs,
    )
    request.sampler.params.check_vocabulary(config.vocab_size)
    return request


def check_prompts(prompts: object) -> None:
    """Raise TypeError unless `prompts` is a list of prompts, PromptError where it is empty."""
    if (
        not isinstance(prompts, Sized)
        or isinstance(prompts, str | bytes)
        or getattr(prompts, "ndim", 1) == 0
    ):
        raise TypeError(f"engine: expected prompts as lists of token ids, got {kind_of(prompts)}")
    if not len(prompts):
        raise PromptError("engine: expected at least one prompt, got none")


def params_of_prompts(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """One for each of `count` prompts: shared, or its own."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"engine: expected params as SamplingParams, got {kind_of(params)}")
    if len(params) != count:
        raise ValueError(f"engine: expected params for {count} prompts, got {len(params)}")
    return list(params)


def constraints_of_prompts(
    constraints: Sequence[Constraint] | None, count: int
) -> Sequence[Constraint | None]:
    """One for each of `count` prompts: none, or its own, for a constraint holds a state."""
    if constraints is None:
        return [None] * count
    if not isinstance(constraints, list | tuple) or len(constraints) != count:
        raise TypeError(
            f"engine: expected constraints as a list, one a prompt, got {kind_of(constraints)}"
        )
    return constraints
