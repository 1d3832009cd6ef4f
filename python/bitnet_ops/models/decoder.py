"""The one decoder behind every supported architecture: modules that hold, a program that computes.

A family's config becomes a listing of blocks (listing.py). C++ runs it as one call (program.py);
where it cannot, single ops do (composed.py), with the same results bit for bit. The residual stream
is float32; positions come from the cache. A token's logits do not depend on its batch, on the chunk
it came in, on ISA or threads. It must not know files, text or sampling.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.arguments import shown
from bitnet_ops.blocks.attention import GLOBAL_ROPE, LOCAL_ROPE, policy_of
from bitnet_ops.blocks.draft import HEAD
from bitnet_ops.blocks.listing import Listing, draft_listing, listing
from bitnet_ops.config import ModelConfig, Rotation
from bitnet_ops.config.draft import DraftConfig
from bitnet_ops.config.hybrid import ROTATION
from bitnet_ops.config.sparsity import ActivationSparsityError, read_sparsity
from bitnet_ops.errors import counted
from bitnet_ops.models.adapters import Adapters, PackedAdapter, scaled
from bitnet_ops.models.composed import Composed
from bitnet_ops.models.draft import DraftHead, keeps_drafts, with_draft
from bitnet_ops.models.layer import ACTIVATION_DTYPES, DecoderLayer, Tensors, norm_weight
from bitnet_ops.models.program import Program, bind
from bitnet_ops.models.step_batch import SequenceStep, StepBatch
from bitnet_ops.nn.columns import forget_columns
from bitnet_ops.nn.digest import digest_of
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.kv_config import kept_of
from bitnet_ops.nn.kv_pool import PagedPool
from bitnet_ops.nn.linear import BitLinear
from bitnet_ops.nn.lora import Adapter, LoraError, check_fits
from bitnet_ops.nn.packing import Cast, PackedWeight, dtype_after
from bitnet_ops.nn.rotary import Rotary, local_rotary, rotary
from bitnet_ops.nn.storage import check_activation_format
from bitnet_ops.nn.tracked import Tracked, TrackedList, changes
from bitnet_ops.ops._library import check_threads_after_fork


def _matrix(tensors: Tensors, name: str, head_format: str) -> HeadWeight:
    """An embedding or a head; one that is packed already stays what it is."""
    tensor = tensors[name]
    if isinstance(tensor, HeadWeight):
        return tensor
    if isinstance(tensor, PackedWeight):
        return HeadWeight.from_packed(tensor)
    return HeadWeight.from_dense(tensor, head_format)


class _Body(Tracked):
    """What Hugging Face calls `model`: embedding, layers, last norm."""

    def __init__(self, config: ModelConfig, tensors: Tensors, head_format: str) -> None:
        super().__init__()
        # An embedding that is no head is read a row a token: there is nothing to gain by packing.
        embedding_format = head_format if config.tie_word_embeddings else "stored"
        self.embed_tokens = _matrix(tensors, "model.embed_tokens.weight", embedding_format)
        lines, residual = listing(config), config.scalings.residual
        ordered = {name: tensors[name] for name in lines.tensors()}
        scales = dict.fromkeys(lines.added(), residual)
        prefixes = [f"model.layers.{i}." for i in range(config.num_hidden_layers)]
        self.layers = TrackedList(
            DecoderLayer(_below(ordered, prefix), _below(scales, prefix)) for prefix in prefixes
        )
        self.norm = norm_weight(tensors["model.norm.weight"])
        if config.rotation is not None:
            self.rotation = Tracked()
            for width, _ in config.rotation.blocks:
                signs = norm_weight(tensors[f"{ROTATION}{width}.weight"])
                self.rotation.add_module(str(width), signs)
        if config.scalings.logits != 1:  # exact where it is a power of 2
            self.norm = norm_weight(self.norm.weight / config.scalings.logits)


class _Purpose(NamedTuple):
    """Of a program: whether it gives logits, else states; makes keys of a head; is the head's."""

    logits: bool = True
    keeps: bool = False
    drafts: bool = False


