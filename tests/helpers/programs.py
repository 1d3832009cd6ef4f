"""Model programs with random tensors, and what they mean: `interpret`, composed of single ops.

It is the reference of `run_program`, over ops in plain torch: models/composed.py, which the forward
pass in float64 (forward_fp64.py) and transformers check from outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
from bitnet_ops.blocks.block import Line
from bitnet_ops.blocks.listing import KINDS, Listing
from bitnet_ops.models.composed import Composed
from bitnet_ops.nn.lora import LoraWeight
from bitnet_ops.nn.storage import LAYOUTS
from op_spec import reference
from op_values import frequencies, gain, positive, quantized_head, random_packed
from ops_attention import attention_over_bfloat16
from ops_packing import repacked
from ops_paged import POOLS, gathered, sequences


@dataclass(frozen=True)
class Sample:
    """A program's text and its tensors by name."""

    text: str
    tensors: dict[str, Tensor]

    def bind(self) -> Tensor:
        """A handle; as long as it lives, `of` finds the sample by it."""
        handle = ops.bind_program(self.text, "\n".join(self.tensors), list(self.tensors.values()))
        number = int(handle)
        _BOUND[number] = self
        weakref.finalize(handle, _release, number).atexit = False
        return handle

    def lines(self) -> list[tuple[str, dict[str, str]]]:
        words = [line.split() for line in self.text.splitlines()]
        return [(kind, dict(word.split("=", 1) for word in keys)) for kind, *keys in words]

    @property
    def out_features(self) -> int:
        """The vocabulary of a head; without a matrix, what a state has."""
        return int(self.lines_of("head")[0].get("vocab", self.lines_of("model")[0]["hidden"]))

    def lines_of(self, wanted: str) -> list[dict[str, str]]:
        return [keys for kind, keys in self.lines() if kind == wanted]


_BOUND: dict[int, Sample] = {}


def _release(number: int) -> None:
    del _BOUND[number]
    ops.release_program(torch.tensor([number]))


def of(handle: Tensor) -> Sample:
    return _BOUND[int(handle)]


PROJECTIONS = "q", "k", "v", "o", "gate", "up", "down"
DELTA_PROJECTIONS = "qkv", "z", "out"
DELTA = {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32, "kernel": 3}


def delta_sizes() -> tuple[int, int]:
    """Features of the values of a block delta_net, and of its convolution."""
    values = DELTA["value_heads"] * DELTA["value_dim"]
    return values, 2 * DELTA["key_heads"] * DELTA["key_dim"] + values


