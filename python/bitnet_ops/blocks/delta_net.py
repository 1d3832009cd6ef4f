"""The block `delta_net`: projections, causal convolution, gated delta rule, gated norm, out."""

from __future__ import annotations

from torch import Tensor

from bitnet_ops.blocks.block import Block, Buffer, Line, Ops, Tensors, TensorSpec, Value
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.hybrid import STATE_COLUMNS, DeltaNet

_KEPT_EXTRA = STATE_COLUMNS + 16  # behind a draft's key, of each slab: errors, decay


class GatedDeltaNet(Block):
    """x + out(gated_norm(heads) * silu(z)), heads of the delta rule, of h = norm(x)."""

    kind = "delta_net"
    inputs = ("qkv", "z"), ("out",)
    added = "out"

    def line(self, c: ModelConfig, layer: int) -> Line:
        d, prefix = c.delta_net, f"model.layers.{layer}."
        assert d is not None
        inside = prefix + "linear_attn."
        keys: dict[str, Value] = {"norm": prefix + "input_layernorm"}
        keys |= {key: f"{inside}in_proj_{key}" for key in ("qkv", "z", "a", "b")}
        keys |= {"conv": inside + "conv1d"}
        keys |= {key: inside + key for key in ("A_log", "dt_bias")}
        keys |= {"gated_norm": inside + "norm", "out": inside + "out_proj"}
        keys |= {"key_heads": d.key_heads, "value_heads": d.value_heads}
        keys |= {"key_dim": d.key_dim, "value_dim": d.value_dim, "kernel": d.kernel}
        return Line(self.kind, keys)

    def tensors(self, line: Line, model: Line) -> dict[str, TensorSpec]:
        hidden, d = model.integer("hidden"), _sizes(line)
        t = Tensors(line, model)
        t.norm("norm", hidden)
        t.projection("qkv", d.channels, hidden)
        t.projection("z", d.values, hidden)
        t.dense("a", d.value_heads, hidden)
        t.dense("b", d.value_heads, hidden)
        t.dense("conv", d.kernel, d.channels)  # Hugging Face's [C, 1, kernel] turned
        t.dense("A_log", d.value_heads, suffix="")
        t.dense("dt_bias", d.value_heads, suffix="")
        t.norm("gated_norm", d.value_dim)
        t.projection("out", hidden, d.values)
        return t.found

    def state(self, line: Line) -> tuple[Buffer, ...]:
        """As `ops.delta_net` takes them."""
        d = _sizes(line)
        slabs = d.value_heads, d.value_dim // STATE_COLUMNS
        shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
            "recurrent": ((*slabs, d.key_dim, STATE_COLUMNS), None),
            "inputs": ((d.channels,), d.kernel - 1),
            "kept": ((*slabs, d.key_dim + _KEPT_EXTRA), 0),
        }
        return tuple(
            Buffer(name, "sequence", shape, "float32", rows)
            for name, (shape, rows) in shapes.items()
        )

    def float_macs(self, line: Line) -> int:
        d = _sizes(line)
        return 3 * d.value_heads * d.key_dim * d.value_dim

    def run(self, c: Ops, line: Line, number: int, x: Tensor) -> Tensor:
        h = c.norm(line, "norm", c.rounded(x))
        qkv, z = c.project(line, "qkv", h), c.project(line, "z", h)
        a, b, conv = (c.tensor(f"{line.keys[key]}.weight") for key in ("a", "b", "conv"))
        heads = c.ops.delta_net(
            qkv,
            c.ops.lm_head(h, a),
            c.ops.lm_head(h, b),
            conv,
            c.tensor(str(line.keys["A_log"])),
            c.tensor(str(line.keys["dt_bias"])),
            [c.states[buffer.name] for buffer in self.state(line)],
            number,
            c.step.query_start_loc,
            c.step.seq_lens,
            c.step.state_steps,
            line.integer("key_heads"),
            line.integer("key_dim"),
        ).unflatten(-1, (-1, line.integer("value_dim")))
        heads = c.norm(line, "gated_norm", heads).flatten(-2)
        return x + c.project(line, "out", c.rounded(c.ops.gated(z.float(), heads, "silu")))


def _sizes(line: Line) -> DeltaNet:
    names = "key_heads", "value_heads", "key_dim", "value_dim", "kernel"
    return DeltaNet((), *(line.integer(name) for name in names))
