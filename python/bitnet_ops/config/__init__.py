"""ModelConfig: a Hugging Face config.json as the few numbers that fix the maths of a model.

Strict: a field that this package does not implement is rejected with its name, its value and a
remedy, and so is one it has never heard of, since that may change the maths; a field that merely
describes the file or the training is passed over. Sources: transformers 5
`configuration_{bitnet,llama,qwen2,qwen3}.py` (fields and defaults). It must not know torch,
tensors or files: a dict goes in, numbers come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bitnet_ops.config.attention import AttentionPolicy, read_policies
from bitnet_ops.config.draft import DraftConfig as DraftConfig
from bitnet_ops.config.families import (
    BY_MODEL_TYPE,
    ONEBIT,
    Family,
    classes_of,
    family_of,
)
from bitnet_ops.config.families import PROJECTIONS as PROJECTIONS
from bitnet_ops.config.hybrid import KEYS as HYBRID_KEYS
from bitnet_ops.config.hybrid import DeltaNet as DeltaNet
from bitnet_ops.config.hybrid import Rotation as Rotation
from bitnet_ops.config.hybrid import (
    flat,
    read_delta_net,
    read_rotary_dim,
    read_rotation,
    read_sections,
)
from bitnet_ops.config.keys import HARMLESS, MATHS, READ, REMARKS
from bitnet_ops.config.keys import PRIVATE_BLOCK as PRIVATE_BLOCK
from bitnet_ops.config.rope import RopeScaling as RopeScaling
from bitnet_ops.config.rope import read_rope
from bitnet_ops.config.scalings import KEYS as SCALING_KEYS
from bitnet_ops.config.scalings import WINDOW_KEYS, read_scalings, read_windows
from bitnet_ops.config.scalings import Scalings as Scalings
from bitnet_ops.config.scheme import KNOWN_KEYS, SchemeError, quantization_options
from bitnet_ops.config.sparsity import ActivationSparsity
from bitnet_ops.config.values import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    epsilon,
    flag,
    integer,
    reject,
)
from bitnet_ops.config.values import UnsupportedModelError as UnsupportedModelError


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one model; names as Hugging Face spells them, sizes in elements.

    `family`: the row of config/families.py that the model belongs to.
    `sub_norms`: RMSNorm on the attention output and on the MLP's product (the BitNet architecture),
    with `sub_norm_eps` (None: rms_norm_eps). `linear_norms`: RMSNorm on the input of each of the
    seven projections, with `linear_norm_eps`. `rope_scaling`: how rotary embedding is stretched to
    a long context, None: not at all. `rope_sections`: how many pairs of a head turn by time, height
    and width, where the model reads images (`ops.rope`).
    `scalings`: constant factors, and what single layers do otherwise (config/scalings.py).
    `windows`: of every layer how many positions a token sees, itself included, 0: all before it;
    empty where that is so in every layer (config/scalings.py).
    `delta_net`: the layers of Gated DeltaNet among those of attention, None: there are none.
    `partial_rotary`: features of a head that rotary embedding turns, the first ones; 0: all.
    `rotation`: matrices whose input gets a Hadamard transform, None: none
    (config/hybrid.py).
    `policies`: of every layer which positions its tokens read, where whoever loads the model asks
    for fewer than it was trained with (config/attention.py); empty: nobody does. `sparsity`: which
    inputs of `down` are left out, likewise (config/sparsity.py); None: none.
    `draft`: the MTP head whose keys and values the cache has too (config/draft.py), None: none.
    `embedding_only`: the model gives hidden states and has no head. `eos_token_ids`: every id that
    ends a text; may be empty. `notes`: remarks for the user.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    sub_norms: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sub_norm_eps: float | None = None
    linear_norms: bool = False
    linear_norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    rope_sections: tuple[int, int, int] | None = None
    embedding_only: bool = False
    scalings: Scalings = Scalings()
    windows: tuple[int, ...] = ()
    delta_net: DeltaNet | None = None
    partial_rotary: int = 0
    rotation: Rotation | None = None
    policies: tuple[AttentionPolicy | None, ...] = ()
    sparsity: ActivationSparsity | None = None
    draft: DraftConfig | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def model_type(self) -> str:
        """As config.json says it."""
        return self.family.model_type

    @property
    def qk_norm(self) -> bool:
        """RMSNorm on every head of queries and keys (Qwen3)."""
        return self.family.qk_norm

    @property
    def biases(self) -> tuple[str, ...]:
        """The projections of a layer that have one (Qwen2: q, k and v)."""
        return self.family.biases

    @property
    def post_norms(self) -> bool:
        """RMSNorm on what attention and MLP give, before it is added (Gemma 3)."""
        return self.family.post_norms

    @property
    def output_gate(self) -> bool:
        """Whether what attention gives is multiplied by sigmoid(gate) (Qwen3.5).

        Rows of q_proj are, head by head, those of the query and those of the gate.
        """
        return self.family.hybrid

    @property
    def rotary_dim(self) -> int:
        return self.partial_rotary or self.head_dim

    def is_delta_net(self, layer: int) -> bool:
        """Whether that layer is one of Gated DeltaNet."""
        return self.delta_net is not None and layer in self.delta_net.layers

    @property
    def attention_scale(self) -> float:
        """What multiplies the attention scores."""
        scale = self.scalings.attention
        return float(self.head_dim**-0.5) if scale is None else scale

    def window(self, layer: int) -> int:
        """How many positions a token of the layer sees, itself included; 0: all before it."""
        return self.windows[layer] if self.windows else 0

    def policy(self, layer: int) -> AttentionPolicy | None:
        """Which positions a token of that layer reads, unless all or those of `window`."""
        return self.policies[layer] if self.policies else None

    def with_attention(self, text: str) -> ModelConfig:
        """The same model under the policies of `text`. Raises AttentionPolicyError."""
        return replace(
            self, policies=read_policies(text, self.num_hidden_layers, self._own_attention)
        )

    def _own_attention(self, layer: int) -> str | None:
        if self.is_delta_net(layer):
            return "has no attention (Gated DeltaNet)"
        window = self.window(layer)
        return f"has a window of its own ({window} positions)" if window else None

    @property
    def mlp_norm(self) -> str:
        """The norm in front of the MLP; its usual name is that of another one in Gemma 3."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    @property
    def as_transformers(self) -> bool:
        """Whether transformers' class of model_type has just these norms, under these names."""
        return (
            not self.linear_norms
            and not self.embedding_only
            and not self.post_norms
            and self.scalings == Scalings()
            and self.rotation is None
            and self.sub_norm_eps is None
            and self.sub_norms == BY_MODEL_TYPE[self.model_type].sub_norms
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, ignore_unknown: bool = False) -> ModelConfig:
        """Read a config.json that has been parsed to a dict.

        ignore_unknown: leave out keys that are not known here, for what an engine holds, which adds
        its own to those of the file. Returns the config. Raises UnsupportedModelError for an
        architecture or option outside what is implemented, and for a missing, mistyped or
        inconsistent field.
        """
        if not isinstance(config, Mapping):
            raise UnsupportedModelError(
                f"config: expected a JSON object, got {type(config).__name__}; "
                "pass the parsed config.json of a causal language model"
            )
        config = flat(config)
        family = _family(config)
        _reject_other_maths(config, family)
        if not ignore_unknown:
            _reject_unknown(config, family)
        _check_quantization(config)
        _reject_dropped_neurons(config)
        fields, remarks = _fields(config, family)
        result = cls(**fields, notes=(*_notes(config), *remarks))
        _check_consistency(result)
        return result


