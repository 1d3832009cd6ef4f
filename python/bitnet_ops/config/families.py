"""The families of checkpoints, one row each: what their config.json means and how files name them.

Whatever depends on the family reads its row: a ModelConfig carries it, so that the row is looked
up once, by `family_of`. A family whose maths exists is one more row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROJECTIONS = (
    *(f"self_attn.{p}_proj" for p in "qkvo"),
    *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class Family:
    """What Hugging Face's class assumes where config.json is silent, and which parts it has.

    model_type, classes: of config.json. `classes` of a name that ends in Model have no head.
    hidden_act, rms_norm_eps, rope_theta, head_dim: defaults; None: hidden_size / heads.
    positions: what max_position_embeddings is where config.json is silent.
    kv_heads_needed: num_key_value_heads must be stated; otherwise absent means as many as queries.
    sub_norms, qk_norm, biases, post_norms: parts, as ModelConfig has them.
    norm_offset: what a norm multiplies by is this more than what a checkpoint stores.
    scalings: it has those of config/scalings.py, by the keys that are read there.
    windows: layers may have sliding windows, as config/scalings.py reads them.
    hybrid: layers of Gated DeltaNet among those of attention, as config/hybrid.py reads them.
    tied: what tie_word_embeddings means where config.json is silent.
    required: keys of config.json that must have these values.
    only_by_class: `classes` decide; model_type alone means another row.
    renamed: how checkpoints spell parts of names of tensors -> as here.
    gguf: general.architecture of GGUF files, the one that is written first.
    gguf_permuted: there, the rows of q and k are in the order of interleaved rotary embedding.
    """

    model_type: str
    classes: tuple[str, ...]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    head_dim: int | None = None
    positions: int = 2048
    kv_heads_needed: bool = False
    sub_norms: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    post_norms: bool = False
    norm_offset: float = 0.0
    scalings: str = ""
    windows: str = ""
    hybrid: bool = False
    tied: bool = False
    required: Mapping[str, Any] = field(default_factory=dict, compare=False)
    only_by_class: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)
    gguf: tuple[str, ...] = ()
    gguf_permuted: bool = False

    @property
    def telling_parts(self) -> set[str]:
        """The parts of a layer that tell this family from others, by the names of its tensors."""
        return {
            *(SUB_NORMS if self.sub_norms else ()),
            *(QK_NORMS if self.qk_norm else ()),
            *(("bias",) if self.biases else ()),
            *(("A_log",) if self.hybrid else ()),
        }


SUB_NORMS = ("attn_sub_norm", "ffn_sub_norm")
QK_NORMS = ("q_norm", "k_norm")

ONEBIT = Family(  # 1bitLLM's code: Llama with sub-norms, which llama.cpp calls "bitnet"
    "llama",
    ("BitnetForCausalLM",),
    rms_norm_eps=1e-5,
    sub_norms=True,
    required={"weight_bits": 1, "input_bits": 8},
    only_by_class=True,
    renamed={
        ".self_attn.inner_attn_ln.": ".self_attn.attn_sub_norm.",
        ".mlp.ffn_layernorm.": ".mlp.ffn_sub_norm.",
    },
    gguf=("bitnet",),
)

FAMILIES = (
    Family(
        "bitnet",
        # the second spelling is that of block-diffusion BitNets, read as ordinary causal models
        ("BitNetForCausalLM", "BitnetForCausalLM"),
        hidden_act="relu2",
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        sub_norms=True,
        gguf=("bitnet-b1.58", "bitnet-25"),
    ),
    ONEBIT,
    Family("llama", ("LlamaForCausalLM",), gguf=("llama",), gguf_permuted=True),
    Family(
        "qwen2",
        ("Qwen2ForCausalLM", "Qwen2Model"),
        positions=32768,
        kv_heads_needed=True,
        biases=PROJECTIONS[:3],
        windows="qwen",
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM", "Qwen3Model"),
        head_dim=128,
        positions=32768,
        kv_heads_needed=True,
        qk_norm=True,
        windows="qwen",
        gguf=("qwen3",),
    ),
    Family(
        "minicpm",
        ("MiniCPMForCausalLM",),
        scalings="minicpm",
        gguf=("minicpm",),
        gguf_permuted=True,
    ),
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM", "Gemma3TextModel"),
        hidden_act="gelu_pytorch_tanh",
        rope_theta=1000000.0,
        head_dim=256,
        positions=131072,
        kv_heads_needed=True,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scalings="gemma3_text",
        windows="gemma3",
        tied=True,
    ),
    Family(  # published nested under "text_config", with a tower for images that is not run
        "qwen3_5_text",
        ("Qwen3_5ForCausalLM",),
        head_dim=256,
        positions=32768,
        kv_heads_needed=True,
        qk_norm=True,
        norm_offset=1.0,
        hybrid=True,
        gguf=("qwen35",),
    ),
)

# model_type -> the family that it means where no class says otherwise
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES if not family.only_by_class}


def classes_of(model_type: str) -> tuple[str, ...]:
    """Every class that config.json may name with `model_type`."""
    rows = sorted(
        (f for f in FAMILIES if f.model_type == model_type), key=lambda f: f.only_by_class
    )
    return tuple(name for family in rows for name in family.classes)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json by model_type and class; None for an unknown model_type."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str):
        return None
    for family in FAMILIES:
        if family.only_by_class and family.model_type == model_type:
            if isinstance(classes, list) and len(classes) == 1 and classes[0] in family.classes:
                return family
    return BY_MODEL_TYPE.get(model_type)


def model_type_of_class(name: object) -> str | None:
    """The one model_type whose checkpoints name the class `name`; None for none and for several."""
    found = {family.model_type for family in FAMILIES if name in family.classes}
    return found.pop() if len(found) == 1 else None
