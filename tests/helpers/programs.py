"""Model programs with random tensors, and a second reader of their text, made of ops.

`interpret` is the reference of `model_step`: it shares no code with models/composed.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import _runtime, ops
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


@dataclass
class _Reader:
    """One call of model_step: `o`, whose ops it is made of, its arguments and its program."""

    o: Any
    a: SimpleNamespace
    sample: Sample

    def __post_init__(self) -> None:
        self.model = self.sample.lines_of("model")[0]
        first = len(self.a.caches) - (3 if self.sample.lines_of("delta_net") else 0)
        self.pools, self.states = self.a.caches[:first], self.a.caches[first:]
        counts = self.a.query_start_loc.diff().tolist()
        adapters = [-1] * len(counts) if self.a.adapters is None else self.a.adapters.tolist()
        self.adapters = torch.tensor(
            [adapter for adapter, n in zip(adapters, counts, strict=True) for _ in range(n)],
            dtype=torch.int64,
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.sample.tensors[name]

    def norm(self, keys: dict[str, str], key: str, x: Tensor, eps: str = "eps") -> Tensor:
        if key not in keys:
            return x
        eps = self.model.get(eps, self.model["eps"])
        y: Tensor = self.o.rms_norm(x, self[f"{keys[key]}.weight"], float(eps))
        return y

    def project(self, keys: dict[str, str], key: str, x: Tensor, rows: int) -> Tensor:
        name, k = keys[key], x.shape[-1]
        if f"{name}.rms_norm.weight" in self.sample.tensors:
            x = self.norm({"norm": f"{name}.rms_norm"}, "norm", x, "linear_norm_eps")
        scale, bias = self[f"{name}.weight_scale"], self.sample.tensors.get(f"{name}.bias")
        form = keys.get("activation_format", "int8") if scale.dim() > 1 else "int8"
        y: Tensor = self.o.linear(
            self.turned(name, x), self[f"{name}.weight"], scale, bias, (rows, k), form
        )
        for line in self.sample.lines_of("lora"):
            at = (self.adapters == int(line["adapter"])).nonzero().flatten()
            if line["projection"] != name or not len(at):
                continue
            b = self[line["b"]]
            b = b.mT.reshape(-1, b.shape[1])[:rows].contiguous()
            side = self.o.lm_head(self.o.lm_head(x[at], self[line["a"]], None), b, None)
            y[at] = (y[at].float() + side * float(line["scaling"])).to(y.dtype)
        return y

    def turned(self, name: str, x: Tensor) -> Tensor:
        signs = self.sample.tensors.get(f"{name}.signs")
        return x if signs is None else self.o.hadamard(x, signs)

    def attend(self, keys: dict[str, str], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, scale, window = self.a, float(keys["scale"]), int(keys.get("window", 0))
        pools = [pool[layer] for pool in self.pools]
        scales = pools[2:] or [None, None]
        self.o.paged_cache_update(*pools[:2], k, v, a.slot_mapping, *scales, a.layout)
        if not (self.o is reference and pools[0].dtype == torch.bfloat16):
            y: Tensor = self.o.paged_attention(
                q, *pools[:2], a.query_start_loc, a.seq_lens, a.block_table, scale, *scales,
                a.layout, window,
            )  # fmt: skip
            return y
        # The roundings of the definition: codes behind coarser ones would bear no bound.
        out = torch.empty_like(q)
        view = SimpleNamespace(**dict(zip(POOLS, pools, strict=False)), **{
            name: getattr(a, name) for name in ("query_start_loc", "seq_lens", "block_table")
        })  # fmt: skip
        for tokens, length, slots in sequences(view):
            own = [gathered(pool, slots) for pool in pools]
            start = torch.tensor([length - (tokens.stop - tokens.start)])
            out[tokens] = attention_over_bfloat16(
                q[tokens][None], *own, start, scale, window=window
            )[0]
        return out

    def attention(self, keys: dict[str, str], layer: int, x: Tensor) -> Tensor:
        heads, kv_heads, dim = (int(keys[key]) for key in ("heads", "kv_heads", "head_dim"))
        parts = 1 + int(keys.get("output_gate", 0))
        h = self.norm(keys, "norm", x.to(getattr(torch, self.model["dtype"])))
        both = self.project(keys, "q", h, heads * dim * parts).view(-1, heads, parts, dim)
        q = both[:, :, 0].contiguous()
        k, v = (self.project(keys, key, h, kv_heads * dim).view(-1, kv_heads, dim) for key in "kv")
        q, k = self.norm(keys, "q_norm", q), self.norm(keys, "k_norm", k)
        rope = next(r for r in self.sample.lines_of("rope") if r["name"] == keys["rope"])
        turn = self.a.positions.long(), self[rope["inv_freq"]], float(rope.get("factor", 1))
        turned = 2 * len(turn[1])
        q, k = (
            torch.cat([self.o.rope(t[..., :turned].contiguous(), *turn), t[..., turned:]], -1)
            for t in (q, k)
        )
        y = self.attend(keys, layer, q, k, v).flatten(1)
        if parts == 2:
            y = self.o.gated(both[:, :, 1].flatten(1), y, "sigmoid")
        y = self.norm(keys, "sub_norm", y, "sub_norm_eps")
        return self.norm(keys, "post_norm", self.project(keys, "o", y, x.shape[-1]))

    def delta_net(self, keys: dict[str, str], layer: int, x: Tensor) -> Tensor:
        a, (values, channels) = self.a, delta_sizes()
        h = self.norm(keys, "norm", x.to(getattr(torch, self.model["dtype"])))
        u, z = (self.project(keys, *of) for of in (("qkv", h, channels), ("z", h, values)))
        decay, beta = (self.o.lm_head(h, self[f"{keys[key]}.weight"], None) for key in "ab")
        y = self.o.delta_net(
            u, decay, beta, self[f"{keys['conv']}.weight"], self[keys["A_log"]],
            self[keys["dt_bias"]], self.states, layer, a.query_start_loc, a.seq_lens,
            a.state_steps, int(keys["key_heads"]), int(keys["key_dim"]),
        ).unflatten(1, (-1, int(keys["value_dim"])))  # fmt: skip
        y = self.norm(keys, "gated_norm", y).flatten(1)
        return self.project(keys, "out", self.o.gated(z.float(), y, "silu").to(h.dtype), x.shape[1])

    def mlp(self, keys: dict[str, str], x: Tensor) -> Tensor:
        h = self.norm(keys, "norm", x.to(getattr(torch, self.model["dtype"])))
        gate, up = (self.project(keys, key, h, int(keys["width"])) for key in ("gate", "up"))
        match keys["activation"]:
            case "relu2":
                z = self.o.relu2_mul(gate, up)
            case "silu":
                z = self.o.silu_and_mul(torch.cat([gate, up], -1))
            case _:
                z = self.o.gelu_tanh_and_mul(torch.cat([gate, up], -1))
        z = self.norm(keys, "sub_norm", z, "sub_norm_eps")
        return self.norm(keys, "post_norm", self.project(keys, "down", z, x.shape[-1]))


def interpret(o: Any, a: Any) -> Tensor:
    """float32 [r, V] of model_step's arguments; the caches are written."""
    reader, x, layer, delta_layer = _Reader(o, a, of(a.program)), a.x, 0, 0
    result = torch.empty(0)
    for kind, keys in reader.sample.lines():
        if kind == "attention":
            x = x + reader.attention(keys, layer, x)
            layer += 1
        elif kind == "delta_net":
            x = x + reader.delta_net(keys, delta_layer, x)
            delta_layer += 1
        elif kind == "mlp":
            x = x + reader.mlp(keys, x)
        elif kind == "head":
            result = reader.norm(keys, "norm", x[a.logit_rows.long()])
            if (name := keys.get("weight")) is not None:
                scale = reader.sample.tensors.get(f"{name}.scale")
                shape = int(keys["vocab"]), x.shape[-1]
                result = o.lm_head(
                    reader.turned(name, result), reader[f"{name}.weight"], scale, shape
                )
    return result