class _Bound:
    """What a decoder has made of its modules: it changes without being a change of the decoder."""

    def __init__(self) -> None:
        # by what it is for: the changes at which a program was bound, and the program, published
        # together
        self.programs: dict[_Purpose, tuple[tuple[Any, ...], Program | None]] = {}
        self.watched: tuple[int, list[Tensor]] = -1, []  # likewise, all buffers
        self.digest: tuple[int | None, bytes] = None, b""  # of the weights, and their version


class Decoder(Tracked):
    """Token ids and a cache in, logits out.

    Any number of threads may run one model at once, each with a cache of its own. Changing it
    (`to`, `load_state_dict`, an adapter) is for one thread while no other runs it. `to(dtype)`
    sets what the layers compute on and casts a dense head or embedding; packed weights, scales and
    norm weights keep their dtype.

    Args:
        config: the architecture.
        tensors: exactly the tensors of `expected_tensors(config)`: PackedWeight for "ternary", a
            float tensor for "dense". They are shared, not copied (norm weights become float32).
        dtype: of what the layers compute on, float32 or bfloat16; the residual stays float32.
        head_format: of the output head, and of the embedding tied to it: one of HEAD_FORMATS.
            "stored" shares the tensor as it is.
        run_as: "program", tokens run through the one op run_program, or "ops", through an op for
            every part of a layer; the results are the same bit for bit. May be changed later.
        fused_step: an older name: True is run_as="program", False is "ops".
    """

    run_as: Literal["program", "ops"]

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        dtype: torch.dtype = torch.float32,
        head_format: str = "stored",
        *,
        run_as: Literal["program", "ops"] = "program",
        fused_step: bool | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype_of(dtype, type(self).__name__)
        if run_as not in ("program", "ops"):
            raise ValueError(
                f"{type(self).__name__}: expected run_as as 'program' or 'ops', got {shown(run_as)}"
            )
        self.config, self.dtype, self.run_as = config, dtype, run_as
        if fused_step is not None:
            self.fused_step = fused_step
        self._ropes, self._kv_layers = _ropes(config), kept_of(config)["key"].layers
        self.model = _Body(config, tensors, head_format)
        if not config.tie_word_embeddings:
            self.lm_head = _matrix(tensors, "lm_head.weight", head_format)
        if config.rotation is not None:
            self._rotate(config.rotation)
        self.mtp: DraftHead | None = None
        self.adapters = Adapters()
        self._bound = _Bound()
        self.eval()

    def _rotate(self, rotation: Rotation) -> None:
        """Share the signs of each input width among the matrices that are rotated."""
        for name, module in self.named_modules():
            if not isinstance(module, BitLinear | HeadWeight):
                continue
            if rotation.rotates(name, width := module.in_features):
                module.signs = self.get_buffer(f"{ROTATION}{width}.weight")

    def set_draft_head(self, draft: DraftConfig, tensors: Tensors) -> None:
        """Have an MTP head, whose drafts an engine verifies: it changes no result.

        draft: what the file says of it. tensors: "mtp.*", matrices as digits (nn/digits.py), of the
        sizes that config/draft.py states. Caches that are made of `cache_config` hold what the head
        keeps; over others the model runs as without one.
        """
        head = DraftHead(draft, tensors)
        if self.config.rotation is not None:
            widths = (width for width, _ in self.config.rotation.blocks)
            head.rotate({w: self.get_buffer(f"{ROTATION}{w}.weight") for w in widths})
        self.mtp = head

    @property
    def draft_head(self) -> DraftHead | None:
        """The MTP head, if it has one."""
        return self.mtp

    @property
    def cache_config(self) -> ModelConfig:
        """The config of caches over which the model's head can draft, if it has one."""
        return with_draft(self.config, None if self.mtp is None else self.mtp.draft)

    def draft_rows(self, batch: StepBatch, pool: PagedPool) -> Tensor:
        """The layer of the head on tokens and kept states: f32 [tokens, hidden], not normalised.

        batch: a token of each sequence, whose state is (row of the pool's states, 0, 0). pool: a
        DraftPool. Keys and values enter it.
        """
        program = self._program(_Purpose(drafts=True))
        if program is None:
            return self._composed(self._draft_listing, batch, pool)
        return program.step(self._inputs(batch), batch, pool)  # without adapters

    def add_adapter(self, adapter: Adapter, name: str | None = None) -> None:
        """Load a LoRA adapter beside the ternary projections, for sequences that name it.

        `name` None: for all that name none. Raises LoraError where the adapter names what is no
        ternary projection of the model or has another shape, and for a name that is taken.
        """
        check_fits(self, adapter)
        if (drafts := next((n for n in adapter.weights if n.startswith(HEAD)), None)) is not None:
            raise LoraError(
                f"lora: expected {drafts} to be a ternary projection of the model, got one of its "
                "draft head, which adapters leave alone; leave it out of the adapter"
            )
        adapter = scaled(adapter, self.config.scalings.residual, self.listing.added())
        self.adapters.add(name, PackedAdapter.of(adapter))

    def remove_adapter(self, name: str | None = None) -> None:
        """Undo `add_adapter`. Raises LoraError for a name that is unknown."""
        self.adapters.remove(name)

    @property
    def activation_format(self) -> str:
        """What projections with scales of groups multiply by; "int8" where there are none."""
        found = {m.activation_format for m in self.model.modules() if isinstance(m, BitLinear)}
        found = found - {"int8"} or found
        return found.pop() if len(found) == 1 else "mixed"

    def set_activation_format(self, activation_format: str) -> None:
        """Set it for every projection with scales of groups: one of ACTIVATION_FORMATS, or "auto".

        Raises ValueError for another, and for a model without such projections unless it is "auto"
        or "int8".
        """
        check_activation_format(activation_format)
        linears = [m for m in self.model.modules() if isinstance(m, BitLinear)]
        grouped = [m for m in linears if m.group_size]
        for linear in grouped or linears:
            linear.set_activation_format(activation_format)

    def set_attention(self, policy: str | None) -> None:
        """Let tokens read fewer positions than all, as config/attention.py says; None: all.

        For caches and engines that are made afterwards. Raises AttentionPolicyError.
        """
        config = dataclasses.replace(self.config, policies=())
        self.config = config if policy is None else config.with_attention(policy)

    def set_activation_sparsity(self, policy: str | None) -> None:
        """Leave inputs of MLPs' last projections out that are 0, as config/sparsity.py says.

        None: multiply them all. Where something is left out, each of these matrices lies in memory
        a second time. Raises ActivationSparsityError, also for matrices with scales of groups or a
        rotated input.
        """
        found = None if policy is None else read_sparsity(policy)
        for name, module in self.named_modules():
            if not name.endswith("down_proj") or not isinstance(module, BitLinear):
                continue
            if found is None:
                forget_columns(module.weight)
                continue
            if module.group_size or module.signs is not None:
                kind = "scales of groups" if module.group_size else "a rotated input"
                raise ActivationSparsityError(
                    "activation_sparsity: expected matrices with one scale a matrix or a row, "
                    f"whose input is what activations give, got {kind} in {name}; leave it out"
                )
        self.config = dataclasses.replace(self.config, sparsity=found)

    @property
    def weight_format(self) -> str:
        """The layout of the ternary matrices: "2bit", "1.6bit", "canonical", or "mixed"."""
        found = {m.weight_format for m in self.model.modules() if isinstance(m, BitLinear)}
        return found.pop() if len(found) == 1 else "mixed"

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
        adapter: str | None = None,
        largest: int = 0,
        draws: Tensor | None = None,
    ) -> Tensor:
        """Append input_ids int64 [B, T] to the cache's B sequences; logits f32 [B, T, V].

        Without a cache the sequences start at position 0, in a float32 cache that is then dropped.
        `logits_to_keep` > 0 gives the logits of that many last tokens only. The cache's lengths
        grow by T once everything is computed; after an error they are what they were. `adapter`:
        the name of the sequences' LoRA adapter (`add_adapter`), the same for all tokens of a
        cache. `largest` > 0: only so many largest logits of each token are wanted, or with `draws`
        float64 [rows of logits, 2] those that `ops.run_program` says; others may be -inf. Raises
        ValueError on another shape, dtype, batch, id or name, CacheCapacityError without room.
        """
        cache, batch = self._batch_over(input_ids, cache, logits_to_keep, adapter, largest, draws)
        logits = self.step(batch, cache.pool)
        cache.advance(input_ids.shape[1])
        return logits.view(cache.batch, -1, logits.shape[-1])

    def hidden(
        self, input_ids: Tensor, cache: KVCache | None = None, adapter: str | None = None
    ) -> Tensor:
        """As forward, but what the head would read: f32 [B, T, hidden] after the last norm."""
        cache, batch = self._batch_over(input_ids, cache, 0, adapter)
        x = self.step_states(batch, cache.pool)
        cache.advance(input_ids.shape[1])
        return x.view(cache.batch, -1, x.shape[-1])

    def _batch_over(
        self,
        input_ids: Tensor,
        cache: KVCache | None,
        kept: int,
        adapter: str | None,
        largest: int = 0,
        draws: Tensor | None = None,
    ) -> tuple[KVCache, StepBatch]:
        """The cache and the step that appends `input_ids` to it, with room for them."""
        check_threads_after_fork()
        cache = self._checked(input_ids, cache)
        rows, tokens = input_ids.shape
        kept = min(kept, tokens) or tokens  # 0 keeps everything
        starts = cache.prepare(tokens)
        parts = zip(input_ids.tolist(), starts, cache.blocks, cache.slots, strict=True)
        batch = StepBatch.of(
            [
                SequenceStep(ids, at, blocks, kept, adapter, (slot, 0, 0) if slot >= 0 else None)
                for ids, at, blocks, slot in parts
            ],
            cache.pool.block_size,
            largest,
            draws,
        )
        if rows > 1:  # by sequence, not by round
            at = torch.arange(rows * tokens).view(rows, tokens)[:, tokens - kept :]
            batch = dataclasses.replace(batch, logit_rows=at.flatten())
        return cache, batch

    @property
    def fused_step(self) -> bool:
        """An older name: whether `run_as` is "program"."""
        return self.run_as == "program"

    @fused_step.setter
    def fused_step(self, whole: bool) -> None:
        self.run_as = "program" if whole else "ops"

    @property
    def listing(self) -> Listing:
        """The program of this model as its modules are now, but for adapters."""
        return listing(self.config, *self._form)

    @property
    def _form(self) -> tuple[str, float]:
        factor = self._ropes[GLOBAL_ROPE].attention_factor
        return str(self.dtype).removeprefix("torch."), factor

    def _lines(self, keeps: bool) -> Listing:
        """The program; keeps: with what makes keys and values of the head."""
        return listing(self.cache_config, *self._form) if keeps else self.listing

    @property
    def _draft_listing(self) -> Listing:
        return draft_listing(self.cache_config, *self._form)

    @property
    def program(self) -> Program | None:
        """The program that steps run as one call; None where single ops run them."""
        return self._program(_Purpose())

    def _program(self, purpose: _Purpose) -> Program | None:
        """The bound program for that; None where there is none."""
        if self.run_as == "ops":
            return None
        now = changes(), self.adapters.version, self.dtype
        at, program = self._bound.programs.get(purpose, ((), None))
        if at != now or (program is not None and program.stale):
            # Several threads may do so at once: each publishes a whole one.
            program = self._bind(purpose)
            self._bound.programs[purpose] = now, program
        return program

    def _bind(self, purpose: _Purpose) -> Program | None:
        ropes = {f"rope.{name}": rope.inv_freq for name, rope in self._ropes.items()}
        if purpose.drafts:
            return bind(self._draft_listing, self, ropes)
        lines = self._lines(purpose.keeps)
        lines = lines if purpose.logits else lines.of_states
        lines = dataclasses.replace(lines, lora=self.adapters.lines())
        return bind(lines, self, {**ropes, **self.adapters.tensors()})

    def step(self, batch: StepBatch, pool: PagedPool) -> Tensor:
        """Logits f32 [rows, V] of `batch.logit_rows`; keys and values enter the pool.

        The new tokens of any sequences, in any mixture of prompts and decoding: a token's logits
        are those of its sequence alone with its adapter, bit for bit. Raises ValueError on the name
        of an unknown adapter.
        """
        if (program := self._program(_Purpose(keeps=keeps_drafts(pool)))) is None:
            return self.head(self.step_states(batch, pool))
        return self._run(program, batch, pool)

    def step_states(self, batch: StepBatch, pool: PagedPool) -> Tensor:
        """As step, but what the head would read: f32 [rows, hidden] after the last norm."""
        if (program := self._program(_Purpose(False, keeps_drafts(pool)))) is None:
            lines = self._lines(keeps_drafts(pool))
            return self._last_norm(self._composed(lines, batch, pool)[batch.logit_rows])
        return self._run(program, batch, pool)

    def _run(self, program: Program, batch: StepBatch, pool: PagedPool) -> Tensor:
        adapters = self.adapters.of_sequences(batch.adapter_names)
        return program.step(self._inputs(batch), batch, pool, adapters)

    def _composed(self, lines: Listing, batch: StepBatch, pool: PagedPool) -> Tensor:
        """Rows f32 [tokens, hidden] behind all blocks but the head, by single ops."""
        attention = [line for line in lines.blocks if line.kind == "attention"]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.update(i, k, v, batch.slot_mapping)
            scale = attention[i].number("scale")
            return pool.attend(i, q, batch, scale, policy_of(attention[i]))

        def store(i: int, k: Tensor, v: Tensor) -> None:
            pool.update(len(attention) + i, k, v, batch.slot_mapping)

        owners = torch.repeat_interleave(batch.query_start_loc.diff())
        sides = self.adapters.sides(batch.adapter_names, owners)
        composed = Composed(
            lines, self.get_submodule, batch.positions, self._ropes, attend, sides,
            pool.caches(), batch, store=store,
        )  # fmt: skip
        return composed.run(self._inputs(batch))

    def weights_version(self) -> int:
        """Another number whenever weights have been replaced, or changed in place by torch.

        Or adapters been loaded or removed.
        """
        return hash((self.adapters.version, self._buffers_version()))

    def _buffers_version(self) -> int:
        at, buffers = self._bound.watched
        if at != (now := changes()):  # to look for them takes 100 us
            buffers = list(self.buffers())
            self._bound.watched = now, buffers
        versions = ((b.data_ptr(), 0 if b.is_inference() else b._version) for b in buffers)
        return hash((*versions,))

    def identity(self, adapter: str | None = None) -> bytes:
        """A digest of all that results depend on besides tokens: weights, settings, the adapter.

        Not of the instruction set, threads or the layout of weights, if they are as a file had
        them; else the weights in memory are read, at 5 GB/s.
        """
        if self._bound.digest[0] != (now := self._buffers_version()):
            self._bound.digest = now, digest_of(self.named_buffers())
        c = self.cache_config
        if c.sparsity is not None and not c.sparsity.drops:  # no result depends on it
            c = dataclasses.replace(c, sparsity=None)
        settings = c, self.dtype, self.activation_format, self.head.head_format
        form = settings, self._bound.digest[1], self.adapters.digest(adapter)
        return hashlib.sha256(repr(form).encode()).digest()

    def comes_from(self, digest: bytes) -> None:
        """Say what the weights have been made of, so that `identity` need not read them."""
        self._bound.digest = self._buffers_version(), digest

    def _last_norm(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.model.norm.weight, self.config.rms_norm_eps)

    @property
    def head(self) -> HeadWeight:
        """The output head; of a tied model its embedding too."""
        return self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def _apply(self, fn: Cast, recurse: bool = True) -> Decoder:
        self.dtype = dtype_after(fn, self.dtype, ACTIVATION_DTYPES, type(self).__name__)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return self.summary

    @property
    def summary(self) -> str:
        """One line for people: architecture, sizes, and how the weights lie in memory."""
        c, dtype = self.config, str(self.dtype).removeprefix("torch.")
        linear = "" if c.delta_net is None else f" ({len(c.delta_net.layers)} of Gated DeltaNet)"
        return (
            f"{c.model_type}, {counted(c.num_hidden_layers, 'layer')} of {c.hidden_size}{linear}, "
            f"{counted(c.num_attention_heads, 'head')} of {c.head_dim} "
            f"({c.num_key_value_heads} kv), vocabulary {c.vocab_size}, "
            f"context {c.max_position_embeddings}, {dtype}, "
            f"weights {self.weight_format}, head {self.head.head_format}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A program is bound to this model's tensors and belongs to this process; a copy, from
        # `copy.deepcopy` or a pickle, binds its own.
        return {**self.__dict__, "_bound": _Bound()}

    def _checked(self, input_ids: Tensor, cache: KVCache | None) -> KVCache:
        """The cache to write, once the ids are known to fit it."""
        if cache is not None:
            self._check_inputs(input_ids, cache)
            return cache
        self._check_ids(input_ids)
        batch, tokens = input_ids.shape
        return KVCache(self.config, batch, tokens, torch.float32)

    def _check_ids(self, input_ids: Tensor) -> None:
        if not isinstance(input_ids, Tensor):
            raise TypeError(
                "model: expected input_ids as a tensor int64 [B, T], got a "
                f"{type(input_ids).__name__}; use torch.tensor([ids])"
            )
        if input_ids.dtype != torch.int64 or input_ids.dim() != 2 or not input_ids.shape[1]:
            raise ValueError(
                "model: expected input_ids int64 [B, T] with T above 0, got "
                f"{input_ids.dtype} {list(input_ids.shape)}"
            )

    def _check_inputs(self, input_ids: Tensor, cache: KVCache) -> None:
        self._check_ids(input_ids)
        if not isinstance(cache, KVCache):
            raise TypeError(
                f"model: expected cache as a KVCache or None, got a {type(cache).__name__}"
            )
        if input_ids.shape[0] != cache.batch:
            raise ValueError(
                f"model: expected input_ids with the cache's {cache.batch} sequences, "
                f"got {input_ids.shape[0]}"
            )
        layers, own = cache.config.num_layers, self._kv_layers
        if layers != own:
            raise ValueError(
                f"model: expected a cache of {own} layers, got {layers}; make it from this model's "
                "config"
            )

    def _inputs(self, batch: StepBatch) -> Tensor:
        """What enters the first block: embeddings, and rows that stand in their place."""
        x = self._embed(batch.token_ids)
        for at, rows in batch.rows:
            x[at : at + len(rows)] = rows
        return x

    def _embed(self, input_ids: Tensor) -> Tensor:
        try:
            x = self.model.embed_tokens.embed(input_ids)
            scale = self.config.scalings.embedding
            return x if scale == 1 else x * scale
        except RuntimeError:
            low, high = int(input_ids.min()), int(input_ids.max())
            if low >= 0 and high < self.config.vocab_size:
                raise
            raise ValueError(
                f"model: expected token ids from 0 to {self.config.vocab_size - 1}, got "
                f"{low} to {high}"
            ) from None


def _ropes(config: ModelConfig) -> dict[str, Rotary]:
    """The rotary tables of a model by the name that its program gives them."""
    ropes = {GLOBAL_ROPE: rotary(config)}
    if (local := local_rotary(config)) is not None:
        ropes[LOCAL_ROPE] = Rotary(local, 1.0)
    return ropes


def dtype_of(dtype: torch.dtype | str, who: str) -> torch.dtype:
    """What layers compute on, which may be given by its name.

    Raises ValueError unless it is float32 or bfloat16.
    """
    found = getattr(torch, dtype.removeprefix("torch."), dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in ACTIVATION_DTYPES:
        raise ValueError(
            f"{who}: expected dtype float32 or bfloat16, got {shown(dtype)}"
            + ("; relu2 overflows float16" if found is torch.float16 else "")
        )
    return found


def _below(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
