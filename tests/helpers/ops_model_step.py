"""Specs of programs: bind_program, release_program, and a whole step of a model over pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bounds import U, rms_norm_error, storing_error, sum_error
from op_changes import F32, add_dim, to
from op_schema import bound, named, positional
from op_spec import Call, Named, Rejections, reference, spec
from op_values import (
    ACTIVATIONS,
    FORMATS,
    HEAD_FORMATS,
    KV_DTYPES,
    Arguments,
    Built,
    dtype_name,
    strided,
)
from ops_attention import OF_KV_TYPES, cache_memory
from ops_delta import random_states
from ops_paged import batch_of, paged
from programs import DELTA, PROJECTIONS, Step, delta_sizes, interpret, of, program


def model_step_arguments(
    g: torch.Generator,
    *,
    new: tuple[int, ...] = (1, 3, 2),
    lengths: tuple[int, ...] = (7, 3, 12),
    block_size: int = 4,
    logit_rows: tuple[int, ...] | None = (0, 3, 5),
    layers: int = 1,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 70,
    cache_dtype: torch.dtype = torch.float32,
    adapters: tuple[int, ...] = (),
    **sizes: Any,
) -> Arguments:
    """logit_rows None: every token. adapters: of each sequence; empty: no LoRA at all."""
    sample = program(g, layers=layers, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden,
                     adapters=bool(adapters), **sizes)  # fmt: skip
    table, blocks = paged(g, list(lengths), block_size)
    deltas = len(sizes.get("delta_layers", ()))
    states = _states(g, len(new), deltas) if deltas else []
    shape = (layers - deltas, blocks, block_size, kv_heads, head_dim)
    keys, key_scale = cache_memory(g, shape, cache_dtype)
    values, value_scale = cache_memory(g, shape, cache_dtype, 0.5)
    rows = range(sum(new)) if logit_rows is None else logit_rows
    return positional(
        "model_step",
        x=torch.randn(sum(new), hidden, generator=g),
        program=sample.bind(),
        caches=[keys, values, *key_scale, *value_scale, *states],
        **batch_of(list(new), list(lengths), table, block_size),
        logit_rows=torch.tensor(list(rows), dtype=torch.int64),
        out_features=sample.out_features,
        **({"adapters": torch.tensor(adapters)} if adapters else {}),
        **({"state_steps": _state_steps(g, new, lengths)} if deltas else {}),
    )


MAX_DRAFTS = 3


def _states(g: torch.Generator, sequences: int, layers: int) -> list[Tensor]:
    d, (_, channels) = DELTA, delta_sizes()
    sizes = d["value_heads"], d["key_dim"], d["value_dim"], d["kernel"]
    return random_states(g, sequences + 2, layers, *sizes, channels, drafts=MAX_DRAFTS)


def _state_steps(g: torch.Generator, new: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """Slots in any order; a sequence that goes on follows two drafts, the last token is one."""
    slots = torch.randperm(len(new) + 2, generator=g).tolist()
    rows = zip(slots, new, lengths, strict=False)
    steps = [[slot, 2 * (n > k), min(k, 1)] for slot, k, n in rows]
    return torch.tensor(steps, dtype=torch.int64).view(-1, 3)


def caches_by_name(a: Any) -> dict[str, Tensor]:
    """The caches of model_step, which have places, by the names of run_program."""
    kept = ("recurrent", "inputs", "kept") if of(a.program).lines_of("delta_net") else ()
    pools = ("key", "value", "key_scale", "value_scale")[: len(a.caches) - len(kept)]
    return dict(zip((*pools, *kept), a.caches, strict=True))


def step_by_name(a: Any) -> dict[str, Tensor]:
    given = ((name, getattr(a, name)) for name in STEP)
    return {name: tensor for name, tensor in given if tensor is not None}


STEP = (
    *("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table", "logit_rows"),
    *("adapters", "state_steps", "draws"),
)


def model_step(o: Any, a: Any) -> Tensor:
    step = Step(a.x, a.program, caches_by_name(a), step_by_name(a), a.layout)
    return interpret(o, step)


def run_program(o: Any, a: Any) -> Tensor:
    caches = dict(zip(a.cache_names.split("\n"), a.caches, strict=True))
    step = dict(zip(a.step_names.split("\n"), a.step, strict=True))
    return interpret(o, Step(a.x, a.program, caches, step, a.layout))


def requested(args: Arguments) -> Arguments:
    """What run_program takes in the place of arguments of model_step."""
    a = bound("model_step", args, {})
    caches, step = caches_by_name(a), step_by_name(a)
    return positional(
        "run_program",
        x=a.x,
        program=a.program,
        cache_names="\n".join(caches),
        caches=[*caches.values()],
        step_names="\n".join(step),
        step=[*step.values()],
        out_features=a.out_features,
        layout=a.layout,
        largest=a.largest,
    )


def model_step_bound(args: Arguments, expected: Tensor) -> Tensor:
    """Only scales of the int8 codes, which are the reference's, carry errors on.

    The largest element of x * gain, which sets the scale, is within a factor 3 of the largest of x
    (gains are 0.5 to 1.5), and squared ReLU triples an error: what a sublayer adds is off by at
    most 9 times its input's error, and the sum by 10 times, two sublayers a layer. Where the caches
    are compared, their values came through one layer less.
    """
    a = bound("model_step", args, {})
    return _bound(a.x, a.program, a.caches, int(a.seq_lens.max()) if len(a.seq_lens) else 0,
                  expected)  # fmt: skip


def run_program_bound(args: Arguments, expected: Tensor) -> Tensor:
    a = bound("run_program", args, {})
    lengths = a.step[a.step_names.split("\n").index("seq_lens")]
    return _bound(a.x, a.program, a.caches, int(lengths.max()), expected)


def _bound(
    x: Tensor, handle: Tensor, caches: list[Tensor], length: int, expected: Tensor
) -> Tensor:
    sample, hidden = of(handle), x.shape[-1]
    head, head_scale = sample.tensors.get("embed.weight"), sample.tensors.get("embed.scale")
    widths = [int(line["width"]) for line in sample.lines_of("mlp")]
    steps = 4 * rms_norm_error(hidden + max(widths, default=0)) + 2 * sum_error(length) + 40 * U
    deltas = len(sample.lines_of("delta_net"))
    relative = steps * 10.0 ** (2 * (caches[0].shape[0] + deltas))
    if deltas and any(expected.shape == state.shape for state in caches[-3:]):
        # of inputs of the convolution, and of keys of length 1; a state sums up some tokens
        return 4 * relative * expected.double().abs().max().expand(expected.shape)
    if expected.dim() == 5:  # a cache; a rotation mixes two elements
        size = expected.double().abs()
        largest = size.amax(dim=-1, keepdim=True) if expected.numel() else size
        return 2 * relative * largest + storing_error(expected.dtype) * size
    if expected.dim() == 4:  # scales of an int8 cache: a row's largest element / 127
        return 2 * (relative + U) * expected.double().abs()
    gains = [t for name, t in sample.tensors.items() if t.dim() == 1 and name.endswith(".weight")]
    norm = max(float(t.abs().max()) for t in gains) * hidden**0.5  # of a normalised row, at most
    if head is None:  # the normalised rows themselves
        return torch.full(expected.shape, relative * norm)
    if head_scale is None:
        return (relative * norm * head.double().norm(dim=-1)).expand(expected.shape)
    # A quantised head: no code is above 127 (8), nor a row's length above that of such codes; its
    # own 16-bit codes of the activations, finer than the error, may differ by one.
    code = 127.0 if head.dtype == torch.int8 else 8.0
    longest = float(head_scale.double().max()) * code * hidden**0.5
    return torch.full(expected.shape, (relative + 2.0**-15) * norm * longest * 2)


def clear_of_ties(build: Callable[[torch.Generator], Arguments]) -> Callable[..., Arguments]:
    """`build`, drawn again until no activation and no cache row lies between two codes.

    There two right computations take different codes, which no bound of rounding allows. So the
    reference must stay within the bound when x moves by more than rounding does.
    """

    def drawn(g: torch.Generator) -> Arguments:
        for _ in range(60):
            state = g.get_state()
            runs: list[Tensor] = []
            caches: list[Tensor] = []
            for step in (0.0, 2e-6, -2e-6, 2e-6):
                args = list(build(g.set_state(state)))
                moves = torch.randn(
                    args[0].shape, generator=torch.Generator().manual_seed(len(runs))
                )
                args[0] = args[0] * (1 + step * moves)
                runs.append(reference.model_step(*args))
                codes = [t.flatten() for t in args[2] if t.dtype == torch.int8]
                caches.append(torch.cat(codes) if codes else torch.empty(0))
            limit = model_step_bound(tuple(args), runs[0])
            same = all(bool(((run - runs[0]).abs() <= limit).all()) for run in runs)
            if same and all(torch.equal(codes, caches[0]) for codes in caches):
                return build(g.set_state(state))
        raise AssertionError("model_step: every draw is near a tie")

    return drawn


EXTRAS: dict[str, Named] = {
    "biases": {"biased": "qkv"},
    "all_biases": {"biased": PROJECTIONS, "dtype": torch.bfloat16},
    "qk_norms": {"qk_norms": True, "activation": "silu", "sub_norms": False},
    "sub_norm_eps": {"sub_norm_eps": 1e-2},
    "row_scales": {"row_scales": ("q", "k", "v", "gate", "up"), "dtype": torch.bfloat16},
    "group_scales": {"group_scales": PROJECTIONS, "hidden": 140, "qk_norms": True},
    "int8_groups": {
        "group_scales": PROJECTIONS, "hidden": 140, "activation_format": "int8_group",
        "weight_format": "2bit",
    },
    "int16_groups": {
        "group_scales": ("q", "k", "v", "o"), "hidden": 140, "activation_format": "int16_group",
        "weight_format": "1.6bit", "dtype": torch.bfloat16,
    },
    "norms_inside": {"linear_norm_eps": 1e-3, "activation": "silu", "sub_norms": False},
    "norms_inside_too": {"linear_norm_eps": 1e-6, "qk_norms": True, "dtype": torch.bfloat16},
    "gemma": {
        "post_norms": True, "qk_norms": True, "linear_norm_eps": 1e-6, "sub_norms": False,
        "activation": "gelu_pytorch_tanh", "local_layers": (0,), "windows": (3, 0),
    },
    "windows": {"windows": (5, 2)},
    "output_gate": {"output_gate": True, "rotary_dim": 6},
    "gate_of_16_bits": {"output_gate": True, "rotary_dim": 4, "qk_norms": True,
        "post_norms": True, "dtype": torch.bfloat16},
    "rotated": {"hidden": 96, "inner": 160, "block": 32, "dtype": torch.bfloat16},
    "rotated_groups": {"hidden": 256, "inner": 256, "heads": 8, "block": 128,
        "group_scales": PROJECTIONS, "activation_format": "int16_group", "weight_format": "2bit"},
    "delta": {"delta_layers": (0,)},
    "delta_last": {"delta_layers": (1,), "dtype": torch.bfloat16, "group_scales": ("qkv", "z"),
        "activation_format": "int8_group", "weight_format": "2bit", "hidden": 140},
    "hybrid": {"delta_layers": (0,), "hidden": 96, "inner": 160, "block": 32, "biased": ("z",),
        "output_gate": True, "rotary_dim": 4, "qk_norms": True, "sub_norms": False,
        "activation": "silu"},
    "everything": {"windows": (0, 4), "post_norms": True, "local_layers": (1,),
        "group_scales": ("q", "k", "v", "down"), "row_scales": ("o",),
        "biased": ("k", "o", "down"), "qk_norms": True, "sub_norm_eps": 1e-3, "hidden": 140,
        "weight_format": "2bit", "dtype": torch.bfloat16,
    },
}  # fmt: skip


def _other_strides(args: Arguments) -> Arguments:
    """Pools with the memory of our own, heads before positions, behind a gap a layer."""
    given = named("model_step", args)

    def view(pool: Tensor) -> Tensor:
        memory = torch.zeros(pool.shape[0], pool.shape[1] + 1, *pool.transpose(2, 3).shape[2:])
        return memory.to(pool.dtype)[:, :-1].transpose(2, 3).copy_(pool)

    return positional("model_step", **{**given, "caches": [view(p) for p in given["caches"]]})


def _model_step_samples() -> Built:
    for dtype in ACTIVATIONS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(dtype)}_over_{dtype_name(cache)}",
                clear_of_ties(
                    lambda g, d=dtype, c=cache: model_step_arguments(g, dtype=d, cache_dtype=c)
                ),
            )
    for form in FORMATS:
        yield form, lambda g, f=form: model_step_arguments(g, layers=2, weight_format=f)
    for form, group in HEAD_FORMATS:
        yield (
            f"head_{form}_{group}",
            lambda g, f=form, n=group: model_step_arguments(g, head=(f, n)),
        )
    yield "head_bfloat16", lambda g: model_step_arguments(g, head=torch.bfloat16)
    for extras in ({}, {"layers": 2, "adapters": (1, 0, -1), "dtype": torch.bfloat16}):
        yield (
            f"states_{len(extras)}",
            lambda g, e=extras: model_step_arguments(g, head=None, **e),
        )
    yield "silu", lambda g: model_step_arguments(g, sub_norms=False, activation="silu")
    yield from (
        (name, lambda g, e=extras: model_step_arguments(g, layers=2, **e))
        for name, extras in EXTRAS.items()
    )
    for dtype in ACTIVATIONS:
        yield (
            f"adapters_{dtype_name(dtype)}",
            lambda g, d=dtype: model_step_arguments(
                g, new=(1, 3, 2, 1, 4), lengths=(7, 3, 12, 2, 4), logit_rows=(0, 3, 5, 6, 8),
                layers=2, adapters=(2, 0, -1, 2, 1), dtype=d, linear_norm_eps=1e-5,
            ),
        )  # fmt: skip
    yield (
        "adapters_behind_norms",
        lambda g: model_step_arguments(g, layers=2, adapters=(1, 1, -1), post_norms=True),
    )
    yield "adapters_of_a_long_chunk", lambda g: model_step_arguments(
        g, new=(70, 1, 40), lengths=(130, 66, 40), block_size=16, logit_rows=(69, 70),
        adapters=(1, 0, 1), inner=300,
    )  # fmt: skip
    yield (
        "adapters_beside_rotations",
        lambda g: model_step_arguments(
            g, layers=2, adapters=(1, 0, -1), delta_layers=(0,), hidden=96, inner=160, block=32
        ),
    )
    yield "delta_long_chunk", lambda g: model_step_arguments(
        g, new=(70, 1, 40), lengths=(130, 66, 40), block_size=16, logit_rows=(69, 70), layers=2,
        delta_layers=(1,),
    )  # fmt: skip
    yield "delta_only", lambda g: model_step_arguments(g, delta_layers=(0,))
    yield "nobody_has_an_adapter", lambda g: model_step_arguments(g, adapters=(-1, -1, -1))
    yield "all_logits", lambda g: model_step_arguments(g, logit_rows=None)
    yield "logits_in_any_order", lambda g: model_step_arguments(g, logit_rows=(5, 0, 1, 3, 2, 4))
    yield "logits_twice", lambda g: model_step_arguments(g, logit_rows=(4, 4))
    yield "no_logits", lambda g: model_step_arguments(g, logit_rows=())
    yield "long_chunk", lambda g: model_step_arguments(
        g, new=(70, 1), lengths=(130, 66), block_size=16, logit_rows=(69, 70)
    )  # fmt: skip
    yield "no_layers", lambda g: model_step_arguments(g, layers=0)
    yield "no_tokens", lambda g: model_step_arguments(g, new=(0,), lengths=(5,), logit_rows=())
    yield "no_sequences", lambda g: model_step_arguments(g, new=(), lengths=(), logit_rows=())
    yield "other_strides", lambda g: _other_strides(model_step_arguments(g, layers=2))
    yield "strided", lambda g: (
        lambda x, *rest: (strided(x), *rest)
    )(*model_step_arguments(g))  # fmt: skip


def _draws(a: Named) -> Tensor:
    return torch.zeros(len(a["logit_rows"]), 2, dtype=torch.float64)


def _caches(*changes: Any) -> Callable[[Named], list[Tensor]]:
    """The caches of a call, each changed; None: left as it is."""
    return lambda a: [
        cache if change is None else change(cache)
        for cache, change in zip(a["caches"], changes, strict=True)
    ]


def _int8(a: Named, *scales: Tensor) -> list[Tensor]:
    return [cache.to(torch.int8) for cache in a["caches"]] + list(scales)


def _scales(a: Named) -> Tensor:
    return torch.ones(a["caches"][0].shape[:-1])


_MODEL_STEP_REJECTIONS: Rejections = [
    ({"x": lambda a: a["x"].double()}, "x", "of dtype float32, got float64"),
    ({"x": add_dim("x")}, "x", "with 2 dimensions"),
    ({"x": lambda a: a["x"][:, :0]}, "x", "of shape [6, 70], got [6, 0]"),
    ({"x": lambda a: a["x"][:5]}, "positions", "of shape [5]"),
    ({"program": lambda a: torch.tensor([-3])}, "program", "a handle that bind_program returned"),
    ({"program": lambda a: torch.tensor([1, 2])}, "program", "of shape [1], got [2]"),
    ({"program": lambda a: torch.ones(1)}, "program", "of dtype int64, got float32"),
    ({"out_features": lambda a: 36}, "out_features", "the program's vocab 37, got 36"),
    ({"caches": lambda a: a["caches"][:1]}, "caches", "a key pool and a value pool"),
    ({"caches": lambda a: []}, "caches", "a key pool and a value pool"),
    ({"caches": _caches(lambda t: t.double(), None)}, "key_pool", OF_KV_TYPES + "float64"),
    ({"caches": _caches(lambda t: t[0], None)}, "key_pool", "with 5 dimensions"),
    ({"caches": lambda a: a["caches"][:1] * 2}, "value_pool", "in its own memory"),
    ({"caches": _caches(None, lambda t: t.bfloat16())}, "value_pool", "of dtype float32"),
    (
        {"caches": _caches(*(2 * [lambda t: t.expand(2, *t.shape[1:]).contiguous()]))},
        "key_pool", "with the program's 1 layers of attention, got 2",
    ),
    (
        {"caches": _caches(*(2 * [lambda t: t[..., :1, :].contiguous()]))},
        "key_pool", "with the program's 2 heads of keys, got 1",
    ),
    (
        {"caches": _caches(*(2 * [lambda t: t[..., :8].contiguous()]))},
        "key_pool", "with the program's 16 features of a head, got 8",
    ),
    ({"positions": to("positions", F32)}, "positions", "of dtype int64 or int32"),
    ({"positions": lambda a: a["positions"] - 9}, "positions", "at least 0, got -3"),
    ({"slot_mapping": lambda a: a["slot_mapping"] * 0}, "slot_mapping", "got 0 twice"),
    ({"slot_mapping": lambda a: a["slot_mapping"] + 32}, "slot_mapping", "in [0, 32)"),
    ({"query_start_loc": lambda a: a["query_start_loc"] + 1}, "query_start_loc", "from 0 to"),
    ({"seq_lens": lambda a: a["seq_lens"] * 100}, "block_table", "with at least"),
    ({"block_table": lambda a: a["block_table"] + 8}, "block_table", "of blocks in [0, 8)"),
    ({"logit_rows": lambda a: torch.tensor([0, 6])}, "logit_rows", "rows in [0, 6), got 6"),
    ({"logit_rows": lambda a: torch.tensor([-1, 3])}, "logit_rows", "rows in [0, 6), got -1"),
    ({"logit_rows": lambda a: torch.tensor([[3]])}, "logit_rows", "with 1 dimension"),
    ({"logit_rows": lambda a: torch.tensor([6]), "largest": lambda a: 1}, "logit_rows",
     "rows in [0, 6), got 6"),
    ({"largest": lambda a: -1}, "largest", "at least 0, got -1"),
    ({"draws": lambda a: torch.zeros(2, 2)}, "draws", "of dtype float64, got float32"),
    ({"draws": lambda a: _draws(a)[:1]}, "draws", "of shape [3, 2], got [1, 2]"),
    ({"draws": lambda a: _draws(a)[:, 0]}, "draws", "of shape [3, 2], got [3]"),
    ({"draws": lambda a: _draws(a) - 1}, "draws", "got -1.000000 and -1.000000 for row 0"),
    ({"draws": lambda a: _draws(a) + 1}, "draws", "uniforms from 0 to below 1, got 1.000000 and 1"),
    ({"draws": lambda a: _draws(a) / 0}, "draws", "of temperatures finite and at least 0"),
    ({"logit_rows": lambda a: torch.zeros(7).long()}, "logit_rows", "at most the 6 tokens of x"),
    ({"layout": lambda a: "tiles"}, "layout", '"rows" or "panels", got "tiles"'),
    ({"adapters": lambda a: torch.tensor([0, 0, 9])}, "adapters", "from -1 (none) to"),
    ({"adapters": lambda a: torch.tensor([0, 0, -2])}, "adapters", "from -1 (none) to"),
    ({"adapters": lambda a: torch.zeros(3)}, "adapters", "of dtype int64 or int32"),
    ({"adapters": lambda a: torch.tensor([-1])}, "adapters", "of shape [3], got [1]"),
    (
        {"state_steps": lambda a: torch.zeros(3, 3).long()},
        "state_steps", "to be None, for the program has no states, got some",
    ),
    ({"caches": lambda a: _int8(a)}, "key_scale", "with int8 caches, got none"),
    ({"caches": lambda a: _int8(a, *[_scales(a)] * 2)}, "value_scale", "in its own memory"),
    (
        {"caches": lambda a: _int8(a, _scales(a), _scales(a)[:, 1:])},
        "value_scale", "of shape [1, 8, 4, 2]",
    ),
]  # fmt: skip


def _of_states(change: Callable[[list[Tensor]], list[Tensor]]) -> dict[str, Any]:
    return {"caches": lambda a: [*a["caches"][:2], *change(a["caches"][2:])]}


def _state_step(sequence: int, column: int, number: int) -> dict[str, Any]:
    def changed(a: Named) -> Tensor:
        steps: Tensor = a["state_steps"].clone()
        steps[sequence, column] = number
        return steps

    return {"state_steps": changed}


# Beside these, those of delta_net: the same checks.
_STATES_REJECTIONS: Rejections = [
    *(row for row in _MODEL_STEP_REJECTIONS if not {"caches", "state_steps"} & {*row[0]}),
    ({"state_steps": lambda a: None}, "state_steps", "of a program with states, got None"),
    ({"state_steps": lambda a: a["state_steps"].int()}, "state_steps", "of dtype int64, got int32"),
    ({"state_steps": lambda a: a["state_steps"][:2]}, "state_steps", "of shape [3, 3], got [2, 3]"),
    (_state_step(0, 0, 5), "state_steps", "slots in [0, 5), got 5 for sequence 0"),
    (_state_step(1, 1, 1), "state_steps", "replays from 0 to 0, got 1 for sequence 1"),
    (_state_step(1, 2, 4), "state_steps", "drafts from 0 to 3, got 4 for sequence 1"),
    (_state_step(0, 2, 2), "state_steps", "drafts from 0 to 1, got 2 for sequence 0"),
    (_of_states(lambda s: []), "caches", "a program's states three tensors more, got 2 tensors"),
    (_of_states(lambda s: s[:2]), "caches", "three tensors more, got 4 tensors"),
    (_of_states(lambda s: [s[0][:, :0], *s[1:]]), "recurrent", "of shape [5, 1, 2, 1"),
    (_of_states(lambda s: [s[0].double(), *s[1:]]), "recurrent", "of dtype float32"),
    (_of_states(lambda s: [s[0], strided(s[1]), s[2]]), "inputs", "contiguous"),
    (_of_states(lambda s: [*s[:2], s[2][:4]]), "kept", "of shape [5, 1, 3, 2, 1, 80]"),
    (
        _of_states(lambda s: [s[0], s[0].view(-1)[: s[1].numel()].view(s[1].shape), s[2]]),
        "inputs", "in its own memory",
    ),
]  # fmt: skip


def _step_call(g: torch.Generator, **sizes: Any) -> Named:
    return named("model_step", model_step_arguments(g, **sizes))


spec(
    model_step,
    composed=True,
    samples=_model_step_samples,
    large=[
        lambda g: model_step_arguments(
            g,
            new=(1, 40, 1),
            lengths=(300, 40, 1),
            block_size=64,
            layers=2,
            hidden=301,
            heads=6,
            kv_heads=2,
            head_dim=40,
            inner=517,
            vocab=1021,
            logit_rows=(0, 40, 41),
        ),
        lambda g: model_step_arguments(
            g,
            new=(2, 1, 3),
            lengths=(70, 200, 3),
            block_size=16,
            layers=2,
            hidden=301,
            heads=6,
            kv_heads=2,
            head_dim=40,
            inner=517,
            vocab=1021,
            dtype=torch.bfloat16,
            cache_dtype=torch.bfloat16,
        ),
    ],
    calls={
        "": Call(_step_call, _MODEL_STEP_REJECTIONS),
        "adapters": Call(
            lambda g, **s: _step_call(g, adapters=(0, -1, 2), **s), _MODEL_STEP_REJECTIONS
        ),
        "states": Call(
            lambda g, **s: _step_call(g, layers=2, delta_layers=(0,), **s), _STATES_REJECTIONS
        ),
    },
    bound=model_step_bound,
    mutates=frozenset({"caches"}),
    overlapping=lambda g, dtype: model_step_arguments(
        g, cache_dtype=dtype, head=("int8", 128), adapters=(0, 1, -1), layers=2, delta_layers=(1,)
    ),
    huge={"int4": lambda g: _step_call(g, head=("int4", 64))},
)


# run_program: the same checks of the same tensors, beside those of names.


def _step_call_by_name(g: torch.Generator, **sizes: Any) -> Named:
    return named("run_program", requested(model_step_arguments(g, **sizes)))


def _replaced(argument: str, name: str, other: str | None) -> dict[str, Any]:
    """A tensor of `caches` or `step` under another name, or left out."""
    names = f"{argument.removesuffix('s')}_names"

    def kept(a: Named) -> list[tuple[str, Tensor]]:
        rows = zip(a[names].split("\n"), a[argument], strict=False)
        return [(other or n if n == name else n, t) for n, t in rows if other or n != name]

    return {
        argument: lambda a: [tensor for _, tensor in kept(a)],
        names: lambda a: "\n".join(
            n if n != name else str(other) for n in a[names].split("\n") if other or n != name
        ),
    }


def _of_step(name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    def changed(a: Named) -> list[Tensor]:
        rows = zip(a["step_names"].split("\n"), a["step"], strict=True)
        return [change(tensor) if n == name else tensor for n, tensor in rows]

    return {"step": changed}


_RUN_REJECTIONS: Rejections = [
    *(row for row in _MODEL_STEP_REJECTIONS if row[0].keys() <= {"x", "program", "out_features",
                                                                 "layout", "largest"}),
    (_replaced("caches", "key", None), "caches", "with a tensor named key, got none"),
    (_replaced("caches", "value", "key"), "caches", "all different, got key twice"),
    (_replaced("caches", "value", "values"), "caches", "with a tensor named value, got none"),
    ({"cache_names": lambda a: a["cache_names"] + "\nmore"}, "caches", "tensors, got"),
    ({"caches": lambda a: a["caches"][:1]}, "caches", "with a name for each of its 1 tensors"),
    ({"caches": lambda a: [a["caches"][0].double(), *a["caches"][1:]]}, "key_pool", OF_KV_TYPES),
    (
        {"caches": lambda a: [*a["caches"], a["caches"][0]],
         "cache_names": lambda a: a["cache_names"] + "\nnobody"},
        "caches", "names that the program and the op know, got nobody",
    ),
    (_replaced("step", "positions", None), "step", "with a tensor named positions, got none"),
    (_replaced("step", "positions", "position"), "step", "with a tensor named positions, got none"),
    ({"step_names": lambda a: ""}, "step", "tensors, got 0 names"),
    (
        {"step": lambda a: [*a["step"], a["step"][0]],
         "step_names": lambda a: a["step_names"] + "\nfuture"},
        "step", "names that the program and the op know, got future",
    ),
    (_of_step("positions", lambda t: t - 9), "positions", "at least 0, got -3"),
    (_of_step("logit_rows", lambda t: t + 9), "logit_rows", "rows in [0, 6), got 9"),
    (_of_step("block_table", lambda t: t + 8), "block_table", "of blocks in [0, 8)"),
]  # fmt: skip

spec(
    run_program,
    composed=True,
    samples=lambda: (
        (name, lambda g, e=extras: requested(model_step_arguments(g, layers=2, **e)))
        for name, extras in EXTRAS.items()
        if name in ("hybrid", "everything")
    ),
    large=[lambda g: requested(model_step_arguments(g, new=(1, 40, 1), lengths=(300, 40, 1)))],
    calls={
        "": Call(_step_call_by_name, _RUN_REJECTIONS),
        "states": Call(
            lambda g, **s: _step_call_by_name(g, layers=2, delta_layers=(0,), **s),
            [*_RUN_REJECTIONS,
             (_replaced("caches", "kept", None), "caches", "with a tensor named kept, got none"),
             (_replaced("step", "state_steps", None), "state_steps", "of a program with states")],
        ),
    },
    bound=run_program_bound,
    mutates=frozenset({"caches"}),
    overlapping=lambda g, dtype: requested(model_step_arguments(
        g, cache_dtype=dtype, head=("int8", 128), adapters=(0, 1, -1), layers=2, delta_layers=(1,)
    )),
)  # fmt: skip


# bind_program, release_program ----------------------------------------------------------------


def bind_program(program: str, names: str, tensors: list[Tensor]) -> Tensor:
    raise NotImplementedError("a handle has no reference: model_step's samples show what it means")


def release_program(program: Tensor) -> None:
    raise NotImplementedError("as bind_program")


def _binding(g: torch.Generator, **sizes: Any) -> Arguments:
    sample = program(g, **sizes)
    return sample.text, "\n".join(sample.tensors), list(sample.tensors.values())


def _binding_call(g: torch.Generator) -> Named:
    return named("bind_program", _binding(g, adapters=True, linear_norm_eps=1e-5, biased="q"))


def text_with(old: str, new: str) -> dict[str, Any]:
    def changed(a: Named) -> str:
        assert old in a["program"], old
        return str(a["program"].replace(old, new, 1))

    return {"program": changed}


def without(name: str) -> dict[str, Any]:
    """The tensor of that name left out."""

    def names(a: Named) -> list[str]:
        return str(a["names"]).split("\n")

    return {
        "tensors": lambda a: [
            t for n, t in zip(names(a), a["tensors"], strict=True) if n != name
        ],
        "names": lambda a: "\n".join(n for n in names(a) if n != name),
    }  # fmt: skip


def exchanged(name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        "tensors": lambda a: [
            change(t) if n == name else t
            for n, t in zip(str(a["names"]).split("\n"), a["tensors"], strict=True)
        ]
    }


_BINDING_REJECTIONS: Rejections = [
    ({"names": lambda a: a["names"] + "\nmore"}, "names", "as many as tensors"),
    ({"names": lambda a: a["names"].replace("L0.k.weight", "L0.q.weight", 1)}, "names", "twice"),
    (without("L0.q.weight"), "tensors", "with one named L0.q.weight, as the program says, got"),
    (without("L0.q.weight_scale"), "tensors", "with one named L0.q.weight_scale"),
    (without("final.weight"), "tensors", "with one named final.weight"),
    (exchanged("L0.q.weight", lambda t: t.float()), "L0.q.weight", "of dtype uint8, got float32"),
    (exchanged("L0.q.weight", lambda t: t[1:]), "L0.q.weight", "with 64 rows, got 63"),
    (exchanged("L0.q.weight", lambda t: t[:, :8]), "L0.q.weight", "contiguous"),
    (exchanged("L0.q.weight_scale", lambda t: t.double()), "L0.q.weight_scale", "of dtype float3"),
    (exchanged("L0.q.weight_scale", lambda t: t.repeat(3)), "L0.q.weight_scale", "row (64), got 3"),
    (exchanged("L0.q.bias", lambda t: t[1:]), "L0.q.bias", "of shape [64], got [63]"),
    (exchanged("L0.q.rms_norm.weight", lambda t: t[1:]), "L0.q.rms_norm.weight", "[70], got [69]"),
    (exchanged("L0.in.weight", lambda t: t.bfloat16()), "L0.in.weight", "of dtype float32"),
    (exchanged("L0.in.weight", lambda t: strided(t)), "L0.in.weight", "contiguous"),
    (exchanged("embed.weight", lambda t: t[1:]), "vocab", "the 36 rows of embed.weight, got 37"),
    (exchanged("embed.weight", lambda t: t.double()), "embed.weight", "float32"),
    (exchanged("rope.far", lambda t: t[1:]), "rope.far", "of shape [8], got [7]"),
    (text_with("hidden=70", "hidden=71"), "L0.in.weight", "of shape [71], got [70]"),
    (text_with("width=150", "width=149"), "L0.gate.weight", "with 149 rows, got 150"),
    (text_with("heads=4", "heads=3"), "key heads of line 3 (attention)", "of kv_heads=2, got 3"),
    *(
        (text_with("factor=", f"sections={wrong} factor="), "key sections of line 2", wrong)
        for wrong in ("3,3", "3,3,3", "4,4,0", "3,3,2,", "3,,2", "3;3,2", "-1,5,4")
    ),
    (text_with("activation=relu2", "activation=gelu"), "key activation of line 4", "got gelu"),
]  # fmt: skip


spec(
    bind_program,
    samples=lambda: iter([("plain", _binding), ("adapters", lambda g: _binding(g, adapters=True))]),
    large=[],
    calls={"": Call(_binding_call, _BINDING_REJECTIONS)},
    comparable=False,
)


spec(
    release_program,
    samples=lambda: iter([("plain", lambda g: (torch.tensor([1 << 40]),))]),
    large=[],
    calls={
        "": Call(
            lambda g: {"program": torch.tensor([1 << 40])},
            [
                ({"program": lambda a: torch.ones(1)}, "program", "of dtype int64, got float32"),
                ({"program": lambda a: torch.tensor([1, 2])}, "program", "of shape [1], got [2]"),
            ],
        )
    },
    comparable=False,
)
