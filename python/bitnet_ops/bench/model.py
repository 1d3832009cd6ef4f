"""The model that `bench model` times: a synthetic one or a file, its bytes, its steps to time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bitnet_ops.bench.harness import Timed
from bitnet_ops.blocks.block import PAGE
from bitnet_ops.blocks.listing import KINDS, listing
from bitnet_ops.dummy import model as dummy
from bitnet_ops.generate.engine import Engine, Limits
from bitnet_ops.generate.images import Images
from bitnet_ops.generate.scheduler import SchedulerOptions
from bitnet_ops.language_model import load
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import KV_DTYPES, bytes_of_block, kept_of
from bitnet_ops.nn.packing import blocked_scales
from bitnet_ops.nn.state_pool import slot_bytes
from bitnet_ops.nn.storage import LAYOUTS
from bitnet_ops.vision.decode import ImageLimits

_PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "o": ("self_attn.o_proj",),
    "out": ("linear_attn.out_proj",),
    "gate/up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# int8 multiply-adds that a unit does in the time of one in float32, where it has both (VNNI)
INT8_PER_FLOAT = 4

LIMITS = ImageLimits(max_bytes=64 << 20, max_tokens=16_384)  # of pictures, made here


@dataclass(frozen=True)
class StepBytes:
    """What one step of one sequence has to read at context 0, and more for every cached token.

    per_sequence: of recurrent states, read and written.
    """

    body: int
    head: int
    per_position: int
    per_sequence: int = 0

    def step(self, batch: int, context: int) -> int:
        """Of a step of `batch` sequences: weights once, every sequence's cache and state."""
        own = context * self.per_position + self.per_sequence
        return self.body + self.head + batch * own


def rewind(cache: KVCache, context: int) -> None:
    """Let the next token stand behind `context` positions; a state stays what it is."""
    for row in cache._rows:
        row.length = context


class BenchModel:
    """A dummy model in a weight and a head format, with bfloat16 activations, or that of a file.

    name: of the dummy; kv_dtype: of its caches, one of KV_TYPES; file: a model file to load
    instead, None for none; attention: its policy.
    """

    def __init__(
        self,
        name: str,
        weight_format: str,
        head_format: str,
        kv_dtype: str = "bfloat16",
        file: str | None = None,
        attention: str | None = None,
    ) -> None:
        formats: Any = {"weight_format": weight_format, "head_format": head_format}
        self.images: Images | None = None  # what reads pictures
        self.model: Any
        if file is None:
            self.model = dummy.decoder(name, torch.bfloat16, **formats)
        else:
            lm = load(file, dtype=torch.bfloat16, image_limits=LIMITS, **formats)
            self.model, self.images = lm.model, lm.images
        self.model.set_attention(attention)
        self.config = self.model.config
        # what the model holds, not what was asked for: a figure under a wrong name is a lie
        self.weight_format, self.head_format = self._weight_format(), self._head_format()
        self.use_kv_dtype(kv_dtype)
        self._generator = torch.Generator().manual_seed(1)

    def use_kv_dtype(self, name: str) -> None:
        """Caches are of that type from now on, one of KV_TYPES."""
        self.kv_dtype = KV_DTYPES[name]

    @property
    def formats(self) -> dict[str, str]:
        """The fields of a row that say what was measured."""
        kv = str(self.kv_dtype).removeprefix("torch.")
        return {"weights": self.weight_format, "head": self.head_format, "kv": kv}

    @property
    def label(self) -> str:
        return f"{self.weight_format} + {self.head_format} head"

    def _weight_format(self) -> str:
        _, (first, *_) = next(self.projections())
        dimensions = {layout["dimensions"]: name for name, layout in LAYOUTS.items()}
        return dimensions[first.weight.dim()]

    def head(self) -> Any:
        """The module whose buffers are the output head."""
        tied = self.config.tie_word_embeddings
        return self.model.model.embed_tokens if tied else self.model.lm_head

    def _head_format(self) -> str:
        return str(self.head().head_format)

    def bytes(self) -> StepBytes:
        """From the tensors that the model holds, so that padding and scales count."""
        tied = self.config.tie_word_embeddings
        head = "model.embed_tokens." if tied else "lm_head."
        sizes = {"body": 0, "head": 0}
        for name, tensor in self.model.named_buffers():
            if name.startswith(head):
                sizes["head"] += tensor.nbytes
            elif "_proj" in name and not name.endswith((".weight_scale", ".signs")):
                sizes["body"] += tensor.nbytes
        for _, modules in self.projections():
            for module in modules:
                scale = module.weight_scale
                # those of groups are read as the kernels want them
                sizes["body"] += (
                    blocked_scales(module.packed) if module.group_size else scale
                ).nbytes
        per_position = bytes_of_block(self.config, PAGE, self.kv_dtype) // PAGE
        states = 2 * slot_bytes(kept_of(self.config))
        return StepBytes(sizes["body"], sizes["head"], per_position, states)

    def macs_per_token(self) -> int:
        """Integer multiply-adds of the ternary products for one token.

        Those of the delta rule, in float32, count for as many as a unit does in the same time.
        """
        lines = listing(self.config).blocks
        rule = sum(KINDS[line.kind].float_macs(line) for line in lines)
        products = sum(m.in_features * m.out_features for _, ms in self.projections() for m in ms)
        return products + INT8_PER_FLOAT * rule

    def projections(self) -> Iterator[tuple[str, list[Any]]]:
        """(part, its linear modules) of every layer in order."""
        for layer in self.model.model.layers:
            for part, names in _PROJECTIONS.items():
                if names[0].partition(".")[0] in layer._modules:
                    yield part, [layer.get_submodule(name) for name in names]

    def cache(self, batch: int, context: int, room: int) -> KVCache:
        """A cache in which every sequence has `context` random positions."""
        cache = KVCache(self.config, batch, context + room, self.kv_dtype)
        keys, layers = kept_of(self.config)["key"]
        # 64 random positions repeated: the values matter to nobody, the addresses do
        some = torch.randn(64, *keys.shape, generator=self._generator)
        repeats = -(-context // 64), 1, 1
        rows = some.bfloat16().repeat(repeats)[:context].expand(batch, -1, -1, -1)
        for layer in range(layers if context else 0):
            cache.update(layer, rows, rows, 0)
        return cache

    def decode_run(self, batch: int, context: int, tokens: int) -> Timed:
        """Greedy decoding: call i is the step behind context + i mod `tokens` positions."""
        cache = self.cache(batch, context, tokens)
        ids = torch.zeros(batch, 1, dtype=torch.int64)

        def step(i: int) -> None:
            nonlocal ids
            if i % tokens == 0:
                rewind(cache, context)
            logits = self.model(ids, cache, 1, largest=1)
            ids = logits[:, -1].argmax(-1, keepdim=True)

        return Timed(step)

    def prefill_run(self, tokens: int) -> Timed:
        """A prompt of `tokens` random tokens into an empty cache, by the engine."""
        prompt = torch.randint(
            0, self.config.vocab_size, (tokens,), generator=self._generator
        ).tolist()
        engine = Engine(
            self.model, kv_dtype=self.kv_dtype, scheduling=SchedulerOptions(prefix_cache=False)
        )
        return Timed(lambda _: engine.generate([prompt], limits=Limits(1)))