def program(
    g: torch.Generator,
    *,
    layers: int = 1,
    hidden: int = 70,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 150,
    vocab: int = 37,
    dtype: torch.dtype = torch.float32,
    head: tuple[str, int] | torch.dtype | None = torch.float32,
    weight_format: str = "canonical",
    sub_norms: bool = True,
    activation: str = "relu2",
    biased: Sequence[str] = (),
    row_scales: Sequence[str] = (),
    group_scales: Sequence[str] = (),
    activation_format: str = "int8",
    qk_norms: bool = False,
    sub_norm_eps: float | None = None,
    linear_norm_eps: float | None = None,
    post_norms: bool = False,
    local_layers: Sequence[int] = (),
    windows: Sequence[int] = (),
    adapters: bool = False,
    delta_layers: Sequence[int] = (),
    output_gate: bool = False,
    rotary_dim: int | None = None,
    block: int = 0,
) -> Sample:
    """biased, row_scales, group_scales: the projections with a bias, a scale a row or a group.

    head None: the result is the states. delta_layers: those of Gated DeltaNet, of DELTA's sizes.
    block: of the rotation of all inputs, 0: none.
    """
    query, kv = heads * head_dim, kv_heads * head_dim
    d = SimpleNamespace(**DELTA)
    values, channels = delta_sizes()
    shapes = dict(zip([*PROJECTIONS, "qkv", "z", "out"],
                      [(query * (1 + output_gate), hidden), (kv, hidden), (kv, hidden),
                       (hidden, query), (inner, hidden), (inner, hidden), (hidden, inner),
                       (channels, hidden), (values, hidden), (hidden, values)],
                      strict=True))  # fmt: skip
    rotary = rotary_dim or head_dim
    tensors: dict[str, Tensor] = {"rope.far": frequencies(rotary)}
    signs: dict[int, Tensor] = {}
    model = f"model hidden={hidden} dtype={str(dtype)[6:]} eps=1e-05"
    if sub_norm_eps is not None:
        model += f" sub_norm_eps={sub_norm_eps}"
    if linear_norm_eps is not None:
        model += f" linear_norm_eps={linear_norm_eps}"
    text = [model, f"rope name=far dim={rotary} inv_freq=rope.far factor=1.25"]
    if local_layers:
        tensors["rope.near"] = frequencies(rotary) / 3
        text.append(f"rope name=near dim={rotary} inv_freq=rope.near")
    lora = []

    def norm(name: str, n: int) -> str:
        tensors[f"{name}.weight"] = gain(g, n)
        return name

    def rotate(name: str, k: int) -> None:
        if not block:
            return
        if k not in signs:
            signs[k] = 2.0 * torch.randint(0, 2, (k // block, block), generator=g) - 1.0
        tensors[f"{name}.signs"] = signs[k]

    def dense(name: str, *shape: int) -> str:
        tensors[name] = torch.randn(shape, generator=g) / shape[-1] ** 0.5
        return name.removesuffix(".weight")

    def delta(i: int) -> str:
        line = f"delta_net norm={norm(f'L{i}.in', hidden)}"
        line += "".join(f" {kind}={projection(i, kind)}" for kind in ("qkv", "z", "out"))
        line += "".join(f" {k}={dense(f'L{i}.{k}.weight', d.value_heads, hidden)}" for k in "ab")
        line += f" conv={dense(f'L{i}.conv.weight', d.kernel, channels)}"
        tensors[f"L{i}.conv.weight"] *= channels**0.5 / 2
        line += "".join(f" {k}={dense(f'L{i}.{k}', d.value_heads)}" for k in ("A_log", "dt_bias"))
        line += f" gated_norm={norm(f'L{i}.gated', d.value_dim)} "
        return line + " ".join(f"{key}={size}" for key, size in DELTA.items())

    def projection(layer: int, kind: str) -> str:
        name, (n, k) = f"L{layer}.{kind}", shapes[kind]
        rotate(name, k)
        packed = random_packed(g, n, k)
        if weight_format != "canonical":
            packed = repacked(packed, k, weight_format)
        tensors[f"{name}.weight"] = packed
        tensors[f"{name}.weight_scale"] = _scales(g, kind, n, k)
        if kind in biased:
            tensors[f"{name}.bias"] = torch.randn(n, generator=g) / 8
        if linear_norm_eps is not None:
            norm(f"{name}.rms_norm", k)
        for adapter, form in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            rank = (0, 1, 3, 16, 20)[int(torch.randint(5, (1,), generator=g))]
            if not adapters or not rank:
                continue
            tiles = torch.zeros(-(-n // 16) * 16, rank)
            tiles[:n] = torch.randn(n, rank, generator=g) / 8
            a = f"{name}.lora{adapter}.a"
            tensors[a] = (torch.randn(rank, k, generator=g) / 8).to(form)
            b = f"{name}.lora{adapter}.b"
            tensors[b] = tiles.view(-1, 16, rank).mT.contiguous().to(form)
            scaling = float(torch.rand(1, generator=g))
            lora.append(f"lora adapter={adapter} projection={name} a={a} b={b} scaling={scaling!r}")
        return name

    def _scales(g: torch.Generator, kind: str, n: int, k: int) -> Tensor:
        if kind not in group_scales:
            return positive(g, n if kind in row_scales else 1).flatten() / 8
        scales = positive(g, n, -(-k // 128)) / 8
        if weight_format == "canonical":
            return scales
        rows = LAYOUTS[weight_format]["fields"] * _runtime.tile_lanes()
        blocks = torch.zeros(-(-n // rows) * rows, scales.shape[1])
        blocks[:n] = scales
        return blocks.view(-1, rows, scales.shape[1]).transpose(1, 2).contiguous()

    def grouped(kinds: Sequence[str]) -> str:
        return f" activation_format={activation_format}" if {*kinds} & {*group_scales} else ""

    def attention(i: int) -> str:
        line = f"attention norm={norm(f'L{i}.in', hidden)}"
        line += "".join(f" {kind}={projection(i, kind)}" for kind in PROJECTIONS[:4])
        line += f" heads={heads} kv_heads={kv_heads} head_dim={head_dim} scale={head_dim**-0.5!r}"
        line += f" rope={'near' if i in local_layers else 'far'}"
        if windows:
            line += f" window={windows[i]}"
        if output_gate:
            line += " output_gate=1"
        if qk_norms:
            line += f" q_norm={norm(f'L{i}.qn', head_dim)} k_norm={norm(f'L{i}.kn', head_dim)}"
        if sub_norms:
            line += f" sub_norm={norm(f'L{i}.attn_sub', query)}"
        if post_norms:
            line += f" post_norm={norm(f'L{i}.post_o', hidden)}"
        return line + grouped(PROJECTIONS[:4])

    for i in range(layers):
        text.append(delta(i) + grouped(DELTA_PROJECTIONS) if i in delta_layers else attention(i))
        line = f"mlp norm={norm(f'L{i}.post', hidden)}"
        line += "".join(f" {kind}={projection(i, kind)}" for kind in PROJECTIONS[4:])
        line += f" width={inner} activation={activation}"
        if sub_norms:
            line += f" sub_norm={norm(f'L{i}.ffn_sub', inner)}"
        if post_norms:
            line += f" post_norm={norm(f'L{i}.post_down', hidden)}"
        text.append(line + grouped(PROJECTIONS[4:]))
    text.append(f"head norm={norm('final', hidden)}")
    if head is not None:
        text[-1] += f" weight=embed vocab={vocab}"
        rotate("embed", hidden)
    if isinstance(head, tuple):
        tensors["embed.weight"], tensors["embed.scale"] = quantized_head(g, vocab, hidden, *head)
    elif head is not None:
        tensors["embed.weight"] = torch.randn(vocab, hidden, generator=g).to(head)
    return Sample("\n".join([*text, *lora]) + "\n", tensors)


@dataclass(frozen=True)
class _Tensors:
    """The tensors under a name as a module has them; called, the ternary projection of that name.

    o: the ops; forms: (rows, activation format) of projections.
    """

    o: Any
    sample: Sample
    name: str
    forms: dict[str, tuple[int, str]]

    def __getattr__(self, own: str) -> Tensor:
        return self.get_buffer(own)

    def get_buffer(self, own: str) -> Tensor:
        return self.sample.tensors[f"{self.name}.{own}"]

    @property
    def _modules(self) -> dict[str, Any]:
        inside = replace(self, name=f"{self.name}.rms_norm")
        return {"rms_norm": inside} if f"{inside.name}.weight" in self.sample.tensors else {}

    def turned(self, x: Tensor) -> Tensor:
        signs = self.sample.tensors.get(f"{self.name}.signs")
        return x if signs is None else self.o.hadamard(x, signs)

    def __call__(self, x: Tensor) -> Tensor:
        scale, bias = self.weight_scale, self.sample.tensors.get(f"{self.name}.bias")
        rows, form = self.forms[self.name]
        y: Tensor = self.o.linear(
            self.turned(x), self.weight, scale, bias, (rows, x.shape[-1]),
            form if scale.dim() > 1 else "int8",
        )  # fmt: skip
        return y


@dataclass(frozen=True)
class Step:
    """A call of run_program, by names."""

    x: Tensor
    program: Tensor
    caches: dict[str, Tensor]
    step: dict[str, Tensor]
    layout: str


def interpret(o: Any, a: Step) -> Tensor:
    """float32 [r, V] by the ops of `o`, composed; the caches are written."""
    sample = of(a.program)
    parsed = [Line(kind, keys) for kind, keys in sample.lines()]
    model, blocks = parsed[0], [line for line in parsed if line.kind in KINDS]
    ropes = {
        line.keys["name"]: (sample.tensors[str(line.keys["inv_freq"])], line.number("factor"))
        for line in parsed
        if line.kind == "rope"
    }
    forms = {
        name.removesuffix(".weight"): (spec.shape[0], str(line.keys.get("activation_format", "")))
        for line in blocks
        for name, spec in KINDS[line.kind].tensors(line, model).items()
    }

    def module(name: str) -> _Tensors:
        return _Tensors(o, sample, name, forms)

    attention = [line for line in blocks if line.kind == "attention"]
    composed = Composed(
        Listing(model, (), tuple(blocks)),
        module,
        a.step["positions"].long(),
        {str(name): rope for name, rope in ropes.items()},
        lambda number, q, k, v: _attended(o, a, attention[number], number, q, k, v),
        _sides(sample, a.step, forms),
        a.caches,
        SimpleNamespace(**a.step),  # type: ignore[arg-type]
        o,
    )
    head = blocks[-1]
    rows = composed.norm(head, "norm", composed.run(a.x)[a.step["logit_rows"].long()])
    if (name := head.name("weight")) is None:
        return rows
    weight = module(name)
    scale, shape = sample.tensors.get(f"{name}.scale"), (head.integer("vocab"), rows.shape[-1])
    logits: Tensor = o.lm_head(weight.turned(rows), weight.weight, scale, shape)
    return logits


def _sides(
    sample: Sample, step: dict[str, Tensor], forms: dict[str, tuple[int, str]]
) -> list[tuple[Tensor, dict[str, LoraWeight]]]:
    """Of every adapter the tokens that have it, and its factors."""
    if "adapters" not in step:
        return []
    of_tokens = step["adapters"].long().repeat_interleave(step["query_start_loc"].long().diff())
    found: dict[int, dict[str, LoraWeight]] = {}
    for line in sample.lines_of("lora"):
        name, tiles = line["projection"], sample.tensors[line["b"]]
        b = tiles.mT.reshape(-1, tiles.shape[1])[: forms[name][0]].contiguous()
        lora = LoraWeight(sample.tensors[line["a"]], b, float(line["scaling"]))
        found.setdefault(int(line["adapter"]), {})[name] = lora
    rows = {adapter: (of_tokens == adapter).nonzero().flatten() for adapter in found}
    return [(rows[adapter], paths) for adapter, paths in found.items() if len(rows[adapter])]


def _attended(o: Any, a: Step, line: Line, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pools = [a.caches[name][layer] for name in ("key", "value", "key_scale", "value_scale")
             if name in a.caches]  # fmt: skip
    scales = pools[2:] or [None, None]
    o.paged_cache_update(*pools[:2], k, v, a.step["slot_mapping"], *scales, a.layout)
    where = {name: a.step[name] for name in ("query_start_loc", "seq_lens", "block_table")}
    scale, window = line.number("scale"), line.integer("window")
    if not (o is reference and pools[0].dtype == torch.bfloat16):
        y: Tensor = o.paged_attention(
            q, *pools[:2], *where.values(), scale, *scales, a.layout, window
        )
        return y
    # The roundings of the definition: codes behind coarser ones would bear no bound.
    out = torch.empty_like(q)
    view = SimpleNamespace(**dict(zip(POOLS, pools, strict=False)), **where)
    for tokens, length, slots in sequences(view):
        own = [gathered(pool, slots) for pool in pools]
        start = torch.tensor([length - (tokens.stop - tokens.start)])
        out[tokens] = attention_over_bfloat16(q[tokens][None], *own, start, scale, window=window)[0]
    return out
