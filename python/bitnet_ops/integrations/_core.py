"""Engine-free loading of Hugging Face ternary checkpoints into one linear of a serving engine.

A layer holds one or several LOGICAL matrices (q, k, v; gate, up), each with its own scale, and of
each only the rows (column-parallel) or columns (row-parallel) of its rank. Every parameter made
here carries its own `weight_loader`: unpack the whole logical matrix -> slice -> pack in the
canonical layout -> copy. Engines' stock loaders clip a short tensor in silence, so shapes are
checked here. `repack` brings a loaded layer into the layout that this CPU reads fastest; what
arrives after that (a weight update) is written in that layout at once, since engines do not always
call their post-load hook again. It must not import an engine, nor know how a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from bitnet_ops import ops
from bitnet_ops.config.scheme import ScaleRule, SchemeError, quantized_scheme
from bitnet_ops.nn import quantize
from bitnet_ops.nn.packing import PackedWeight, choose_format, packed_row_bytes, unpack_hf

ShardId = str | int | None
# Weight 0 in all four lanes: what a parameter holds until it is loaded must be valid codes, because
# engines with dummy weights fill floating-point parameters only.
ZERO_BYTE = 0b01010101
ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)
_FORMAT = "2bit"  # the layout of the kernels that `repack` makes


class CheckpointError(ValueError):
    """A tensor or setting of a checkpoint that cannot be served, named with the remedy."""


def scale_rule(quantization_config: Mapping[str, object]) -> ScaleRule:
    """The rule that a Hugging Face `quantization_config` means; absent keys have HF's defaults.

    Raises CheckpointError for another quant_method, an unknown class or mode, or `use_rms_norm`.
    """
    try:
        scheme = quantized_scheme({"quant_method": "bitnet", **quantization_config})
    except SchemeError as error:
        raise CheckpointError(f"bitnet: {error}") from None
    if quantization_config.get("use_rms_norm", False):
        raise CheckpointError(
            "bitnet: expected use_rms_norm false, got true; a norm inside each linear is not served"
        )
    return cast(ScaleRule, scheme.rule)


def check_activation_dtype(dtype: torch.dtype, name: str = "") -> None:
    """Reject a model dtype that BitNet cannot run in (float16: relu(x)^2 * y passes 65504)."""
    if dtype not in ACTIVATION_DTYPES:
        raise CheckpointError(
            f"bitnet: expected the model dtype bfloat16 or float32, got {dtype}{_of(name)}; start "
            "the engine with dtype bfloat16 (float16 overflows in squared-ReLU models)"
        )


@dataclass(frozen=True)
class Split:
    """One axis of a logical matrix: this rank holds part `index` of `parts` equal parts."""

    parts: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.parts:
            raise CheckpointError(
                f"bitnet: expected a rank below the number of parts {self.parts}, got {self.index}"
            )

    def slice(self, local: int) -> slice:
        """The part of the whole axis that this rank holds, `local` elements long."""
        return slice(self.index * local, (self.index + 1) * local)


def split_axis(total: int, local: int, rank: int, size: int, what: str) -> Split:
    """The split of an axis of `total` elements of which a rank holds `local`.

    Raises CheckpointError unless the axis is whole (total == local) or divides by the `size` ranks.
    """
    if total == local:
        return Split()
    if local * size != total:
        raise CheckpointError(
            f"bitnet: expected {what} {total} to divide evenly over {size} tensor-parallel ranks, "
            f"got {local} per rank; choose another tensor-parallel size"
        )
    return Split(size, rank)


@dataclass(frozen=True)
class Shard:
    """One logical matrix inside a layer: its id, its rows held here, and where they start."""

    id: ShardId
    size: int
    offset: int
    split: Split


@dataclass
class LayerState:
    """What a layer must remember: its plan, and which tensors have arrived."""

    name: str
    rule: ScaleRule
    in_features: int
    columns: Split
    shards: tuple[Shard, ...]
    loaded: set[tuple[str, ShardId]] = field(default_factory=set)
    out_features: int = field(init=False)

    def __post_init__(self) -> None:
        self.out_features = sum(shard.size for shard in self.shards)

    def shard(self, shard_id: ShardId) -> Shard:
        """The shard of that id; a CheckpointError lists the ids that exist."""
        for shard in self.shards:
            if shard.id == shard_id and type(shard.id) is type(shard_id):
                return shard
        known = ", ".join(repr(shard.id) for shard in self.shards)
        raise CheckpointError(
            f"bitnet: expected a shard id among {known}, got {shard_id!r}{_of(self.name)}; a "
            "matrix fused in the checkpoint has one scale for all its parts: not supported"
        )


def layer_state(layer: nn.Module) -> LayerState:
    """What `make_params` left on the layer."""
    return cast(LayerState, layer.bitnet)


def _of(name: str) -> str:
    return f" in {name}" if name else ""


def plan_shards(
    out_sizes: Sequence[int], splits: Sequence[Split], ids: Sequence[ShardId]
) -> tuple[Shard, ...]:
    """Lay the logical matrices out one after the other along the rows of the fused layer."""
    shards, offset = [], 0
    for shard_id, size, split in zip(ids, out_sizes, splits, strict=True):
        shards.append(Shard(shard_id, size, offset, split))
        offset += size
    return tuple(shards)


def logical_codes(
    loaded: Tensor, rule: ScaleRule, rows: int, columns: int, name: str
) -> tuple[Tensor, Tensor | None]:
    """A checkpoint's weight tensor -> (codes int8 [rows, columns], scale f32 [1] or None).

    Packed: contiguous quarters of the outputs, scale elsewhere. Masters: absmean ternarised over
    the WHOLE matrix, before any slicing. Raises CheckpointError on a dtype or shape that the rule
    does not allow, and on a code 3.
    """
    online = rule is ScaleRule.ONLINE
    if loaded.is_floating_point() != online or not (online or loaded.dtype == torch.uint8):
        wanted = "floating-point masters" if online else "packed uint8 weights"
        raise CheckpointError(
            f"bitnet: expected {wanted} (quantization_config says {rule.value}), got "
            f"{loaded.dtype}{_of(name)}; the checkpoint and its config.json disagree"
        )
    expected = (rows if online else -(-rows // 4), columns)
    if tuple(loaded.shape) != expected:
        along_inputs = [(rows, packed_row_bytes(columns)), (rows, -(-columns // 4))]
        remedy = "the tensor is short, or the engine padded the heads"
        if not online and tuple(loaded.shape) in along_inputs:
            remedy = (
                "these bytes are packed along the inputs, not in transformers' order: use the "
                "original checkpoint, or convert it and serve the model.bin"
            )
        raise CheckpointError(
            f"bitnet: expected weight {list(expected)} for {rows} outputs and {columns} inputs, "
            f"got {list(loaded.shape)}{_of(name)}; {remedy}"
        )
    if online:
        return ops.quantize_weights(loaded.detach().contiguous())
    try:
        return unpack_hf(loaded, rows), None
    except ValueError as error:
        raise CheckpointError(f"bitnet: {error}{_of(name)}") from error


def stored_scale(loaded: Tensor, rule: ScaleRule, name: str) -> Tensor:
    """A checkpoint's weight_scale -> the multiplying scale, f32 [1]; reciprocals invert in fp32."""
    if rule is ScaleRule.ONLINE:
        raise CheckpointError(
            f"bitnet: expected no weight_scale (quantization_config says {rule.value}), got one"
            f"{_of(name)}; the checkpoint and its config.json disagree"
        )
    if not loaded.is_floating_point():
        raise CheckpointError(
            f"bitnet: expected a floating-point weight_scale, got {loaded.dtype}{_of(name)}"
        )
    linear_class = "bitlinear" if rule is ScaleRule.DIVIDE else "autobitlinear"
    try:
        return quantize.multiplying_scale(loaded, linear_class)
    except ValueError as error:
        raise CheckpointError(f"bitnet: {error}{_of(name)}") from error


