"""The words that the options of `bench` take, apart from what they mean: read without torch.

The modules that know what they mean take them from here. It must not know anything else.
"""

from __future__ import annotations

CANONICAL = "canonical"
PRIVATE = ("2bit", "1.6bit")
FORMATS = (CANONICAL, *PRIVATE)  # of ternary weights
USUAL = "2bit"  # what models are loaded in
HEAD_FORMATS = ("bf16", "int8", "int4")
CACHES = ("bfloat16", "int8")
# other engine -> (module that has to be there, what it is)
RIVALS = {
    "hf-bf16": ("transformers", "Hugging Face transformers, bfloat16"),
    "hf-fp32": ("transformers", "Hugging Face transformers, float32"),
    "litespark": ("litespark_inference", "litespark-inference, 2-bit weights, int8 head"),
    "llama-cpp": ("llama_cpp", "llama-cpp-python, TQ2_0 weights, Q8_0 head"),
}
