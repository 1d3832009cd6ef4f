"""What a GGUF file's metadata says of the model: architecture, config.json, names of the tensors.

Architectures are rows of config/families.py; every key that would change the maths is either read
or rejected here. Sources: llama.cpp `llama-arch.cpp`, `llama-context.cpp`, `ggml.c` (rope_yarn) and
`convert_hf_to_gguf.py`; Microsoft's fork for bitnet-b1.58 and bitnet-25. Reads no data of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bitnet_ops.config import RopeScaling
from bitnet_ops.config.families import FAMILIES, Family
from bitnet_ops.config.scalings import FULL, SLIDING
from bitnet_ops.convert import hybrid
from bitnet_ops.convert.errors import listed, reject, shown
from bitnet_ops.convert.gguf_tokenizer import LLAMA3_TOKEN
from bitnet_ops.formats.gguf import OXIBONSAI_KEYS, is_strings

# Rotary embedding: rope.scaling.* and tensors of factors -> rope_scaling --------------------------

FREQUENCIES = "rope_freqs.weight"  # of any kind; the other two are longrope's
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FREQUENCIES, LONG, SHORT)
_ATTENTION = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
_BETAS = ("yarn_beta_fast", "yarn_beta_slow")
ROPE_READ = {
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", *_ATTENTION,
    *(f"rope.scaling.{beta}" for beta in _BETAS),
}  # fmt: skip
# key -> the values that leave the maths as here
ROPE_FIXED: dict[str, tuple[Any, ...]] = {
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_KINDS = ("none", "linear", "yarn", "longrope")


class Keys(Protocol):
    """The keys of one architecture."""

    def __contains__(self, key: str) -> bool: ...
    def name(self, key: str) -> str: ...
    def text(self, key: str, default: str) -> str: ...
    def integer(self, key: str, default: int | None = None) -> int: ...
    def decimal(self, key: str, default: float | None = None) -> float: ...


def rope_scaling(
    keys: Keys, context: int, factors: Mapping[str, list[float]]
) -> dict[str, Any] | None:
    """rope_scaling as config.json has it, None for plain; `factors`: the tensors, by name."""
    kind = keys.text("rope.scaling.type", "longrope" if LONG in factors else "linear")
    if kind not in _KINDS:
        expected = f"{keys.name('rope.scaling.type')} among {', '.join(_KINDS)}"
        reject("gguf-maths", expected, shown(kind), "it asks for maths that is not implemented")
    stated = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    factor = keys.decimal(stated, 1.0)
    attention = math.prod(keys.decimal(key, 1.0) for key in _ATTENTION)
    original = context
    if kind in ("yarn", "longrope"):
        original = keys.integer("rope.scaling.original_context_length", context)
    if factors:
        return _by_tensors(kind, factor, attention, original, factors)
    if kind == "longrope":
        reject("missing-tensor", f"{LONG} and {SHORT}, as longrope has them", "no such tensor")
    if kind == "yarn":
        found: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
        for beta in _BETAS:
            if f"rope.scaling.{beta}" in keys:
                found[beta.removeprefix("yarn_")] = keys.decimal(f"rope.scaling.{beta}")
        if attention != 1:
            found["attention_factor"] = attention * (0.1 * math.log(max(factor, 1)) + 1)
        return {"rope_type": "yarn", **found}
    if attention != 1:
        expected = f"{keys.name(_ATTENTION[0])} of 1 with rope scaling {kind}"
        reject("gguf-maths", expected, str(attention), "it asks for maths that is not implemented")
    if kind == "none" or factor == 1:
        return None
    return {"rope_type": "linear", "factor": factor}


def _by_tensors(
    kind: str, factor: float, attention: float, original: int, factors: Mapping[str, list[float]]
) -> dict[str, Any] | None:
    """Divisors of every frequency, in config.json's words a longrope of equal lists or of two."""
    names = set(factors)
    if names not in ({FREQUENCIES}, {LONG, SHORT}):
        reject(
            "gguf-maths", f"{FREQUENCIES} alone, or {LONG} and {SHORT}", ", ".join(sorted(names))
        )
    if kind == "yarn" or factor != 1:
        found = f"{', '.join(sorted(names))} with scaling {kind} by {factor:g}"
        reject("gguf-maths", "factors of frequencies or a scaling factor", found,
               "both at once are not implemented")  # fmt: skip
    long, short = (factors.get(name, factors.get(FREQUENCIES, [])) for name in (LONG, SHORT))
    if set(long) == set(short) == {1.0} and attention == 1:
        return None
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def exported(scaling: RopeScaling | None, prefix: str) -> dict[str, tuple[str, Any]]:
    """The keys that say the same; ConvertError for what they cannot say."""
    if scaling is None:
        return {}
    whole = RopeScaling(
        scaling.kind, scaling.factor, scaling.original, beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
    )  # fmt: skip
    if scaling.kind not in ("linear", "yarn") or scaling != whole:
        found = f"{scaling.kind} with options that they have no words for"
        reject("gguf-rope", "rope_scaling of GGUF's keys, linear or yarn", found)
    keys: dict[str, tuple[str, Any]] = {
        "type": ("string", scaling.kind),
        "factor": ("float32", scaling.factor),
    }
    if scaling.kind == "yarn":
        keys["original_context_length"] = ("uint32", scaling.original)
        keys["yarn_beta_fast"] = ("float32", scaling.beta_fast)
        keys["yarn_beta_slow"] = ("float32", scaling.beta_slow)
    return {f"{prefix}.rope.scaling.{key}": value for key, value in keys.items()}