# Architectures ------------------------------------------------------------------------------

_ACTIVATIONS = ("relu2", "silu", "gelu_pytorch_tanh")


def _family(config: Mapping[str, Any]) -> Family:
    """The family of config; rejects an architecture without an implementation."""
    model_type, family = config.get("model_type"), family_of(config)
    if family is None:
        raise reject(
            "model_type",
            model_type,
            "one of " + ", ".join(sorted(BY_MODEL_TYPE)),
            "other architectures are not implemented",
        )
    names, known = config.get("architectures"), classes_of(family.model_type)
    if names is not None and (
        not isinstance(names, list) or len(names) != 1 or names[0] not in known
    ):
        expected = " or ".join(f"[{name!r}]" for name in known)
        raise reject(
            "architectures",
            names,
            f"{expected} for {model_type}",
            "other architectures are not implemented",
        )
    for name, value in family.required.items():
        if config.get(name) != value:
            expected = f"{value} for {family.classes[0]}"
            raise reject(name, config.get(name), expected, "other widths do not run")
    return family


# Options that change the maths -----------------------------------------------------------------


def _keys_of(family: Family) -> frozenset[str]:
    """Keys that the family gives a meaning."""
    hybrid = HYBRID_KEYS if family.hybrid else frozenset()
    return SCALING_KEYS[family.scalings] | WINDOW_KEYS[family.windows] | hybrid


