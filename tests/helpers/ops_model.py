"""Spec of a whole step of a model, composed of the other ops: those of `o`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime
from bitnet_ops.nn.storage import LAYOUTS
from bounds import U, rms_norm_error, storing_error, sum_error
from op_schema import bound, named, positional
from op_spec import Call, Named, reference, spec
from op_values import (
    ACTIVATIONS,
    FORMATS,
    HEAD_FORMATS,
    KV_DTYPES,
    Arguments,
    Built,
    activations,
    dtype_name,
    frequencies,
    gain,
    positive,
    quantized_head,
    random_packed,
    strided,
)
from ops_attention import (
    attention_by,
    attention_over_bfloat16,
    cache_memory,
    kv_cache_update_by,
)
from ops_lora import LORA_REJECTIONS, lora_arguments, lora_factors, with_side_paths
from ops_packing import repacked
from ops_step_rejections import DECODE_STEP_REJECTIONS

GATED: dict[str, Callable[[Any], Any]] = {
    "silu": lambda o: o.silu_and_mul,
    "gelu_pytorch_tanh": lambda o: o.gelu_tanh_and_mul,
}


def decode_step(o: Any, a: Any) -> Tensor:
    """float32 [B, T, K] through every layer and the head -> float32 [B, T, vocab]."""
    x, tokens, hidden = a.x, a.x.shape[1], a.x.shape[2]
    kv_heads, dim = a.key_cache.shape[2], a.key_cache.shape[4]
    query_rows, kv_rows = a.num_heads * dim, kv_heads * dim
    rows = [query_rows, kv_rows, kv_rows, hidden, a.intermediate_size, a.intermediate_size, hidden]
    features = [hidden, hidden, hidden, query_rows, hidden, hidden, a.intermediate_size]
    inner = features if a.linear_norm_eps is not None else []
    width = a.intermediate_size
    if a.dropped_neurons is not None:
        width += a.dropped_neurons.shape[1]
        inner = [*inner[:6], width] if inner else []
    # columns of scales of groups stay where they are, or they would change groups
    whole_down = 6 in a.grouped and a.dropped_neurons is not None
    features[6] = width if whole_down else features[6]
    norm_sizes = [
        hidden, *inner[:3], *([dim, dim] if a.qk_norms else []),
        *([query_rows] if a.sub_norms else []), *inner[3:4],
        hidden, *inner[4:6], *([width] if a.sub_norms else []), *inner[6:],
    ]  # fmt: skip
    if a.post_norms:
        after_o = 1 + len(inner[:4]) + (2 if a.qk_norms else 0) + (1 if a.sub_norms else 0)
        norm_sizes = [*norm_sizes[:after_o], hidden, *norm_sizes[after_o:], hidden]
    *norms, last = a.norm_weights.split([*norm_sizes * len(a.scales), hidden])
    places = a.start_positions[:, None] + torch.arange(tokens)
    wide_rope = places, a.inv_freq, a.attention_factor
    sub_eps = a.eps if a.sub_norm_eps is None else a.sub_norm_eps
    for layer, scales in enumerate(a.scales):
        weights = a.weights[7 * layer : 7 * layer + 7]
        rope = wide_rope
        if layer in a.local_layers:
            rope = places, a.local_inv_freq, 1.0
        kept = torch.arange(width)
        if a.dropped_neurons is not None:
            kept = kept[~torch.isin(kept, a.dropped_neurons[layer])]
        scales = scales.split([*a.scale_sizes] or 1)
        own = iter(norms[len(norm_sizes) * layer : len(norm_sizes) * (layer + 1)])
        before, inside = next(own), [next(own) for _ in inner[:3]]
        heads = [next(own), next(own)] if a.qk_norms else None
        sub = next(own) if a.sub_norms else None
        inside += [next(own) for _ in inner[3:4]]
        post_o = next(own) if a.post_norms else None
        after = next(own)
        inside += [next(own) for _ in inner[4:6]]
        inner_norm = next(own) if a.sub_norms else None
        inside += [next(own) for _ in inner[6:]]
        post_down = next(own) if a.post_norms else None
        seen = [*features[:6], width]  # by side paths
        sides = lora_factors(a, layer, list(zip(rows, seen, strict=True)))
        biases = dict(zip(a.biased, a.biases[layer].split([rows[i] for i in a.biased]),
                          strict=True)) if a.biased else {}  # fmt: skip

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros(*x.shape[:-1], width).index_copy(-1, kept, x)  # noqa: B023

        def normed(x: Tensor, gain: Tensor, eps: float, is_inner: bool = True) -> Tensor:
            if not is_inner or a.dropped_neurons is None:
                return o.rms_norm(x, gain, eps)  # type: ignore[no-any-return]
            y: Tensor = o.rms_norm(spread(x), gain, eps)
            return y[..., kept]  # noqa: B023

        def added(y: Tensor, gain: Tensor | None) -> Tensor:
            return y if gain is None else o.rms_norm(y, gain, a.eps)  # type: ignore[no-any-return]

        def project(i: int, x: Tensor) -> Tensor:
            weight, scale = weights[i], scales[i]  # noqa: B023
            if inside:  # noqa: B023
                x = normed(x, inside[i], a.linear_norm_eps, i == 6)  # noqa: B023
            more = weight, scale, biases.get(i), (rows[i], features[i])  # noqa: B023
            if i == 6 and whole_down:
                x = spread(x)
            if i in a.grouped:
                groups = -(-features[i] // 128)
                form = (rows[i], groups)
                if weight.dim() > 2:
                    form = (len(weight), groups, -1)
                more = weight, scale.view(form), *more[2:], a.activation_format
                y: Tensor = o.linear(x, *more)
            else:
                y = o.linear(x, *more)
            if sides and i == 6 and not whole_down:  # noqa: B023
                x = spread(x)
            return with_side_paths(o, a, sides, i, x, y) if sides else y  # noqa: B023

        plain = not a.scale_sizes and not a.biased and a.sub_norm_eps is None
        plain = plain and not inside and not sides and a.dropped_neurons is None
        if plain:
            qkv = o.qkv_forward(
                x.to(a.dtype), before, *(t for i in range(3) for t in (weights[i], scales[i])),
                a.eps, [size for i in range(3) for size in (rows[i], features[i])],
            )  # fmt: skip
        else:
            h = o.rms_norm(x.to(a.dtype), before, a.eps)
            qkv = [project(i, h) for i in range(3)]
        query, key, value = (t.unflatten(-1, (t.shape[-1] // dim, dim)) for t in qkv)
        if heads is not None:
            query, key = o.rms_norm(query, heads[0], a.eps), o.rms_norm(key, heads[1], a.eps)
        caches = a.key_cache[layer], a.value_cache[layer]
        scales_of_caches = [t if t is None else t[layer] for t in (a.key_scale, a.value_scale)]
        positions = a.start_positions
        kv_cache_update_by(o)(*caches, o.rope(key, *rope), value, positions, *scales_of_caches)
        query = o.rope(query, *rope)
        # whose codes behind it bear no bound: bfloat16's coarse roundings must be the definition's
        coarse = o is reference and caches[0].dtype == torch.bfloat16
        attend = attention_over_bfloat16 if coarse else attention_by(o)
        seen_by = [*scales_of_caches, a.windows[layer] if a.windows else 0]
        mixed = attend(query, *caches, positions, a.scale, *seen_by).flatten(2)
        mixed = mixed if sub is None else o.rms_norm(mixed, sub, sub_eps)
        x = x + added(project(3, mixed), post_o)
        if plain:
            mlp = [t for i in (4, 5) for t in (weights[i], scales[i])]
            mlp += [inner_norm, weights[6], scales[6]]
            sizes = [size for i in (4, 5, 6) for size in (rows[i], features[i])]
            y = o.mlp_forward(x.to(a.dtype), after, *mlp, a.eps, a.activation, sizes)
            x = x + added(y, post_down)
            continue
        h = o.rms_norm(x.to(a.dtype), after, a.eps)
        gate, up = project(4, h), project(5, h)
        both = torch.cat([gate, up], -1)
        z = o.relu2_mul(gate, up) if a.activation == "relu2" else GATED[a.activation](o)(both)
        z = z if inner_norm is None else normed(z, inner_norm, sub_eps)
        x = x + added(project(6, z), post_down)
    last_x = o.rms_norm(x[:, -a.logits_to_keep :], last, a.eps)  # 0 keeps everything
    logits: Tensor = o.lm_head(last_x, a.head_weight, a.head_scale, (a.vocab_size, hidden))
    return logits


def decode_step_arguments(
    g: torch.Generator,
    *,
    layers: int = 1,
    batch: int = 2,
    tokens: int = 1,
    hidden: int = 70,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 150,
    vocab: int = 37,
    length: int = 12,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    head: tuple[str, int] | torch.dtype = torch.float32,
    weight_format: str = "canonical",
    sub_norms: bool = True,
    activation: str = "relu2",
    logits_to_keep: int = 0,
    biased: tuple[int, ...] = (),
    row_scales: tuple[int, ...] = (),
    group_scales: tuple[int, ...] = (),
    qk_norms: bool = False,
    sub_norm_eps: float | None = None,
    linear_norm_eps: float | None = None,
    adapters: Sequence[int] = (),
    activation_format: str | None = None,
    dropped: int = 0,
    post_norms: bool = False,
    local_layers: Sequence[int] = (),
    windows: Sequence[int] = (),
) -> Arguments:
    """row_scales, group_scales: the projections, by place, with one a row, or a row and group.

    adapters: of each sequence; empty: no LoRA at all. dropped: how many neurons of each layer.
    """
    query, kv = heads * head_dim, kv_heads * head_dim
    shapes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    shapes += [(inner, hidden), (inner, hidden)]
    shapes += [(hidden, inner + dropped if 6 in group_scales else inner)]
    gains = 2 * hidden + (2 * head_dim if qk_norms else 0) + (2 * hidden if post_norms else 0)
    gains += query + inner + dropped if sub_norms else 0
    if linear_norm_eps is not None:
        gains += sum(k for _, k in shapes[:6]) + inner + dropped
    gains = layers * gains + hidden
    tiled = LAYOUTS[weight_format]["fields"] * _runtime.tile_lanes()
    block = 1 if weight_format == "canonical" else tiled
    extras: Named = {"qk_norms": qk_norms, "sub_norm_eps": sub_norm_eps}
    if linear_norm_eps is not None:
        extras["linear_norm_eps"] = linear_norm_eps
    if dropped:
        places = [torch.randperm(inner + dropped, generator=g)[:dropped] for _ in range(layers)]
        extras["dropped_neurons"] = torch.stack([p.sort().values for p in places])
    if post_norms:
        extras["post_norms"] = True
    if local_layers:
        extras |= {"local_inv_freq": frequencies(head_dim) / 3, "local_layers": list(local_layers)}
    if windows:
        extras["windows"] = list(windows)
    if adapters:
        seen = [*shapes[:6], (hidden, inner + dropped)]
        extras |= lora_arguments(g, layers, seen, adapters)
    if activation_format is not None:
        extras["activation_format"] = activation_format
    if biased:
        rows = sum(shapes[i][0] for i in biased)
        extras |= {"biases": torch.randn(layers, rows, generator=g) / 8, "biased": list(biased)}
    cache = (layers, batch, kv_heads, length, head_dim)
    weights = [(random_packed(g, n, k), k) for _ in range(layers) for n, k in shapes]
    if weight_format != "canonical":
        weights = [(repacked(w, k, weight_format), k) for w, k in weights]
    if isinstance(head, tuple):
        head_parts: Arguments = quantized_head(g, vocab, hidden, *head)
    else:
        head_parts = (torch.randn(vocab, hidden, generator=g).to(head), None)
    keys, key_scale = cache_memory(g, cache, cache_dtype)
    values, value_scale = cache_memory(g, cache, cache_dtype, 0.5)
    kinds = [
        "row" if i in row_scales else "group" * (i in group_scales) for i in range(len(shapes))
    ]
    scales, sizes = _scales(g, layers, list(zip(shapes, kinds, strict=True)), block)
    if row_scales or group_scales:
        extras |= {"scale_sizes": sizes, "grouped": list(group_scales)}
    return positional(
        "decode_step",
        x=activations(g, batch, tokens, hidden),
        weights=[weight for weight, _ in weights],
        scales=scales, norm_weights=gain(g, gains),
        head_weight=head_parts[0], head_scale=head_parts[1],
        key_cache=keys, value_cache=values,
        start_positions=torch.randint(0, length - tokens + 1, (batch,), generator=g),
        dtype=dtype, num_heads=heads, intermediate_size=inner, vocab_size=vocab,
        sub_norms=sub_norms, activation=activation, eps=1e-5,
        inv_freq=frequencies(head_dim), attention_factor=1.25, scale=head_dim**-0.5,
        logits_to_keep=logits_to_keep,
        **dict(zip(("key_scale", "value_scale"), (*key_scale, *value_scale), strict=False)),
        **{name: v for name, v in extras.items() if v is not None and v is not False},
    )  # fmt: skip


def _scales(
    g: torch.Generator, layers: int, of: list[tuple[tuple[int, int], str]], block: int
) -> tuple[Tensor, list[int]]:
    """Scales of all layers, and how many each projection has: by row, by row and group, or one.

    Those of groups lie in blocks of rows, zeros behind the last; they are equal whatever the block.
    """
    drawn = []
    for _ in range(max(layers, 1)):
        for (n, k), kind in of:
            scales = positive(g, n if kind else 1, -(-k // 128) if kind == "group" else 1)
            if kind == "group":
                blocks = torch.zeros(-(-n // block) * block, scales.shape[1])
                blocks[:n] = scales
                scales = blocks.view(-1, block, scales.shape[1]).transpose(1, 2)
            drawn.append(scales.flatten())
    sizes = [len(one) for one in drawn[: len(of)]]
    return torch.cat(drawn).view(-1, sum(sizes))[:layers] / 8, sizes


def with_gaps(arguments: Arguments) -> Arguments:
    """Caches that are the first sequences of a longer batch, as KVCache.keep leaves them."""
    given = named("decode_step", arguments)
    for name in ("key_cache", "value_cache"):
        cache = given[name]
        wide = torch.zeros(cache.shape[0], cache.shape[1] + 2, *cache.shape[2:], dtype=cache.dtype)
        wide[:, : cache.shape[1]] = cache
        given[name] = wide[:, : cache.shape[1]]
    return positional("decode_step", **given)


def _decode_step_bound(args: Arguments, expected: Tensor) -> Tensor:
    a = bound("decode_step", args, {})
    return step_bound(a, a.key_cache.shape[0], a.key_cache.shape[3], expected)


def step_bound(a: Any, layers: int, length: int, expected: Tensor) -> Tensor:
    """As _fused; only scales of the int8 codes, which are the reference's, carry errors on.

    The largest element of x * gain, which sets the scale, is within a factor 3 of the largest of x
    (gains are 0.5 to 1.5), and squared ReLU triples an error: what a sublayer adds is off by at
    most 9 times its input's error, and the sum by 10 times, two sublayers a layer. Where the caches
    are compared, their values came through one layer less.
    """
    head, head_scale = a.head_weight, a.head_scale
    hidden = a.x.shape[-1]
    steps = 4 * rms_norm_error(hidden + a.intermediate_size) + 2 * sum_error(length) + 40 * U
    relative = steps * 10.0 ** (2 * layers)
    if expected.dim() == 5:  # a cache; a rotation mixes two elements
        size = expected.double().abs()
        largest = size.amax(dim=-1, keepdim=True) if expected.numel() else size
        return 2 * relative * largest + storing_error(expected.dtype) * size
    if expected.dim() == 4:  # scales of an int8 cache: a row's largest element / 127
        return 2 * (relative + U) * expected.double().abs()
    norm = float(a.norm_weights.abs().max()) * hidden**0.5  # of a normalised row, at most
    if head_scale is None:
        return (relative * norm * head.double().norm(dim=-1)).expand(expected.shape)
    # A quantised head: no code is above 127 (8), nor a row's length above that of such codes; its
    # own 16-bit codes of the activations, finer than the error, may differ by one.
    code = 127.0 if head.dtype == torch.int8 else 8.0
    longest = float(head_scale.double().max()) * code * hidden**0.5
    return torch.full(expected.shape, (relative + 2.0**-15) * norm * longest * 2)


EXTRAS: dict[str, Named] = {
    "biases": {"biased": (0, 1, 2)},
    "all_biases": {"biased": tuple(range(7)), "dtype": torch.bfloat16},
    "qk_norms": {"qk_norms": True, "activation": "silu", "sub_norms": False},
    "sub_norm_eps": {"sub_norm_eps": 1e-2},
    "row_scales": {"row_scales": (0, 1, 2, 4, 5), "dtype": torch.bfloat16},
    "group_scales": {"group_scales": tuple(range(7)), "hidden": 140, "qk_norms": True},
    "int8_groups": {
        "group_scales": tuple(range(7)), "hidden": 140, "activation_format": "int8_group",
        "weight_format": "2bit",
    },
    "int16_groups": {
        "group_scales": (0, 1, 2, 3), "hidden": 140, "activation_format": "int16_group",
        "weight_format": "1.6bit", "dtype": torch.bfloat16,
    },
    "norms_inside": {"linear_norm_eps": 1e-3, "activation": "silu", "sub_norms": False},
    "norms_inside_too": {"linear_norm_eps": 1e-6, "qk_norms": True, "dtype": torch.bfloat16},
    "dropped_neurons": {"dropped": 9},
    "dropped_and_norms_inside": {"dropped": 20, "linear_norm_eps": 1e-6, "dtype": torch.bfloat16},
    "gemma": {
        "post_norms": True, "qk_norms": True, "linear_norm_eps": 1e-6, "sub_norms": False,
        "activation": "gelu_pytorch_tanh", "local_layers": (0,), "windows": (3, 0),
    },
    "windows": {"windows": (5, 2)},
    "everything": {"windows": (0, 4), "dropped": 3, "post_norms": True, "local_layers": (1,),
        "group_scales": (0, 1, 2, 6), "row_scales": (3,), "biased": (1, 3, 6), "qk_norms": True,
        "sub_norm_eps": 1e-3, "hidden": 140, "weight_format": "2bit", "dtype": torch.bfloat16,
    },
}  # fmt: skip


def clear_of_ties(
    op: str, build: Callable[[torch.Generator], Arguments], bound: Callable[..., Tensor]
) -> Callable[[torch.Generator], Arguments]:
    """`build`, drawn again until no activation and no cache row lies between two codes.

    There two right computations take different codes, which no bound of rounding allows. So the
    reference must stay within the bound when x moves by more than rounding does.
    """

    def drawn(g: torch.Generator) -> Arguments:
        for _ in range(60):
            state = g.get_state()
            runs: list[Tensor] = []
            caches: list[list[Tensor]] = []
            for step in (0.0, 2e-6, -2e-6, 2e-6):
                args = list(build(g.set_state(state)))
                moves = torch.randn(
                    args[0].shape, generator=torch.Generator().manual_seed(len(runs))
                )
                args[0] = args[0] * (1 + step * moves)
                runs.append(getattr(reference, op)(*args))
                caches.append([t for t in args if isinstance(t, Tensor) and t.dtype == torch.int8])
            codes = [torch.cat([t.flatten() for t in ts]) for ts in caches if ts]
            limit = bound(tuple(args), runs[0])
            same = all(bool(((run - runs[0]).abs() <= limit).all()) for run in runs)
            if same and all(torch.equal(c, codes[0]) for c in codes):
                return build(g.set_state(state))
        raise AssertionError(f"{op}: every draw is near a tie")

    return drawn


def _decode_step_samples() -> Built:
    for dtype in ACTIVATIONS:
        for cache in KV_DTYPES:
            yield (
                f"{dtype_name(dtype)}_over_{dtype_name(cache)}",
                clear_of_ties(
                    "decode_step",
                    lambda g, d=dtype, c=cache: decode_step_arguments(g, dtype=d, cache_dtype=c),
                    _decode_step_bound,
                ),
            )
    yield "layers", lambda g: decode_step_arguments(g, layers=2, head=torch.bfloat16)
    for form, group in HEAD_FORMATS:
        yield (
            f"head_{form}_{group}",
            lambda g, f=form, n=group: decode_step_arguments(g, head=(f, n), tokens=2),
        )
    for form in FORMATS:
        yield form, lambda g, f=form: decode_step_arguments(g, weight_format=f)
    yield "silu", lambda g: decode_step_arguments(g, sub_norms=False, activation="silu")
    yield "several_tokens", lambda g: decode_step_arguments(g, tokens=3, batch=1)
    yield "last_logits", lambda g: decode_step_arguments(g, tokens=4, batch=2, logits_to_keep=2)
    yield "many_sequences", lambda g: decode_step_arguments(g, batch=5, heads=3, kv_heads=3)
    yield from (
        (name, lambda g, e=extras: decode_step_arguments(g, layers=2, tokens=3, **e))
        for name, extras in EXTRAS.items()
    )
    for dtype in ACTIVATIONS:
        yield (
            f"adapters_{dtype_name(dtype)}",
            lambda g, d=dtype: decode_step_arguments(
                g, layers=2, tokens=3, batch=4, adapters=(2, -1, 0, 1), dtype=d
            ),
        )
    yield "adapters_last", lambda g: decode_step_arguments(
        g, layers=2, tokens=3, batch=3, adapters=(1, 1, -1), logits_to_keep=1, linear_norm_eps=1e-5
    )  # fmt: skip
    yield "adapters_and_dropped_neurons", lambda g: decode_step_arguments(
        g, layers=2, tokens=3, batch=2, adapters=(1, 0), dropped=7, linear_norm_eps=1e-5,
        post_norms=True,
    )  # fmt: skip
    yield "nobody_has_an_adapter", lambda g: decode_step_arguments(g, adapters=(-1, -1))
    yield "no_layers", lambda g: decode_step_arguments(g, layers=0)
    yield "no_batch", lambda g: decode_step_arguments(g, batch=0)
    yield "gaps", lambda g: with_gaps(decode_step_arguments(g, layers=2))
    yield "strided", lambda g: (
        lambda x, *rest: (strided(x), *rest)
    )(*decode_step_arguments(g))  # fmt: skip


def _step_call(g: torch.Generator, **sizes: Any) -> Named:
    return named("decode_step", decode_step_arguments(g, **sizes))


def _no_layers(g: torch.Generator, **sizes: Any) -> Named:
    """No layer: nothing to hold the sizes against."""
    call = _step_call(g, **sizes)
    caches = {name: call[name][:0] for name in ("key_cache", "value_cache")}
    norms = torch.ones(70)
    return {**call, "weights": [], "scales": torch.ones(0, 7), "norm_weights": norms, **caches}


spec(
    decode_step,
    composed=True,
    samples=_decode_step_samples,
    large=[
        lambda g: decode_step_arguments(
            g, layers=2, batch=1, hidden=301, heads=6, kv_heads=2, head_dim=40, inner=517,
            vocab=1021, length=300,
        ),
        lambda g: decode_step_arguments(
            g, layers=2, batch=3, tokens=2, hidden=301, heads=6, kv_heads=2, head_dim=40, inner=517,
            vocab=1021, length=130, dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
        ),
    ],
    calls={
        "": Call(_step_call, DECODE_STEP_REJECTIONS),
        "adapters": Call(
            lambda g, **s: _step_call(g, adapters=(0, -1), **s),
            [*DECODE_STEP_REJECTIONS, *LORA_REJECTIONS],
        ),
    },
    bound=_decode_step_bound,
    mutates=frozenset({"key_cache", "value_cache", "key_scale", "value_scale"}),
    overlapping=lambda g, dtype: decode_step_arguments(g, cache_dtype=dtype, head=("int8", 128)),
    huge={
        "int4": lambda g: _step_call(g, head=("int4", 64)),
        "no layers": _no_layers,
        "no layers int4": lambda g: _no_layers(g, head=("int4", 64)),
    },
    list_lengths={"biased": 3, "scale_sizes": 7, "grouped": 3, "local_layers": 1, "windows": 1},
    empty={
        "layers": lambda: (
            torch.empty(0, 1, 8), [random_packed(torch.Generator(), 4, 1)], torch.ones(1, 7),
            torch.ones(8), torch.ones(5, 8), None,
            *(torch.empty(7905747460161236407, 0, 1, 0, 8) for _ in "kv"),
            torch.empty(0, dtype=torch.int64),
            torch.float32, 1, 8, 5, False, "silu", 0.0, 1e4, 1.0,
        ),
    },
)  # fmt: skip
