"""BitNet b1.58 (model_type "bitnet"): squared ReLU, sub-norms before o_proj and down_proj.

Source: transformers `modeling_bitnet.py`; "BitNet b1.58 2B4T Technical Report", arXiv 2504.12285.
It must not know files; everything it does is in decoder.py, driven by the config.
"""

from bitnet_ops.models.decoder import Decoder


class BitNetForCausalLM(Decoder):
    """The BitNet architecture; see Decoder for arguments and behaviour."""
