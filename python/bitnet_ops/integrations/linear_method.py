"""`BitNetLinearMethod`: the linear method of serving engines, over torch.ops.bitnet.linear.

The contract that SGLang and vLLM share (create_weights, process_weights_after_loading, apply), and
the plain call that users of earlier BitNet kernels had (plain_call.py). A layer holds one or more
LOGICAL matrices (q, k, v; gate, up), each with its own scale, and of each only the rows
(column-parallel) or columns (row-parallel) of its rank. Engines' stock loaders clip a short tensor
in silence, so every parameter made here carries its own `weight_loader`, which checks shapes. State
belongs to the layer, never to the method. It must not import an engine: `sglang/quantization.py`
and `vllm/quantization.py` add the engine's base class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.config.scheme import ScaleRule
from bitnet_ops.integrations import plain_call
from bitnet_ops.integrations.checkpoint import (
    CheckpointError,
    check_activation_dtype,
    in_layer,
    logical_codes,
    stored_scale,
)
from bitnet_ops.nn.packing import PackedWeight, choose_format, packed_row_bytes

ShardId = str | int | None
# Weight 0 in all four lanes: what a parameter holds until it is loaded must be valid codes, because
# engines with dummy weights fill floating-point parameters only.
_ZERO_BYTE = 0b01010101
_FORMAT = "2bit"  # the layout of the kernels that `repack` makes
_LINEAR = torch.ops.bitnet.linear.default
_BFLOAT16, _FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Part:
    """The elements that this rank holds of an axis of `whole` elements."""

    whole: int
    size: int
    start: int = 0

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + self.size)


def part_of(total: int, local: int, rank: int, size: int, what: str) -> Part:
    """The part of an axis of `total` elements of which each of `size` ranks holds `local`.

    Raises CheckpointError unless the axis is whole (total == local) or divides by the ranks.
    """
    if total == local:
        return Part(total, total)
    if local * size != total:
        raise CheckpointError(
            f"bitnet: expected {what} {total} to divide evenly over {size} tensor-parallel ranks, "
            f"got {local} per rank; choose another tensor-parallel size"
        )
    return Part(total, local, rank * local)


@dataclass(frozen=True)
class Shard:
    """One logical matrix inside a layer: its id, its rows held here, and where they start there."""

    id: ShardId
    rows: Part
    offset: int

    @property
    def here(self) -> slice:
        """The rows of the layer that hold it."""
        return slice(self.offset, self.offset + self.rows.size)


@dataclass
class LayerState:
    """What a layer must remember: its plan, and which tensors have arrived."""

    name: str
    rule: ScaleRule
    columns: Part
    shards: tuple[Shard, ...]
    loaded: set[tuple[str, ShardId]] = field(default_factory=set)
    in_features: int = field(init=False)
    out_features: int = field(init=False)

    def __post_init__(self) -> None:
        self.in_features = self.columns.size
        self.out_features = sum(shard.rows.size for shard in self.shards)

    def shard(self, shard_id: ShardId) -> Shard:
        """The shard of that id; a CheckpointError lists the ids that exist."""
        for shard in self.shards:
            if shard.id == shard_id and type(shard.id) is type(shard_id):
                return shard
        known = ", ".join(repr(shard.id) for shard in self.shards)
        raise CheckpointError(
            f"bitnet: expected a shard id among {known}, got {shard_id!r}{in_layer(self.name)}; a "
            "matrix fused in the checkpoint has one scale for all its parts: not supported"
        )

    def packed(self, weight: Tensor) -> PackedWeight:
        """The layer's weight in the layout that it has now: canonical, or that of `repack`."""
        format = "canonical" if weight.dim() == 2 else _FORMAT
        shape = self.out_features, self.in_features
        return PackedWeight.unchecked(weight, torch.ones(1, dtype=_FLOAT32), *shape, format, 0)


def _state(layer: nn.Module) -> LayerState:
    return cast(LayerState, layer.bitnet)


