"""Spoilt calls of decode_step, and what each is rejected with."""

from __future__ import annotations

import torch
from torch import Tensor

from op_changes import F64, to
from op_spec import Change, Named, Rejections
from op_values import strided
from ops_attention import OF_KV_TYPES

GAINS_2 = torch.ones(426)  # of the good call with two dropped neurons


def replaced(index: int, new: Tensor) -> Change:
    return lambda a: [new if i == index else w for i, w in enumerate(a["weights"])]


def _scales(a: Named) -> Tensor:
    return torch.ones(a["key_cache"].shape[:-1])


_INT8: dict[str, Change] = {  # what makes the good call one with int8 caches
    "key_cache": to("key_cache", torch.int8), "value_cache": to("value_cache", torch.int8),
    "key_scale": _scales, "value_scale": _scales,
}  # fmt: skip
DECODE_STEP_REJECTIONS: Rejections = [
    ({"x": lambda a: a["x"].double()}, "x", "of dtype float32, got float64"),
    ({"x": lambda a: a["x"][0]}, "x", "with 3 dimensions"),
    ({"x": lambda a: a["x"][:1]}, "key_cache", "with the 1 sequences of x"),
    ({"x": lambda a: a["x"][..., :0]}, "x", "at least one feature"),
    ({"x": lambda a: a["x"][..., :40]}, "head_weight", "of shape [37, 40], got [37, 70]"),
    ({"weights": replaced(0, torch.zeros(64, 64, dtype=torch.uint8))}, "weights (q)", "a row"),
    ({"weights": lambda a: a["weights"][:-1]}, "weights", "each of the cache's 1 layers, got 6"),
    ({"weights": replaced(3, torch.zeros(4))}, "weights (o)", "of dtype uint8"),
    ({"weights": replaced(5, torch.zeros(9, 32, dtype=torch.uint8))}, "weights (up)", "150 rows"),
    ({"scales": lambda a: a["scales"][:, :6]}, "scales", "of shape [1, 7]"),
    ({"scales": lambda a: strided(a["scales"])}, "scales", "contiguous"),
    ({"scales": lambda a: a["scales"].double()}, "scales", "of dtype float32"),
    ({"norm_weights": lambda a: a["norm_weights"][1:]}, "norm_weights", "of shape [424]"),
    ({"sub_norms": lambda a: False}, "norm_weights", "of shape [210]"),
    ({"logits_to_keep": lambda a: -1}, "logits_to_keep", "at least 0, got -1"),
    ({"norm_weights": lambda a: a["norm_weights"].bfloat16()}, "norm_weights", "of dtype float32"),
    ({"head_weight": lambda a: a["head_weight"][1:]}, "vocab_size", "the 36 rows of head_weight"),
    ({"head_weight": lambda a: a["head_weight"].double()}, "head_weight", "float32"),
    ({"head_scale": lambda a: torch.ones(37)}, "head_scale", "left out"),
    (
        {"head_weight": lambda a: torch.zeros(2, 16, 64, dtype=torch.uint8)},
        "vocab_size", "2 tiles of 16",
    ),
    ({"vocab_size": lambda a: 36}, "vocab_size", "the 37 rows of head_weight, got 36"),
    ({"key_cache": to("key_cache", F64)}, "key_cache", OF_KV_TYPES + "float64"),
    ({"key_cache": lambda a: a["key_cache"].mT.contiguous().mT}, "key_cache", "contiguous within"),
    ({"key_cache": lambda a: a["key_cache"][0]}, "key_cache", "with 5 dimensions"),
    ({"key_cache": lambda a: a["value_cache"]}, "value_cache", "in its own memory"),
    ({"value_cache": lambda a: a["value_cache"].bfloat16()}, "value_cache", "of dtype float32"),
    ({"value_cache": lambda a: a["value_cache"][..., :-2]}, "value_cache", "contiguous within"),
    ({"start_positions": lambda a: torch.tensor([0, 12])}, "start_positions", "12 for sequence 1"),
    ({"start_positions": lambda a: torch.tensor([-1, 1])}, "start_positions", "-1 for sequence 0"),
    ({"start_positions": lambda a: torch.tensor([0])}, "start_positions", "of shape [2]"),
    ({"start_positions": lambda a: torch.zeros(2)}, "start_positions", "of dtype int64"),
    ({"dtype": lambda a: torch.float16}, "dtype", "float32 or bfloat16, got float16"),
    ({"num_heads": lambda a: 3}, "num_heads", "a multiple of the cache's 2 heads, got 3"),
    ({"num_heads": lambda a: 0}, "num_heads", "got 0"),
    ({"intermediate_size": lambda a: 0}, "intermediate_size", "positive"),
    ({"intermediate_size": lambda a: 149}, "weights (gate)", "149 rows"),
    ({"activation": lambda a: "gelu"}, "activation", "'relu2', 'silu' or 'gelu_pytorch_tanh', got"),
    ({"eps": lambda a: -1.0}, "eps", "finite and not negative"),
    ({"inv_freq": lambda a: a["inv_freq"][1:]}, "inv_freq", "of shape [8], got [7]"),
    ({"inv_freq": lambda a: a["inv_freq"].double()}, "inv_freq", "of dtype float32"),
    ({"inv_freq": lambda a: strided(a["inv_freq"])}, "inv_freq", "contiguous"),
    ({"attention_factor": lambda a: 0.0}, "attention_factor", "finite and positive"),
    ({"attention_factor": lambda a: torch.inf}, "attention_factor", "finite and positive"),
    ({"scale": lambda a: torch.inf}, "scale", "finite"),
    ({"biased": lambda a: [0]}, "biases", "of dtype float32, got none"),
    ({"biased": lambda a: [1, 1]}, "biased", "ascending places from 0 to 6, got 1"),
    ({"biased": lambda a: [7]}, "biased", "ascending places from 0 to 6, got 7"),
    ({"biases": lambda a: torch.zeros(1, 64)}, "biases", "left out where biased is empty"),
    (
        {"biased": lambda a: [0], "biases": lambda a: torch.zeros(1, 63)},
        "biases", "of shape [1, 64], got [1, 63]",
    ),
    ({"scale_sizes": lambda a: [1] * 6}, "scale_sizes", "empty or 7 numbers, got 6"),
    (
        {"scale_sizes": lambda a: [1, 1, 1, 1, 1, 1, 71]},
        "scale_sizes", "1 or 70 (one a row) for weights (down), which is not in grouped, got 71",
    ),
    (
        {"scale_sizes": lambda a: [1, 1, 1, 1, 1, 1, 70], "grouped": lambda a: [6]},
        "scale_sizes", "140 (one a row and 128 input features) or 210 (64) for weights (down)",
    ),
    ({"grouped": lambda a: [6, 3]}, "grouped", "ascending places from 0 to 6, got 3"),
    (
        {"scale_sizes": lambda a: [64] + [1] * 6, "grouped": lambda a: [0]},
        "grouped", "weights (q) and weights (k) or with neither, got one of them",
    ),
    ({"activation_format": lambda a: "int8_group"}, "activation_format", "where grouped is empty"),
    ({"activation_format": lambda a: "int2"}, "activation_format", "or int16_group, got int2"),
    ({"scales": lambda a: a["scales"].half()}, "scales", "as those of weights (q) are not, got f"),
    ({"scale_sizes": lambda a: [64] + [1] * 6}, "scales", "of shape [1, 70], got [1, 7]"),
    ({"qk_norms": lambda a: True}, "norm_weights", "of shape [456], got [424]"),
    ({"sub_norm_eps": lambda a: -1.0}, "sub_norm_eps", "finite and not negative"),
    ({"linear_norm_eps": lambda a: -1.0}, "linear_norm_eps", "finite and not negative"),
    ({"linear_norm_eps": lambda a: 1e-5}, "norm_weights", "of shape [988], got [424]"),
    ({"dropped_neurons": lambda a: torch.zeros(1, 3)}, "norm_weights", "of shape [427], got [424]"),
    (
        {"dropped_neurons": lambda a: torch.zeros(3, dtype=torch.int64)},
        "dropped_neurons", "with 2 dimensions",
    ),
    (
        {"dropped_neurons": lambda a: torch.tensor([[4, 4]]), "norm_weights": lambda a: GAINS_2},
        "dropped_neurons", "ascending neurons below 152, got 4",
    ),
    (
        {"dropped_neurons": lambda a: torch.tensor([[4, 152]]), "norm_weights": lambda a: GAINS_2},
        "dropped_neurons", "ascending neurons below 152, got 152",
    ),
    (
        {"dropped_neurons": lambda a: torch.ones(1, 2), "norm_weights": lambda a: GAINS_2},
        "dropped_neurons", "of dtype int64, got float32",
    ),
    (
        {"dropped_neurons": lambda a: torch.ones(2, 2).long(), "norm_weights": lambda a: GAINS_2},
        "dropped_neurons", "of shape [1, 2], got [2, 2]",
    ),
    ({"post_norms": lambda a: True}, "norm_weights", "of shape [564], got [424]"),
    ({"local_layers": lambda a: [0]}, "local_layers", "empty without local_inv_freq, got 1"),
    ({"local_inv_freq": lambda a: torch.ones(8)}, "local_layers", "with local_inv_freq, got 0"),
    ({"windows": lambda a: [4, 4]}, "windows", "of 1 layers, or empty, got 2 windows"),
    ({"windows": lambda a: [-1]}, "windows", "at least 0 (none), got -1"),
    ({"local_inv_freq": lambda a: torch.ones(7)}, "local_inv_freq", "of shape [8], got [7]"),
    (
        {"local_inv_freq": lambda a: torch.ones(8), "local_layers": lambda a: [1]},
        "local_layers", "of layers below 1, got 1",
    ),
    ({**_INT8, "key_scale": lambda a: None}, "key_scale", "with int8 caches, got none"),
    ({**_INT8, "key_scale": lambda a: _scales(a).double()}, "key_scale", "of dtype float32"),
    ({**_INT8, "value_scale": lambda a: a["key_scale"]}, "value_scale", "in its own memory"),
    ({**_INT8, "value_scale": lambda a: _scales(a)[:, 1:]}, "value_scale", "shape [1, 2, 2, 12]"),
    ({**_INT8, "value_scale": lambda a: strided(_scales(a))}, "value_scale", "contiguous within"),
]  # fmt: skip
