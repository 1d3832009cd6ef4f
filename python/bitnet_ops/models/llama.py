"""Llama with ternary projections (model_type "llama"): SiLU, no sub-norms, any head_dim.

Falcon3-1.58bit, Falcon-E and Llama3-8B-1.58 are of this kind. Source: transformers
`modeling_llama.py`. It must not know files; everything it does is in decoder.py, driven by the
config.
"""

from bitnet_ops.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """The Llama architecture; see Decoder for arguments and behaviour."""