def load_weight(layer: nn.Module, param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
    """Load one logical matrix of a checkpoint into `layer.weight` (and, online, its scale)."""
    state = _state(layer)
    shard = state.shard(shard_id)
    shape = shard.rows.whole, state.columns.whole
    codes, scale = logical_codes(loaded, state.rule, *shape, state.name)
    part = codes[shard.rows.elements, state.columns.elements]
    _store_rows(state, param, shard, ops.pack(part.contiguous()))
    state.loaded.add(("weight", shard.id))
    if scale is not None:
        _store_scale(state, cast(Tensor, layer.weight_scale), shard, scale)


def _store_rows(state: LayerState, param: Tensor, shard: Shard, rows: Tensor) -> None:
    """Put canonical rows of a shard into the layer's weight, in whatever layout that has now.

    Engines do not always call their post-load hook after a weight update, so what arrives late is
    written in the repacked layout at once.
    """
    held = state.packed(param.data)
    if held.format == "canonical":
        param.data[shard.here] = rows
        return
    tile = param.shape[2]  # rows of a row block of the 2 bit layout: as many as its k-steps' bytes
    last = shard.here.stop == state.out_features
    if shard.offset % tile == 0 and (last or shard.rows.size % tile == 0):
        part = ops.repack(rows, state.in_features, _FORMAT)
        param.data[shard.offset // tile :][: len(part)] = part
        return
    whole = held.to_canonical()
    whole.weight[shard.here] = rows
    param.data = whole.repack(_FORMAT).weight


def load_scale(layer: nn.Module, param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
    """Load one logical matrix's weight_scale into its rows of `layer.weight_scale`."""
    state = _state(layer)
    shard = state.shard(shard_id)
    _store_scale(state, param, shard, stored_scale(loaded, state.rule, state.name))


def _store_scale(state: LayerState, param: Tensor, shard: Shard, scale: Tensor) -> None:
    param.data[shard.here if param.numel() > 1 else slice(0, 1)] = scale.to(param.device)
    state.loaded.add(("weight_scale", shard.id))


def load_bias(layer: nn.Module, param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
    """Load one logical matrix's bias into the parameter that the engine made."""
    state = _state(layer)
    shard = state.shard(shard_id)
    if not loaded.is_floating_point() or tuple(loaded.shape) != (shard.rows.whole,):
        raise CheckpointError(
            f"bitnet: expected bias floating-point [{shard.rows.whole}], got {loaded.dtype} "
            f"{list(loaded.shape)}{in_layer(state.name)}"
        )
    param.data[shard.here] = loaded[shard.rows.elements].to(param.dtype)
    state.loaded.add(("bias", shard.id))


def _parameter(layer: nn.Module, name: str, data: Tensor, loader: Callable) -> None:
    parameter = nn.Parameter(data, requires_grad=False)

    def weight_loader(param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
        loader(layer, param, loaded, shard_id)

    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]  # what engines look for
    layer.register_parameter(name, parameter)


def check_complete(layer: nn.Module, *, allow_unloaded: bool = False) -> None:
    """Raise CheckpointError if a weight, scale or bias of `layer` never arrived; changes nothing.

    Engines skip what a checkpoint lacks, and zeros would then be served. `allow_unloaded` lets a
    layer pass that received nothing at all: engines that run on dummy weights.
    """
    state = _state(layer)
    if allow_unloaded and not state.loaded:
        return
    kinds = ["weight", "weight_scale"]
    if getattr(layer, "bias", None) is not None:
        kinds.append("bias")
    wanted = [(kind, shard.id) for shard in state.shards for kind in kinds]
    missing = [f"{kind} of shard {id!r}" for kind, id in wanted if (kind, id) not in state.loaded]
    if missing:
        raise CheckpointError(
            f"bitnet: expected every tensor of the layer, got none for {', '.join(missing)}"
            f"{in_layer(state.name)}; the checkpoint is incomplete, or stored as another "
            "linear_class"
        )


def repack(layer: nn.Module) -> None:
    """Bring `layer.weight` into the layout that the kernels of this CPU read fastest.

    Results stay the same bit for bit. The parameter object stays too, with its weight_loader; only
    its data change, and the canonical rows are freed. Changes nothing when called again, nor for
    more than 32768 inputs, which no such layout takes. What engines take from state_dict() is then
    this layout, which fits this instruction set alone; `canonical_rows` has the portable form.
    """
    state, weight = _state(layer), cast(Tensor, layer.weight)
    if choose_format("auto", state.in_features) == _FORMAT:
        weight.data = state.packed(weight.data).repack(_FORMAT).weight


def canonical_rows(layer: nn.Module) -> Tensor:
    """The layer's packed weight, uint8 [outputs, 32 * ceil(inputs / 128)], in whatever layout it
    is held; shared with the layer where it is held so.
    """
    return _state(layer).packed(cast(Tensor, layer.weight).data).to_canonical().weight


class BitNetLinearMethod:
    """Creates, completes and applies the weights of one engine linear.

    Args:
        rule: how the checkpoint stores weights and scales (`scale_rule(quantization_config)`).
        name: the layer's name in the model, for error messages.
        compute_dtype: for the plain call only: x is converted to it first. None: x as it is.
        packing: for the plain call only: how its weights are packed, "interleaved" or
            "consecutive", where the call itself does not say.
    Raises ValueError for another packing.

    The plain call, with weights repacked once:

        method = BitNetLinearMethod(compute_dtype=torch.bfloat16, packing="consecutive")
        weight = method.repack(packed_weight, out_features, in_features)
        y = method.apply(weight, scale, x, out_features, in_features)
    """

    def __init__(
        self,
        rule: ScaleRule = ScaleRule.MULTIPLY,
        name: str = "",
        *,
        compute_dtype: torch.dtype | None = None,
        packing: str | None = None,
    ) -> None:
        if packing is not None and packing not in plain_call.PACKINGS:
            raise ValueError(
                "BitNetLinearMethod: expected packing 'interleaved', 'consecutive' or None, got "
                f"{packing!r}"
            )
        self.rule = rule
        self.name = name
        self.compute_dtype = compute_dtype
        self.packing = packing

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        skip_block_quant_check: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer its packed parameters; sizes and names are the engine's.

        `weight` is uint8 [rows, 32 * ceil(columns / 128)], canonical layout, all zeros until
        loaded; `process_weights_after_loading` changes its layout and shape. `weight_scale` is
        float32 [1] for one logical matrix, else [rows], each row with its own matrix's scale: so a
        fused layer is one op call. The engine's own `weight_loader` (in extra_weight_attrs) is not
        used: on a CPU it clips a tensor that is too short and fills up with zeros, without an
        error.
        Raises CheckpointError for float16, uneven splits, pre-sharded checkpoints, and a bias
        where transformers would multiply it by the weight scale.

        All ranks of a layer split over its inputs (row-parallel) quantise their columns with the
        absmax of the whole token (`max_over_ranks`), so that their sum is what one rank computes,
        but for the rounding of that sum.
        """
        del skip_block_quant_check, extra_weight_attrs
        check_activation_dtype(params_dtype, self.name)
        self._check_layer(layer)
        rank, size = _ranks(layer, "")
        rows = sum(output_partition_sizes)
        part_of(output_size, rows, rank, size, "output size")
        columns = part_of(input_size, input_size_per_partition, rank, size, "input size")
        whole = output_size == rows
        shards = _plan(layer, output_partition_sizes, *((0, 1) if whole else (rank, size)))
        state = LayerState(self.name, self.rule, columns, shards)
        layer.bitnet = state  # type: ignore[assignment]  # nn.Module's stub: Tensor | Module
        packed = torch.full((rows, packed_row_bytes(columns.size)), _ZERO_BYTE, dtype=torch.uint8)
        _parameter(layer, "weight", packed, load_weight)
        scales = torch.zeros(1 if len(shards) == 1 else rows, dtype=_FLOAT32)
        _parameter(layer, "weight_scale", scales, load_scale)
        # The engine attaches this loader to the bias that it makes after us; its own one clips.
        loader = functools.partial(load_bias, layer)
        layer.weight_loader = loader  # type: ignore[assignment]  # nn.Module's stub

    def _check_layer(self, layer: nn.Module) -> None:
        of = in_layer(self.name)
        if getattr(layer, "use_presharded_weights", False):
            raise CheckpointError(
                f"bitnet: expected a whole checkpoint, got one already split by rank{of}: not "
                "supported"
            )
        # SGLang's name for it, then vLLM's
        with_bias = getattr(layer, "with_bias", False) or getattr(layer, "has_bias", False)
        if with_bias and self.rule is ScaleRule.MULTIPLY:
            raise CheckpointError(
                f"bitnet: expected no bias (linear class {self.rule.value}), got one{of}; "
                "transformers multiplies such a bias by the weight scale, no checkpoint is known "
                "to have one: not supported"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reject a layer of which a tensor never arrived, and repack the weight for this CPU.

        May run again: it then finds the weight repacked. Later weight updates go through the
        parameters' own weight_loader, which keeps the layout, whether this runs after them or not.
        """
        check_complete(layer, allow_unloaded=self.weights_may_be_absent())
        repack(layer)

    def weights_may_be_absent(self) -> bool:
        """Whether the engine runs on dummy weights, of which none arrives before the hook."""
        load_format = self.load_format()
        return str(getattr(load_format, "value", load_format)) == "dummy"

    def max_over_ranks(self, x: Tensor) -> Tensor:
        """The largest x of all tensor-parallel ranks, on each of them; x may be overwritten."""
        group = self.rank_group()
        if group is not None:
            torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX, group=group)
        return x

    def load_format(self) -> object:
        """How the engine was told to load weights; its sub-class knows."""
        return None

    def rank_group(self) -> Any:
        """The engine's tensor-parallel ranks as torch's process group; its sub-class knows."""
        return None

    def apply(self, layer: nn.Module | Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Either apply(layer, x, bias=None), the engines' form, or the plain call
        apply(packed_weight, scale, x, out_features, in_features, bias=None, packing=None).

        The first argument decides: a module with our parameters, or the packed weight itself, as
        `plain_call.apply_packed` has it. x has any number of leading dimensions; the result has x's
        dtype. In the engines' form x is bfloat16 or float32.
        """
        if isinstance(layer, Tensor):
            return self._apply_plain(layer, *args, **kwargs)
        return self.apply_layer(layer, *args, **kwargs)

    def apply_layer(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = BitLinear(x) + bias with the layer's parameters; see `apply`. Of a layer split over
        its inputs: this rank's summand. Raises CheckpointError for a dtype that is not served,
        ValueError for an x of another width.

        The product of one token takes 60 us and less, so this goes the short ways: attributes that
        nn.Module need not search for, and no Python call before something is wrong.
        """
        state: LayerState = layer.bitnet  # type: ignore[assignment]  # nn.Module's stub
        parameters: dict[str, Any] = layer._parameters
        dtype = x.dtype
        if dtype is not _BFLOAT16 and dtype is not _FLOAT32:
            check_activation_dtype(dtype, self.name)
        weight, scale = parameters["weight"], parameters["weight_scale"]
        if state.in_features != state.columns.whole:
            return self._apply_columns(state, weight, scale, x, bias)
        try:
            shape = state.out_features, state.in_features
            y: Tensor = _LINEAR(x, weight, scale, bias, shape)
        except RuntimeError:
            _check_columns(state, x)
            raise
        return y

    def _apply_columns(
        self, state: LayerState, weight: Tensor, scale: Tensor, x: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`apply_layer` of this rank's columns, rounded as those of the whole token."""
        _check_columns(state, x)
        rows = x.reshape(-1, state.in_features)
        absmax = self.max_over_ranks(rows.abs().amax(-1, keepdim=True))
        # The largest value of all ranks joins each row, so that the op rounds with it.
        q, x_scale = ops.quantize_activations(torch.cat([rows, absmax], -1))
        shape = state.out_features, state.in_features
        y = ops.gemm(weight, q[:, :-1].contiguous(), x_scale, scale, shape)
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], state.out_features)

    def repack(
        self, packed_weight: Tensor, out_features: int, in_features: int, packing: str | None = None
    ) -> Tensor:
        """The weight of a plain call in the layout that this CPU reads fastest; see
        `plain_call.repack`. `packing`: as in the plain call; None: the method's.
        """
        return plain_call.repack(packed_weight, out_features, in_features, packing or self.packing)

    def _apply_plain(
        self,
        packed_weight: Tensor,
        scale: Tensor | float,
        x: Tensor,
        out_features: int,
        in_features: int,
        bias: Tensor | None = None,
        packing: str | None = None,
    ) -> Tensor:
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        packing = packing or self.packing
        return plain_call.apply_packed(
            packed_weight, scale, x, out_features, in_features, bias, packing=packing
        )


def _check_columns(state: LayerState, x: Tensor) -> None:
    """Reject an input of another width, in the words of a layer."""
    if x.shape[-1:] != (state.in_features,):
        raise ValueError(
            f"apply: expected x [..., {state.in_features}], got {list(x.shape)}; a layer split "
            "over its inputs takes its rank's columns only"
        ) from None


def _ranks(layer: nn.Module, *prefixes: str) -> tuple[int, int]:
    """A layer's rank and how many there are, by the first of the prefixes that it has names with.

    SGLang from 0.5.22 on names a group of ranks, other engines the numbers.
    """
    for prefix in prefixes:
        if hasattr(layer, f"{prefix}tp_rank"):
            return getattr(layer, f"{prefix}tp_rank"), getattr(layer, f"{prefix}tp_size")
        if (group := getattr(layer, f"{prefix}tp_group", None)) is not None:
            return group.rank_in_group, group.world_size
    return 0, 1


def _plan(layer: nn.Module, sizes: Sequence[int], rank: int, ranks: int) -> tuple[Shard, ...]:
    """The logical matrices of a layer, laid out one after the other along its rows.

    Ids are those that the engine hands to the loaders: none for a single matrix. The k and v heads
    may be fewer than the ranks, and are then held by several.
    """
    ids: Sequence[ShardId] = range(len(sizes)) if len(sizes) > 1 else [None]
    places = [(rank, ranks)] * len(sizes)
    replicas = getattr(layer, "num_kv_head_replicas", None)
    if replicas is not None:
        ids = "q", "k", "v"
        kv_rank, kv_ranks = _ranks(layer, "kv_", "")
        places[1:] = [(kv_rank // replicas, kv_ranks // replicas)] * 2
    shards, offset = [], 0
    for shard_id, size, (index, parts) in zip(ids, sizes, places, strict=True):
        shards.append(Shard(shard_id, Part(size * parts, size, size * index), offset))
        offset += size
    return tuple(shards)