def _reject_other_maths(config: Mapping[str, Any], family: Family) -> None:
    for name in ONEBIT.required:
        if config.get(name) is not None and family != ONEBIT:
            remedy = "that key belongs to the 1bitLLM architecture"
            raise reject(name, config[name], "to be absent for this architecture", remedy)
    read = _keys_of(family)
    for name, (allowed, meaning) in MATHS.items():
        value = None if name in read else config.get(name)
        if value is not None and value not in allowed:
            expected = f"to be absent or {allowed[0]!r}" if allowed else "to be absent"
            raise reject(name, value, expected, f"it asks for {meaning}, which is not implemented")
    if "sliding_window" in read:
        return
    if config.get("use_sliding_window", True) and config.get("sliding_window") is not None:
        remedy = "this architecture has no sliding windows: which layers they are of is not clear"
        raise reject("sliding_window", config["sliding_window"], "to be absent", remedy)
    if family.hybrid:
        return
    kinds = config.get("layer_types")
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if kinds is not None and not full:
        raise reject(
            "layer_types",
            kinds,
            "to hold only 'full_attention'",
            "other kinds of attention layers are not implemented",
        )


def _check_quantization(config: Mapping[str, Any]) -> None:
    """Reject what quantization_config may ask for beyond ternary weights with one scale each."""
    block = config.get("quantization_config")
    if block is None:
        return
    try:
        quantization_options(block)
        for name in sorted(set(block) - KNOWN_KEYS):
            if block[name] is not None:
                raise reject(f"quantization_config.{name}", block[name], "to be absent", _UNKNOWN)
    except SchemeError as error:
        raise UnsupportedModelError(f"config: quantization_config: {error}") from None
    asked = block.get("use_rms_norm")
    if asked not in (None, False, True):
        raise reject(
            "quantization_config.use_rms_norm",
            asked,
            "False or True",
            "other quantisations are not implemented: convert a BitNet b1.58 checkpoint",
        )


def _reject_dropped_neurons(config: Mapping[str, Any]) -> None:
    """Reject a model.bin of an earlier converter that left out rows of its MLPs."""
    block = config.get(PRIVATE_BLOCK)
    if isinstance(block, Mapping) and block.get("dropped_neurons") is not None:
        raise reject(
            f"{PRIVATE_BLOCK}.dropped_neurons",
            str(block["dropped_neurons"])[:60],
            "to be absent",
            "files that leave out neurons are no longer read: convert the source again",
        )


# Fields --------------------------------------------------------------------------------------