def _store_scale(layer: nn.Module, param: Tensor, shard: Shard, scale: Tensor) -> None:
    rows = slice(shard.offset, shard.offset + shard.size) if param.numel() > 1 else slice(0, 1)
    param.data[rows] = scale.to(param.device)
    layer_state(layer).loaded.add(("weight_scale", shard.id))


def _packed(state: LayerState, weight: Tensor) -> PackedWeight:
    """The layer's weight in the layout that it has now: canonical, or that which `repack` makes."""
    format = "canonical" if weight.dim() == 2 else _FORMAT
    shape = state.out_features, state.in_features
    return PackedWeight.unchecked(weight, torch.ones(1, dtype=torch.float32), *shape, format, 0)


def _store_rows(state: LayerState, param: Tensor, shard: Shard, rows: Tensor) -> None:
    """Put canonical rows of a shard into the layer's weight, in whatever layout that has now."""
    held = _packed(state, param.data)
    if held.format == "canonical":
        param.data[shard.offset : shard.offset + shard.size] = rows
        return
    tile = param.shape[2]  # rows of a row block of the 2 bit layout: as many as its k-steps' bytes
    last = shard.offset + shard.size == state.out_features
    if shard.offset % tile == 0 and (last or shard.size % tile == 0):
        part = ops.prepack(rows, state.in_features, _FORMAT)
        param.data[shard.offset // tile :][: len(part)] = part
        return
    whole = held.to_canonical()
    whole.weight[shard.offset : shard.offset + shard.size] = rows
    param.data = whole.repack(_FORMAT).weight


def load_weight(layer: nn.Module, param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
    """Load one logical matrix of a checkpoint into `layer.weight` (and, online, its scale)."""
    state = layer_state(layer)
    shard = state.shard(shard_id)
    rows, columns = shard.size * shard.split.parts, state.in_features * state.columns.parts
    codes, scale = logical_codes(loaded, state.rule, rows, columns, state.name)
    part = codes[shard.split.slice(shard.size), state.columns.slice(state.in_features)]
    _store_rows(state, param, shard, ops.pack(part.contiguous()))
    state.loaded.add(("weight", shard.id))
    if scale is not None:
        _store_scale(layer, cast(Tensor, layer.weight_scale), shard, scale)


def load_scale(layer: nn.Module, param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
    """Load one logical matrix's weight_scale into its rows of `layer.weight_scale`."""
    state = layer_state(layer)
    shard = state.shard(shard_id)
    _store_scale(layer, param, shard, stored_scale(loaded, state.rule, state.name))


def load_bias(layer: nn.Module, param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
    """Load one logical matrix's bias into the parameter that the engine made."""
    state = layer_state(layer)
    shard = state.shard(shard_id)
    rows = shard.size * shard.split.parts
    if not loaded.is_floating_point() or tuple(loaded.shape) != (rows,):
        raise CheckpointError(
            f"bitnet: expected bias floating-point [{rows}], got {loaded.dtype} "
            f"{list(loaded.shape)}{_of(state.name)}"
        )
    part = loaded[shard.split.slice(shard.size)]
    param.data[shard.offset : shard.offset + shard.size] = part.to(param.dtype)
    state.loaded.add(("bias", shard.id))


def _parameter(data: Tensor, loader: Callable, layer: nn.Module) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad=False)

    def weight_loader(param: Tensor, loaded: Tensor, shard_id: ShardId = None) -> None:
        loader(layer, param, loaded, shard_id)

    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]  # what engines look for
    return parameter


def make_params(
    layer: nn.Module,
    in_features: int,
    out_sizes: Sequence[int],
    *,
    rule: ScaleRule,
    ids: Sequence[ShardId] | None = None,
    row_splits: Sequence[Split] | None = None,
    column_split: Split = Split(),
    name: str = "",
) -> None:
    """Give `layer` the parameters `weight` and `weight_scale`, each with its own weight_loader.

    Args:
        layer: the engine's linear; it also gets `layer.bitnet`, a LayerState.
        in_features: input columns held by this rank.
        out_sizes: rows held by this rank, one entry per logical matrix.
        rule: how the checkpoint stores weights and scales.
        ids: shard ids the engine passes to the loaders; None: no id for one matrix, else 0, 1, ...
        row_splits: which part of each logical matrix's rows is ours; None: all of them.
        column_split: which part of the columns is ours.
        name: the layer's name, for error messages.

    `weight` is uint8 [sum(out_sizes), 32 * ceil(in_features / 128)], canonical layout, all zeros
    until loaded; `repack` then changes its layout and shape. `weight_scale` is float32 [1] for one
    logical matrix, else [sum(out_sizes)], each row with its own matrix's scale: so a fused layer is
    one op call.
    """
    if ids is None:
        ids = (None,) if len(out_sizes) == 1 else tuple(range(len(out_sizes)))
    shards = plan_shards(out_sizes, row_splits or [Split()] * len(out_sizes), ids)
    state = LayerState(name, rule, in_features, column_split, shards)
    layer.bitnet = state  # type: ignore[assignment]  # nn.Module's stub: Tensor | Module
    rows = sum(out_sizes)
    packed = torch.full((rows, packed_row_bytes(in_features)), ZERO_BYTE, dtype=torch.uint8)
    scales = torch.zeros(1 if len(shards) == 1 else rows, dtype=torch.float32)
    layer.register_parameter("weight", _parameter(packed, load_weight, layer))
    layer.register_parameter("weight_scale", _parameter(scales, load_scale, layer))


def check_complete(layer: nn.Module, *, allow_unloaded: bool = False) -> None:
    """Raise CheckpointError if a weight, scale or bias of `layer` never arrived; changes nothing.

    Engines skip what a checkpoint lacks, and zeros would then be served. `allow_unloaded` lets a
    layer pass that received nothing at all: engines that run on dummy weights.
    """
    state = layer_state(layer)
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
            f"{_of(state.name)}; the checkpoint is incomplete, or stored as another linear_class"
        )


def repack(layer: nn.Module) -> None:
    """Bring `layer.weight` into the layout that the kernels of this CPU read fastest.

    Results stay the same bit for bit. The parameter object stays too, with its weight_loader; only
    its data change, and the canonical rows are freed. Changes nothing when called again, nor for
    more than 32768 inputs, which no such layout takes. What engines take from state_dict() is then
    this layout, which fits this instruction set alone; `canonical_rows` has the portable form.
    """
    state, weight = layer_state(layer), cast(Tensor, layer.weight)
    if choose_format("auto", state.in_features) == _FORMAT:
        weight.data = _packed(state, weight.data).repack(_FORMAT).weight


def canonical_rows(layer: nn.Module) -> Tensor:
    """The layer's packed weight, uint8 [outputs, 32 * ceil(inputs / 128)], in whatever layout it
    is held; shared with the layer where it is held so.
    """
    state, weight = layer_state(layer), cast(Tensor, layer.weight).data
    return _packed(state, weight).to_canonical().weight