# The model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp or bitnet.cpp names a model of `family`."""

    name: str
    family: Family

    @property
    def permuted(self) -> bool:
        """Whether the rows of q and k are in the order of interleaved rotary embedding."""
        return self.family.gguf_permuted

    @property
    def layer_names(self) -> dict[str, str]:
        """Names of a layer's tensors, GGUF -> Hugging Face."""
        shared = _LAYER
        if self.family.hybrid:  # which has another name for the norm before the MLP
            shared = {ours: hf for ours, hf in _LAYER.items() if ours != "ffn_norm"}
        return {
            **shared,
            **(_SUB_NORMS if self.family.sub_norms else {}),
            **(_QK_NORMS if self.family.qk_norm else {}),
            **(hybrid.GGUF_NAMES if self.family.hybrid else {}),
        }

    @property
    def whole_names(self) -> dict[str, str]:
        """Names of tensors that do not end as others do, GGUF -> Hugging Face."""
        return hybrid.GGUF_WHOLE_NAMES if self.family.hybrid else {}

    @property
    def config(self) -> dict[str, Any]:
        """What is fixed in config.json."""
        return {
            "model_type": self.family.model_type,
            "architectures": [self.family.classes[0]],
            "hidden_act": self.family.hidden_act,
            **self.family.required,
        }


ARCHITECTURES = {name: Architecture(name, family) for family in FAMILIES for name in family.gguf}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SUB_NORMS = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PERMUTED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")

# Keys of an architecture that change the maths: the values that leave it as implemented.
_MATHS: dict[str, tuple[Any, ...]] = {
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    **ROPE_FIXED,
}
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "hidden_activation", _WINDOW, _PATTERN, *ROPE_READ,
}  # fmt: skip
SCALING_KEYS = frozenset({"embedding_scale", "residual_scale", "logit_scale"})  # of minicpm
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout", "decoder_start_token_id"}
# Namespaces of the file rather than of the model, and of the tokenizer, which is read elsewhere.
_NAMESPACES = (
    *("general.", "tokenizer.", "split.", "quantize.", "imatrix.", "mradermacher."),
    "bitnet_ops.",
)
# What general.* says of a file and of where it comes from; general.sampling.* is read.
_GENERAL = {
    *"alignment architecture author basename description doi file_type finetune languages".split(),
    *"license license.link license.name name organization".split(),
    *"quantization_version quantized_by repo_url size_label source tags type url uuid".split(),
    *"version".split(),
}
_GENERAL_PARTS = ("base_model.", "dataset.", "datasets", "sampling.", "source.")
# GGUF's names of activations -> config.json's
_ACTIVATIONS = {"relu_sqr": "relu2", "squared_relu": "relu2", "swiglu": "silu", "swish": "silu"}

