"""An independent writer of tiny Hugging Face checkpoints: the source side of the converter's tests.

numpy, torch (for bfloat16) and safetensors only; it must never import bitnet_ops, because a
packing mistake shared by writer and reader would cancel out. Its packing is proved by golden
vectors in test_convert.py. A network is drawn from a seed that depends on the family's name alone:
the same bytes on every machine. Sources of the formats: transformers `integrations/bitnet.py`
(contiguous quarters, the two linear classes).
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Family:
    """One tiny architecture and the way its checkpoint is stored."""

    name: str
    model_type: str = "bitnet"  # "bitnet": relu2 and sub-norms; others: SiLU, no sub-norms
    hidden: int = 256
    inter: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 300
    tied: bool = True
    theta: float = 500000.0
    eps: float = 1e-5
    linear_class: str | None = "autobitlinear"  # None: the key is absent, which means "bitlinear"
    mode: str | None = "offline"  # None: the key is absent, which means "offline"
    dtype: str = "bfloat16"
    rope_spelling: str = "rope_theta"  # or "rope_parameters" (transformers v5)
    quantization_extra: dict = field(default_factory=dict)
    # what only some families have; see hf_families.py
    quantized: bool = True  # config.json has a quantization_config
    spelling: str = ""  # of sub-norms that model_type does not have: "1bitllm" or "subln"
    qk_norm: bool = False  # a norm on every head of queries and keys
    qkv_bias: bool = False  # biases of q, k and v
    inner_norms: str = ""  # a norm in every projection, called "norm" or "rms_norm"
    inner_eps: float = 1e-6
    sub_eps: float | None = None  # None: eps
    dense_ternary: bool = False  # weights stored as floating code * scale
    scale_blocks: bool = False  # several scales: by halves of o_proj's rows and down_proj's columns
    scale_groups: bool = False  # a scale for every 128 weights of a row
    architecture: str | None = None
    config_extra: dict = field(default_factory=dict)
    act: str = ""

    @property
    def sub_norms(self):
        return self.model_type == "bitnet" or bool(self.spelling)

    @property
    def activation(self):
        default = {"bitnet": "relu2", "gemma3_text": "gelu_pytorch_tanh"}
        return self.act or default.get(self.model_type, "silu")

    @property
    def gemma(self):
        return self.model_type == "gemma3_text"

    @property
    def headless(self):
        return (self.architecture or "").endswith("Model")

    @property
    def online(self):
        return self.mode == "online"

    @property
    def reciprocal(self):
        return self.linear_class in (None, "bitlinear")


def _bitnet(name, **options):
    return Family(name, **options)


def _llama(name, **options):
    defaults = {"model_type": "llama", "tied": False, "linear_class": None, "mode": None}
    return Family(name, **{**defaults, **options})


_SKIP_HEAD = {"modules_to_not_convert": ["lm_head"]}
FAMILIES = {
    f.name: f
    for f in (
        _bitnet("bitnet-offline"),
        _bitnet("bitnet-offline-untied", tied=False, rope_spelling="rope_parameters"),
        _bitnet("bitnet-offline-fp32", dtype="float32", mode=None, theta=10000.0),
        _bitnet("bitnet-bitlinear", linear_class="bitlinear"),
        _bitnet("bitnet-online", mode="online"),
        _bitnet("bitnet-online-untied-fp32", mode="online", tied=False, dtype="float32"),
        _bitnet("bitnet-odd-k", hidden=192, inter=320, heads=3, kv_heads=1),
        _bitnet("bitnet-odd-k-online", hidden=192, inter=320, heads=3, kv_heads=3, mode="online"),
        _llama("llama-bitlinear", linear_class="bitlinear", mode="offline", theta=10000.0),
        _llama("llama3-8b-like", kv_heads=1, eps=1e-5),
        _llama(
            "falcon3-like", hidden=192, theta=1000042.0, eps=1e-6, quantization_extra=_SKIP_HEAD
        ),
        _llama("falcon-e-like", kv_heads=1, theta=1000000.0, tied=True, dtype="float32"),
        _llama("llama-autobitlinear", linear_class="autobitlinear", mode="offline", heads=8),
        _llama("llama-online", linear_class="autobitlinear", mode="online", dtype="float16"),
    )
}


# Packing ------------------------------------------------------------------------------------


def pack_quarters(codes):
    """int array [M, K] in {-1, 0, 1} -> uint8 [ceil(M/4), K]; bit pair i holds the i-th quarter."""
    rows, columns = codes.shape
    quarter = -(-rows // 4)
    packed = np.zeros((quarter, columns), dtype=np.uint8)
    for row in range(rows):
        lane, target = divmod(row, quarter)
        packed[target] |= (codes[row] + 1).astype(np.uint8) << np.uint8(2 * lane)
    return packed


def unpack_strided(packed):
    """The classic WRONG reading, 4 * j + i for lane i of byte row j: for negative tests only."""
    lanes = [((packed >> np.uint8(2 * lane)) & 3).astype(np.int8) - 1 for lane in range(4)]
    return np.stack(lanes, axis=1).reshape(-1, packed.shape[1])


# The network --------------------------------------------------------------------------------


def projection_shapes(family):
    """{suffix: (out_features, in_features)} of the seven ternary projections of a layer."""
    query, key = family.heads * family.head_dim, family.kv_heads * family.head_dim
    return {
        "self_attn.q_proj": (query, family.hidden),
        "self_attn.k_proj": (key, family.hidden),
        "self_attn.v_proj": (key, family.hidden),
        "self_attn.o_proj": (family.hidden, query),
        "mlp.gate_proj": (family.inter, family.hidden),
        "mlp.up_proj": (family.inter, family.hidden),
        "mlp.down_proj": (family.hidden, family.inter),
    }


def norm_shapes(family):
    """{suffix: length} of the norms of a layer."""
    shapes = {"input_layernorm": family.hidden, "post_attention_layernorm": family.hidden}
    if family.sub_norms:
        shapes["self_attn.attn_sub_norm"] = family.heads * family.head_dim
        shapes["mlp.ffn_sub_norm"] = family.inter
    if family.gemma:
        shapes |= {f"{at}_feedforward_layernorm": family.hidden for at in ("pre", "post")}
    if family.qk_norm:
        shapes |= {"self_attn.q_norm": family.head_dim, "self_attn.k_norm": family.head_dim}
    if family.inner_norms:
        shapes |= {f"{n}.rms_norm": k for n, (_, k) in projection_shapes(family).items()}
    return shapes


def _rounded(array, dtype):
    """The float64 values that `array` has once stored in the named dtype."""
    return torch.from_numpy(array).to(DTYPES[dtype]).double().numpy()


def _projection(rng, family, shape):
    """What a checkpoint stores of one projection: masters, or codes with their absmean."""
    if family.online:
        return {"masters": _rounded(rng.normal(0, 0.02, shape), family.dtype)}
    codes = rng.choice(np.array([-1, 0, 1], dtype=np.int8), size=shape, p=[0.35, 0.31, 0.34])
    small = family.reciprocal or family.dense_ternary
    absmean = rng.uniform(0.02, 0.05) if small else rng.uniform(0.4, 1.8)
    stored = 1.0 / absmean if family.reciprocal and not family.dense_ternary else absmean
    return {"codes": codes, "stored_scale": float(_rounded(np.array([stored]), family.dtype)[0])}


def _gains(rng, family, suffix, length):
    """Norm gains; small ones before the attention where scales are near 1, as in the 2B-4T.

    Without that the softmax would be one-hot, and a last-bit difference could swap whole tokens.
    """
    large_scale = not (family.online or family.reciprocal or family.dense_ternary)
    before = "input_layernorm", "q_proj.rms_norm", "k_proj.rms_norm"
    if suffix.endswith(before) and large_scale:
        return rng.uniform(0.03, 0.1, length)
    stored = 1.0 if family.gemma and not suffix.endswith("rms_norm") else 0.0  # norms are 1 + w
    return rng.uniform(0.5, 1.5, length) - stored


def make_network(family):
    """{tensor name without .weight: float64 array, or the dict of _projection}."""
    rng = np.random.default_rng(zlib.crc32(family.name.encode()))
    network = {"model.embed_tokens": rng.normal(0, 0.02, (family.vocab, family.hidden))}
    for layer in range(family.layers):
        prefix = f"model.layers.{layer}."
        for suffix, shape in projection_shapes(family).items():
            network[prefix + suffix] = _projection(rng, family, shape)
        for suffix, length in norm_shapes(family).items():
            network[prefix + suffix] = _gains(rng, family, suffix, length)
        for name in ("q", "k", "v") if family.qkv_bias else ():
            suffix = f"self_attn.{name}_proj"
            rows = projection_shapes(family)[suffix][0]
            network[f"{prefix}{suffix}.bias"] = rng.normal(0, 0.3, rows)
    network["model.norm"] = rng.uniform(0.5, 1.5, family.hidden) - (1.0 if family.gemma else 0.0)
    if not family.tied and not family.headless:
        network["lm_head"] = rng.normal(0, 0.05, (family.vocab, family.hidden))
    return {
        name: value if isinstance(value, dict) else _rounded(value, family.dtype)
        for name, value in network.items()
    }


# Files --------------------------------------------------------------------------------------


def state_dict(family, network):
    """The tensors of model.safetensors, by their Hugging Face names."""
    dtype, tensors = DTYPES[family.dtype], {}
    for name, value in network.items():
        name = stored_name(family, name)
        if name.endswith(".bias"):
            tensors[name] = torch.from_numpy(value).to(dtype)
        elif not isinstance(value, dict):
            tensors[f"{name}.weight"] = torch.from_numpy(value).to(dtype)
        elif "masters" in value:
            tensors[f"{name}.weight"] = torch.from_numpy(value["masters"]).to(dtype)
        elif family.dense_ternary:
            dense = value["codes"] * dense_scales(family, name, value)
            tensors[f"{name}.weight"] = torch.from_numpy(dense).to(dtype)
        else:
            tensors[f"{name}.weight"] = torch.from_numpy(pack_quarters(value["codes"]))
            tensors[f"{name}.weight_scale"] = torch.tensor([value["stored_scale"]], dtype=dtype)
    return tensors


def dense_scales(family, name, projection):
    """The scale of every weight [N, K] of a dense ternary matrix."""
    scales = np.full(projection["codes"].shape, projection["stored_scale"])
    if family.scale_blocks and name.endswith("o_proj"):
        scales[len(scales) // 2 :] *= 2
    if family.scale_blocks and name.endswith("down_proj"):
        scales[:, scales.shape[1] // 2 :] *= 2
    if family.scale_groups:
        rows, columns = np.indices(scales.shape)
        scales *= 2.0 ** ((rows + columns // 128) % 3 - 1)  # powers of 2 stay exact in float16
    return scales


_SPELLINGS = {
    "": {},
    "1bitllm": {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"},
    "subln": {
        "self_attn.o_proj": "self_attn.o_proj.1",
        "mlp.down_proj": "mlp.down_proj.1",
        "self_attn.attn_sub_norm": "self_attn.o_proj.0",
        "mlp.ffn_sub_norm": "mlp.down_proj.0",
    },
}


def stored_name(family, name):
    """How the family's publishers spell the module `name` of the network."""
    for ours, theirs in _SPELLINGS[family.spelling].items():
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
            break
    if family.inner_norms:
        name = name.replace("_proj.rms_norm", f"_proj.{family.inner_norms}")
    return name.removeprefix("model.") if family.headless else name


