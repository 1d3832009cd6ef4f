"""Which tensors a model has: the names, kinds and shapes that follow from its config.

Names are those of Hugging Face's modules, whatever a checkpoint calls them: the converter renames.
It must not know values, files or what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitnet_ops.config import ModelConfig, Rotation


@dataclass(frozen=True)
class TensorSpec:
    """What a model needs under a name: kind "ternary" or "dense", and the logical shape.

    may_be_ternary: of a dense matrix, an embedding or a head: packed ternary weights do as well.
    """

    kind: str
    shape: tuple[int, ...]
    may_be_ternary: bool = False


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the model, in file order, under its Hugging Face name."""
    c = config
    vocabulary = TensorSpec("dense", (c.vocab_size, c.hidden_size), may_be_ternary=True)
    specs = {"model.embed_tokens.weight": vocabulary}
    for layer in range(c.num_hidden_layers):
        for name, spec in layer_tensors(c, layer).items():
            specs[f"model.layers.{layer}.{name}"] = spec
    for name, shape in rotation_shapes(c.rotation).items():
        specs[name] = TensorSpec("dense", shape)
    specs["model.norm.weight"] = TensorSpec("dense", (c.hidden_size,))
    if not c.tie_word_embeddings:
        specs["lm_head.weight"] = vocabulary
    return specs


# Signs of a rotation (config/hybrid.py), behind it the width of the input that they turn.
ROTATION = "model.rotation."


def rotation_shapes(rotation: Rotation | None) -> dict[str, tuple[int, int]]:
    """Names and shapes of the tensors that hold the signs of a rotation."""
    blocks = () if rotation is None else rotation.blocks
    return {f"{ROTATION}{width}.weight": (width // block, block) for width, block in blocks}


def layer_tensors(c: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """The tensors of one layer, without its prefix; a module comes before what lies inside it."""
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    specs: dict[str, TensorSpec] = {}

    def norm(name: str, length: int, present: bool = True) -> None:
        if present:
            specs[f"{name}.weight"] = TensorSpec("dense", (length,))

    def linear(name: str, rows: int, columns: int) -> None:
        specs[f"{name}.weight"] = TensorSpec("ternary", (rows, columns))
        if name in c.biases:
            specs[f"{name}.bias"] = TensorSpec("dense", (rows,))
        norm(f"{name}.rms_norm", columns, c.linear_norms)

    def attention() -> None:
        linear("self_attn.q_proj", query * (2 if c.output_gate else 1), hidden)
        linear("self_attn.k_proj", key, hidden)
        linear("self_attn.v_proj", key, hidden)
        norm("self_attn.q_norm", c.head_dim, c.qk_norm)
        norm("self_attn.k_norm", c.head_dim, c.qk_norm)
        norm("self_attn.attn_sub_norm", query, c.sub_norms)
        linear("self_attn.o_proj", hidden, query)

    def dense(name: str, *shape: int) -> None:
        specs[name] = TensorSpec("dense", shape)

    norm("input_layernorm", hidden)
    if c.delta_net is not None and c.is_delta_net(layer):
        d = c.delta_net
        linear("linear_attn.in_proj_qkv", d.channels, hidden)
        linear("linear_attn.in_proj_z", d.values, hidden)
        dense("linear_attn.in_proj_a.weight", d.value_heads, hidden)
        dense("linear_attn.in_proj_b.weight", d.value_heads, hidden)
        # Hugging Face's [C, 1, kernel] turned
        dense("linear_attn.conv1d.weight", d.kernel, d.channels)
        dense("linear_attn.A_log", d.value_heads)
        dense("linear_attn.dt_bias", d.value_heads)
        norm("linear_attn.norm", d.value_dim)
        linear("linear_attn.out_proj", hidden, d.values)
    else:
        attention()
    norm("post_attention_layernorm", hidden)
    norm(c.mlp_norm, hidden, c.post_norms)
    linear("mlp.gate_proj", inner, hidden)
    linear("mlp.up_proj", inner, hidden)
    norm("mlp.ffn_sub_norm", inner, c.sub_norms)
    linear("mlp.down_proj", hidden, inner)
    norm("post_feedforward_layernorm", hidden, c.post_norms)
    return specs