# What to do with the file of an architecture that is read in another form.
_CHECKPOINT = (
    "convert the Hugging Face checkpoint: the norms inside projections have no settled names"
)
_ELSEWHERE = {"gemma3": _CHECKPOINT, "gemma-embedding": _CHECKPOINT}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture of a file; ConvertError for one that is not implemented."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reject(
            "gguf-architecture",
            f"general.architecture among {', '.join(ARCHITECTURES)}",
            shown(name),
            _ELSEWHERE.get(str(name), "other architectures are not implemented"),
        )
    if (kind := metadata.get("general.type", "model")) != "model":
        reject("gguf-kind", "a file of general.type model", shown(kind))
    parts = metadata.get("split.count", 0)
    if type(parts) is not int or parts not in (0, 1):
        reject(
            "gguf-split",
            "a model in one file",
            f"one of {str(parts)[:40]} parts",
            "join them with llama-gguf-split --merge",
        )
    return ARCHITECTURES[name]


def decoder_layers(metadata: Mapping[str, Any], architecture: Architecture) -> tuple[int, int]:
    """Layers of the decoder, and blocks of the file: with those that draft tokens."""
    keys = _Keys(metadata, architecture)
    return hybrid.gguf_layers(keys), keys.integer("block_count")


def hf_config(
    metadata: Mapping[str, Any],
    architecture: Architecture,
    vocab_size: int,
    tied: bool,
    factors: Mapping[str, list[float]],
) -> tuple[dict[str, Any], list[str]]:
    """(config.json as a dict, remarks).

    `vocab_size`: the number of rows of the embedding; `factors`: the values of the tensors that
    stretch rotary embedding, by name.
    """
    keys = _Keys(metadata, architecture)
    keys.reject_other_maths()
    remarks = unknown_general(metadata)
    stated = keys.integer("vocab_size", vocab_size)
    if stated != vocab_size:
        found = f"{vocab_size} rows of token_embd.weight"
        reject("gguf-metadata", f"{keys.name('vocab_size')} {stated} rows", found)
    hidden, heads = keys.integer("embedding_length"), keys.per_layer("attention.head_count")
    config = {
        **architecture.config,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": keys.per_layer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.per_layer("attention.head_count_kv", heads),
        "head_dim": keys.head_dim(hidden, heads, partial=architecture.family.hybrid),
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": tied,
        "hidden_act": keys.activation(architecture.family.hidden_act),
    }
    if architecture.family.scalings == "minicpm":
        config |= keys.minicpm(hidden, config["num_hidden_layers"])
    config |= keys.windows(architecture.family, config["num_hidden_layers"])
    if architecture.family.hybrid:
        config |= hybrid.gguf_config(keys, config["head_dim"])
        remarks += keys.tower()
    if "rope.freq_base" not in keys:
        remarks.append("rope.freq_base is absent: 10000, as llama.cpp takes it")
    config["rope_theta"] = keys.decimal("rope.freq_base", 10000.0)
    scaling = rope_scaling(keys, config["max_position_embeddings"], factors)
    if scaling is not None:
        config["rope_scaling"] = config.get("rope_scaling", {}) | scaling
    config |= special_ids(metadata, vocab_size)
    return config, remarks


def unknown_general(metadata: Mapping[str, Any]) -> list[str]:
    """One note on the keys general.* that are not known to describe the file alone."""
    names = [name.removeprefix("general.") for name in metadata if name.startswith("general.")]
    unknown = [n for n in names if n not in _GENERAL and not n.startswith(_GENERAL_PARTS)]
    if not unknown:
        return []
    return [f"general.* says what is not known here and is ignored: {listed(sorted(unknown))}"]


