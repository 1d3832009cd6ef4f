"""Qwen2 and Qwen3 with ternary projections (model_type "qwen2", "qwen3"), often a norm in each.

Qwen2 has biases on q, k and v; Qwen3 norms every head of queries and keys before the rotation.
Sources: transformers `modeling_qwen2.py`, `modeling_qwen3.py`. It must not know files; everything
it does is in layer.py, driven by the config.
"""

from bitnet_ops.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """The Qwen2 architecture; see Decoder for arguments and behaviour."""


class Qwen3ForCausalLM(Decoder):
    """The Qwen3 architecture, embedding models included; see Decoder."""