def _token_ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    values = [] if value is None else value if isinstance(value, list) else [value]
    for v in values:
        if not isinstance(v, int) or isinstance(v, bool) or v < 0:
            raise reject(name, value, "to be a token id or a list of them", "repair config.json")
    return tuple(dict.fromkeys(values))


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, default: int | None) -> int:
    if config.get("head_dim") is not None or default is not None:
        return integer(config, "head_dim", default, MAX_HEAD_DIM)
    if hidden % heads:
        raise reject(
            "hidden_size",
            hidden,
            f"to be a multiple of num_attention_heads {heads}",
            "or state head_dim in config.json",
        )
    return integer({"head_dim": hidden // heads}, "head_dim", maximum=MAX_HEAD_DIM)


def _activation(config: Mapping[str, Any], family: Family) -> object:
    """By the key that the family's class reads; hidden_act must not contradict another one."""
    if family.scalings != "gemma3_text":
        return config.get("hidden_act") or family.hidden_act
    read = config.get("hidden_activation") or family.hidden_act
    if config.get("hidden_activation") is None and config.get("hidden_act") not in (None, read):
        raise reject(
            "hidden_act",
            config["hidden_act"],
            f"to be absent or {read!r} where hidden_activation is absent",
            "this architecture reads hidden_activation alone: state there which one is meant",
        )
    return read


def _fields(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(fields of ModelConfig, remarks on them)."""
    heads = integer(config, "num_attention_heads")
    hidden = integer(config, "hidden_size")
    act = _activation(config, family)
    if act not in _ACTIVATIONS:
        raise reject(
            "hidden_act", act, "one of " + ", ".join(_ACTIVATIONS), "others are not implemented"
        )
    bos = _token_ids(config, "bos_token_id")
    found = _private(config)
    kv_heads = None if family.kv_heads_needed else heads
    classes = config.get("architectures")
    only_embeds = classes is not None and classes[0].endswith("Model")
    head_dim = _head_dim(config, hidden, heads, family.head_dim)
    positions = integer(config, "max_position_embeddings", family.positions)
    windows = read_windows(config, family.windows)
    scalings, config = read_scalings(config, family.scalings, hidden)
    rotary_dim, sections = head_dim, None
    if family.hybrid:
        given = config
        rotary_dim, config = read_rotary_dim(given, head_dim)
        sections = read_sections(given, rotary_dim)
    theta, scaling, remarks = read_rope(config, family.rope_theta, rotary_dim, positions)
    fields = {
        "family": family,
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(config, "intermediate_size"),
        "num_hidden_layers": integer(config, "num_hidden_layers", maximum=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(config, "num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "hidden_act": act,
        "rms_norm_eps": epsilon(config, "rms_norm_eps", family.rms_norm_eps),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_sections": sections,
        "max_position_embeddings": positions,
        "tie_word_embeddings": only_embeds or flag(config, "tie_word_embeddings", family.tied),
        "embedding_only": only_embeds,
        "scalings": scalings,
        "windows": windows,
        "delta_net": read_delta_net(config) if family.hybrid else None,
        "partial_rotary": 0 if rotary_dim == head_dim else rotary_dim,
        "rotation": read_rotation(found) if family.hybrid else None,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": _token_ids(config, "eos_token_id"),
        **_norms_and_biases(config, family),
    }
    return fields, remarks


def _private(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a converter has written of the model; may be empty."""
    found = config.get(PRIVATE_BLOCK) or {}
    if not isinstance(found, Mapping):
        raise reject(PRIVATE_BLOCK, str(found)[:60], "to be an object", "convert the model again")
    return found


def _norms_and_biases(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Which norms and biases a layer has: by the architecture, and by what a converter has found.

    The names of a checkpoint's tensors may show norms that no field of its config.json mentions;
    the converter then writes them into the private block.
    """
    found = _private(config)
    quantization = config.get("quantization_config") or {}
    asked = quantization.get("use_rms_norm") or False
    eps = epsilon(quantization, "rms_norm_eps", 1e-6) if asked else 1e-6
    sub_eps = found.get("sub_norm_eps")
    return {
        "sub_norms": flag(found, "sub_norms", family.sub_norms),
        "sub_norm_eps": None if sub_eps is None else epsilon(found, "sub_norm_eps", 1e-6),
        "linear_norms": flag(found, "linear_norms", asked),
        "linear_norm_eps": epsilon(found, "linear_norm_eps", eps),
    }


def _check_consistency(c: ModelConfig) -> None:
    """Relations between fields that no single field shows."""
    if c.num_attention_heads % c.num_key_value_heads:
        raise reject(
            "num_attention_heads",
            c.num_attention_heads,
            f"to be a multiple of num_key_value_heads {c.num_key_value_heads}",
            "repair config.json",
        )
    if c.head_dim % 2:
        raise reject("head_dim", c.head_dim, "to be even", "rotary embedding turns pairs")
    if c.sub_norms and c.num_attention_heads * c.head_dim != c.hidden_size:
        raise reject(
            "head_dim",
            c.head_dim,
            f"to be hidden_size / num_attention_heads = {c.hidden_size} / {c.num_attention_heads}",
            "attn_sub_norm has hidden_size gains in the bitnet architecture",
        )
    ids = [*c.eos_token_ids, *([] if c.bos_token_id is None else [c.bos_token_id])]
    if any(i >= c.vocab_size for i in ids):
        raise reject(
            "bos_token_id and eos_token_id",
            ids,
            f"below vocab_size {c.vocab_size}",
            "repair config.json",
        )


# Everything else ------------------------------------------------------------------------------

_UNKNOWN = (
    "it is not known here and may change what the model computes; only if it does not, remove it"
)


def _reject_unknown(config: Mapping[str, Any], family: Family) -> None:
    """Reject a key that is neither read nor known to be harmless; null says nothing."""
    known = READ | HARMLESS | MATHS.keys() | REMARKS.keys() | _keys_of(family)
    for name, value in config.items():
        if value is not None and name not in known:
            raise reject(name, str(value)[:60], "to be absent", _UNKNOWN)


def _notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Remarks on keys that do not hinder, but say something of the model."""
    notes = []
    if config["model_type"] == "bitnet" and config.get("architectures") == ["BitnetForCausalLM"]:
        notes.append(
            "architectures BitnetForCausalLM: the spelling of block-diffusion models; this one is "
            "run as an ordinary causal model"
        )
    notes += [
        f"config key {name} = {str(config[name])[:60]}: {remark}"
        for name, remark in REMARKS.items()
        if config.get(name) is not None
    ]
    return tuple(notes)