def special_ids(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """bos_token_id and eos_token_id of config.json; a turn's end (eot) ends a text too."""

    def token(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
            reject("gguf-metadata", f"{name}_token_id below {vocab_size}", shown(value, 40))
        return value

    ends = [e for e in (token("eos"), token("eot"), token("eom")) if e is not None]
    ends = list(dict.fromkeys(ends))
    return {"bos_token_id": token("bos"), "eos_token_id": ends[0] if len(ends) == 1 else ends}


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def sampling_keys(sampling: Mapping[str, float]) -> dict[str, tuple[str, Any]]:
    """The keys general.sampling.* of a GenerationConfig's options; without a temperature, 0."""
    if not sampling:
        return {}
    stated = {"temperature": 0.0, **sampling}
    return {
        f"general.sampling.{key}": ("int32" if hf == "top_k" else "float32", stated[hf])
        for key, hf in _SAMPLING.items()
        if hf in stated
    }


def generation_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json says of sampling, of the keys general.sampling.*."""
    stated = {hf: metadata.get(f"general.sampling.{key}") for key, hf in _SAMPLING.items()}
    found = {
        name: shortest(value) if isinstance(value, float) else value
        for name, value in stated.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return {"do_sample": found.get("temperature") != 0, **found} if found else {}


def hf_name(name: str, architecture: Architecture) -> str | None:
    """The Hugging Face name of a tensor, None for one that the architecture does not have."""
    layer, _, inside = name.removeprefix("blk.").partition(".")
    whole = architecture.whole_names.get(inside)
    if whole is not None and name.startswith("blk.") and layer.isascii() and layer.isdigit():
        return f"model.layers.{int(layer)}.{whole}"
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias", "scale"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk" or not parts[1].isascii() or not parts[1].isdigit():
        return None
    inner = architecture.layer_names.get(parts[2])
    return None if inner is None else f"model.layers.{int(parts[1])}.{inner}.{kind}"


def gguf_name(name: str, architecture: Architecture) -> str:
    """The GGUF name of a Hugging Face tensor of `architecture`; KeyError for an unknown one."""
    stem, _, kind = name.rpartition(".")
    top = {hf: ours for ours, hf in _TOP.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    whole = {hf: ours for ours, hf in architecture.whole_names.items()}
    _, _, layer, inner = name.split(".", 3)
    if inner in whole:
        return f"blk.{layer}.{whole[inner]}"
    inner = inner.removesuffix(f".{kind}")
    names = {hf: ours for ours, hf in architecture.layer_names.items()}
    return f"blk.{layer}.{names[inner]}.{kind}"


def head_rows(rows: int, head_dim: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For every Hugging Face row of q or k, the row of the permuted GGUF matrix that holds it.

    Within a head of size d, GGUF row 2p + s is Hugging Face row s * d/2 + p.
    """
    inside = np.arange(head_dim)
    half = head_dim // 2
    source = 2 * (inside % half) + inside // half
    return (np.arange(0, rows, head_dim)[:, None] + source).reshape(-1)


class _Keys:
    """The keys of one architecture, each checked as it is read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: Architecture) -> None:
        self._metadata, self._prefix = metadata, architecture.name
        self._hybrid = architecture.family.hybrid

    def name(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self._metadata

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self.name(key), default)
        if value is None:
            reject("gguf-metadata", f"{self.name(key)} in the metadata", "no such key")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not minimum <= value < 2**31:
            reject("gguf-metadata", f"{self.name(key)} as a positive integer", shown(value))
        return value

    def array(self, key: str) -> list[Any] | None:
        """An array of integers or flags, None where there is none."""
        value = self._metadata.get(self.name(key))
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biu":
            reject("gguf-metadata", f"{self.name(key)} as an array of integers", shown(value))
        return value.tolist()

    def tower(self) -> list[str]:
        """A remark on keys of a tower for images."""
        keys = [key for key in self._metadata if key.startswith(self._tower)]
        return [f"{len(keys)} keys of a tower for images ignored"] if keys else []

    @property
    def _tower(self) -> tuple[str, ...]:
        return (self.name("vision."), "clip.") if self._hybrid else ()

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            reject("gguf-metadata", f"{self.name(key)} as a string", shown(value))
        return value

    def per_layer(self, key: str, default: int | None = None) -> int:
        """An integer, or an array that repeats one for every layer."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                expected = f"one {self.name(key)} for all layers"
                reject("gguf-metadata", expected, shown(value))
            value = int(value[0])
        if type(value) is not int or not 0 < value < 2**31:
            reject("gguf-metadata", f"{self.name(key)} as a positive integer", shown(value))
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            reject("gguf-metadata", f"{self.name(key)} as a number above 0", shown(value))
        return shortest(float(value))

    def head_dim(self, hidden: int, heads: int, *, partial: bool = False) -> int:
        """The size of a head, which three keys may state; they must agree.

        `partial`: the third states how much of it is turned.
        """
        keys = ["attention.key_length", "attention.value_length"]
        keys += [] if partial else ["rope.dimension_count"]
        stated = {self.name(key): self.integer(key) for key in keys if key in self}
        if not stated and hidden % heads == 0:
            return hidden // heads
        if len(set(stated.values())) != 1:
            expected = f"one size of a head in {', '.join(map(self.name, keys))}"
            reject("gguf-metadata", expected, repr(stated))
        return next(iter(stated.values()))

    def minicpm(self, hidden: int, layers: int) -> dict[str, float]:
        """MiniCPM's factors as config.json has them: residual_scale is by the depth already, and
        logit_scale divides. None has a default, since converters of several years wrote others.
        """
        return {
            "scale_emb": self.decimal("embedding_scale"),
            "scale_depth": self.decimal("residual_scale") * math.sqrt(layers),
            "dim_model_base": hidden / self.decimal("logit_scale"),
        }

    def windows(self, family: Family, layers: int) -> dict[str, Any]:
        """Sliding windows as config.json has them.

        A window that no text outgrows is none. Another one needs a flag for each layer, as
        llama.cpp has them where any layers may have windows; a number there, of the layers of a
        period, it reads in two ways.
        """
        window, context = self._get(_WINDOW, 0), self.integer("context_length")
        if type(window) is not int or window < 0:
            reject("gguf-metadata", f"{self.name(_WINDOW)} as an integer", shown(window))
        if window == 0 or window >= context:
            return {}
        if not family.windows:
            expected = f"{self.name(_WINDOW)} to be absent, 0 or at least the context of {context}"
            reject("gguf-maths", expected, shown(window), "this architecture has no windows: which "
                   "layers it is of is not clear")  # fmt: skip
        flags = self._metadata.get(self.name(_PATTERN))
        if not isinstance(flags, np.ndarray) or flags.dtype != bool or len(flags) != layers:
            expected = f"{self.name(_PATTERN)} as a flag for each of {layers} layers"
            reject("gguf-maths", expected, shown(flags), "which layers have a window is not "
                   "clear")  # fmt: skip
        kinds = [SLIDING if flag else FULL for flag in flags.tolist()]
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}

    def activation(self, default: str) -> str:
        """hidden_act of config.json.

        Files of "bitnet" are SiLU's where they say nothing; BitNet 2B-4T, whose activation is
        relu2, has been written under that name too, and has Llama 3's vocabulary.
        """
        key = "hidden_activation"
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        llama3 = is_strings(tokens) and LLAMA3_TOKEN in tokens
        if key not in self and self._prefix == "bitnet" and llama3:
            reject("gguf-maths", f"{self.name(key)}, since models of Llama 3's vocabulary have "
                   "been trained with silu and with relu2", "no such key", "convert the Hugging "
                   "Face checkpoint, whose config.json says it")  # fmt: skip
        name = self.text(key, default)
        return _ACTIVATIONS.get(name, name)

    def reject_other_maths(self) -> None:
        """Reject every key that asks for other maths or that is not known to leave it alone."""
        own = SCALING_KEYS if self._prefix == "minicpm" else frozenset()
        own |= hybrid.GGUF_KEYS if self._hybrid else frozenset()
        beside = hybrid.HADAMARD_KEYS if self._hybrid else frozenset()
        unknown = []
        for full, value in self._metadata.items():
            key = full.removeprefix(f"{self._prefix}.")
            if full.startswith((*_NAMESPACES, *self._tower)) or full in {*OXIBONSAI_KEYS, *beside}:
                continue
            if key != full and (key in _READ or key in _HARMLESS or key in own):
                continue
            if key == full or key not in _MATHS:
                unknown.append(full)
            elif is_strings(value) or isinstance(value, np.ndarray) or value not in _MATHS[key]:
                expected = f"{full} to be absent or {_MATHS[key][0]!r}"
                reject("gguf-maths", expected, shown(value), "it asks for maths that is not "
                       "implemented")  # fmt: skip
        if unknown:
            reject("gguf-key", "metadata keys that are known here", listed(unknown), "they may "
                   "change what the model computes; only if they do not, remove them "
                   "(gguf-new-metadata --remove-metadata, of the gguf package)")  # fmt: skip


def shortest(value: float) -> float:
    """The float that a person wrote when float32 made it `value`: 1e-5 for 9.99999974e-06."""
    with np.errstate(over="ignore"):  # a warning would show where this file lies
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value
