"""The tensors of a head that drafts tokens, of the sizes of its trunk."""

from __future__ import annotations

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.draft import ORDER, QK_NORMS, SUB_NORMS


def draft_shapes(model: ModelConfig, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Names and logical shapes of a head's tensors over the trunk `model`, in file order.

    Of a matrix [N, K]; what lies in a file has the digits of every weight, [N, digits * K].
    """
    hidden, head_dim = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * head_dim, model.num_key_value_heads * head_dim
    matrices = {
        "fc": (hidden, 2 * hidden),
        "q_proj": ((2 if model.output_gate else 1) * queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (intermediate_size, hidden),
        "up_proj": (intermediate_size, hidden),
        "down_proj": (hidden, intermediate_size),
    }
    absent = {*(() if model.qk_norm else QK_NORMS), *(() if model.sub_norms else SUB_NORMS)}
    norms = {
        **dict.fromkeys(QK_NORMS, (head_dim,)),
        **dict(zip(SUB_NORMS, ((queries,), (intermediate_size,)), strict=True)),
    }
    found: dict[str, tuple[int, ...]] = {}
    for module in ORDER:
        if module not in absent:
            last = module.rpartition(".")[2]
            found[f"{module}.weight"] = matrices.get(last) or norms.get(module, (hidden,))
    return found