def class_of(model_type):
    """transformers' class of causal models, as config.json names it."""
    names = {"bitnet": "BitNet", "gemma3_text": "Gemma3", "minicpm": "MiniCPM"}
    return names.get(model_type, model_type.capitalize()) + "ForCausalLM"


def config_dict(family):
    """config.json as the family's publishers write it."""
    quantization = {"quant_method": "bitnet", **family.quantization_extra}
    if family.linear_class is not None:
        quantization["linear_class"] = family.linear_class
    if family.mode is not None:
        quantization["quantization_mode"] = family.mode
    rope = {"rope_theta": family.theta}
    if family.rope_spelling == "rope_parameters":
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": family.theta}}
    if family.inner_norms == "rms_norm":
        quantization |= {"use_rms_norm": True, "rms_norm_eps": family.inner_eps}
    return {
        "architectures": [family.architecture or class_of(family.model_type)],
        "model_type": family.model_type,
        "vocab_size": family.vocab,
        "hidden_size": family.hidden,
        "intermediate_size": family.inter,
        "num_hidden_layers": family.layers,
        "num_attention_heads": family.heads,
        "num_key_value_heads": family.kv_heads,
        "head_dim": family.head_dim,
        "hidden_activation" if family.gemma else "hidden_act": family.activation,
        "max_position_embeddings": 512,
        "rms_norm_eps": family.eps,
        "tie_word_embeddings": family.tied,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": family.dtype,
        **({"quantization_config": quantization} if family.quantized else {}),
        **rope,
        **family.config_extra,
    }


def write_tensors(folder, tensors, shards=1):
    """model.safetensors, or `shards` files with their index, tensors dealt in sorted order."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map, size = {}, -(-len(names) // shards)
    for shard in range(shards):
        part = names[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder, vocab):
    """A byte-level tokenizer of 258 tokens: <s>, </s> and the 256 bytes; <s> is put first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert vocab >= len(alphabet) + 2, "the byte-level tokenizer needs 258 ids"
    ids = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [1]}')


def write_checkpoint(folder, family, *, shards=1, tokenizer=True, network=None):
    """Write the family's checkpoint into `folder` (made if absent); returns it as a Path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict(family), indent=1))
    write_tensors(folder, state_dict(family, network or make_network(family)), shards)
    if tokenizer:
        write_tokenizer(folder, family.vocab)
    return folder
