"""Draft heads with weights that hide nothing: what is done wrongly shows in logits.

A head that was trained plainly has norms near 1, gates near their middle, and two halves of `fc`
that do alike; half of what one can do wrongly in running it then changes next to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def head_shapes(config: ModelConfig, intermediate_size: int | None = None) -> Shapes:
    """Names and shapes of a head over a trunk of `config`, matrices as [N, K]."""
    c, hidden = config, config.hidden_size
    width = c.intermediate_size if intermediate_size is None else intermediate_size
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = "layers.0."
    shapes: Shapes = {
        "fc": (hidden, 2 * hidden),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
        f"{layer}input_layernorm": (hidden,),
        f"{layer}self_attn.q_proj": (query * (2 if c.output_gate else 1), hidden),
        f"{layer}self_attn.k_proj": (key, hidden),
        f"{layer}self_attn.v_proj": (key, hidden),
        f"{layer}self_attn.o_proj": (hidden, query),
        f"{layer}post_attention_layernorm": (hidden,),
        f"{layer}mlp.gate_proj": (width, hidden),
        f"{layer}mlp.up_proj": (width, hidden),
        f"{layer}mlp.down_proj": (hidden, width),
        "norm": (hidden,),
    }
    if c.qk_norm:
        shapes |= {f"{layer}self_attn.{name}": (c.head_dim,) for name in ("q_norm", "k_norm")}
    if c.sub_norms:
        shapes |= {
            f"{layer}self_attn.attn_sub_norm": (query,),
            f"{layer}mlp.ffn_sub_norm": (width,),
        }
    return {f"mtp.{name}.weight": shape for name, shape in shapes.items()}


def strong_head(
    config: ModelConfig, seed: int = 0, intermediate_size: int | None = None
) -> dict[str, Tensor]:
    """Random weights float32 by their names in a file; norms as what they multiply by.

    - Every norm has factors from 1/4 to 4, in an order of its own, a few of them negative: without
      it, with another one's, or with 1 added, other features lead.
    - The halves of fc differ in size: what stands for the state weighs twice the embedding.
    - Queries and keys are large enough that attention chooses: a few positions get most of it, by
      what they hold and by their distance, so that a KV that begins late or positions with a gap
      are seen. Values and `o` weigh as much as the stream that they are added to.
    - Gates lie on both sides of 0 and far from it, from closed to open.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in head_shapes(config, intermediate_size).items():
        if len(shape) == 1:
            found[name] = strong_norm(shape[0], generator)
            continue
        weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        if name == "mtp.fc.weight":
            weight[:, shape[1] // 2 :] *= 2.0
        elif "q_proj" in name and config.output_gate:
            heads = weight.unflatten(0, (-1, 2, config.head_dim))  # of each head query, then gate
            heads[:, 0] *= _SHARP
            heads[:, 1] *= 2.0
        elif "q_proj" in name:
            weight *= _SHARP
        found[name] = weight
    return found


_SHARP = 1.5  # times what gives scores of standard deviation 1, before norms spread them


def strong_norm(width: int, generator: torch.Generator) -> Tensor:
    """Factors float32 [width] from 1/4 to 4 in random order, a tenth of them negative.

    Also for the last norm of a trunk: where its factors are near 1, a state from before it is as
    good as one from behind it, since the head norms what it is given.
    """
    factors = torch.logspace(-2, 2, width, base=2.0)[torch.randperm(width, generator=generator)]
    negative = torch.rand(width, generator=generator) < 0.1
    return torch.where(negative, -factors, factors)
