"""The ops on parts of a layer, and a whole step of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitnet_ops.ops._operator import operator
from bitnet_ops.ops.ternary import projection_shape

__all__ = [
    "qkv_forward",
    "mlp_forward",
    "paged_attention",
    "paged_cache_update",
    "delta_net",
    "bind_program",
    "run_program",
    "model_step",
    "release_program",
]


@operator
def qkv_forward(
    x: Tensor,
    norm_weight: Tensor,
    q_weight: Tensor,
    q_scale: Tensor,
    k_weight: Tensor,
    k_scale: Tensor,
    v_weight: Tensor,
    v_scale: Tensor,
    eps: float,
    shape: Sequence[int] | None = None,
    activation_format: str = "int8",
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, quantisation and the three attention projections in one op.

    `h = rms_norm(x, norm_weight, eps)`, then `linear(h, w, scale)` for q, k and v: equal to that
    composition bit for bit. Every projection keeps its own scale.

    Args:
        x: F [..., K].
        norm_weight: F [K].
        q_weight, k_weight, v_weight: packed uint8 [N_i, 32 * ceil(K / 128)], or `repack`'s.
        q_scale, k_scale, v_scale: float32 [1] or [N_i], or all of groups, as `linear`'s.
        eps: as `rms_norm`.
        shape: (N, K) of q, of k and of v, one behind the other, as for `linear`.
        activation_format: as of `linear`; "int8" without groups.
    Returns:
        (q, k, v), x.dtype [..., N_i].
    Raises:
        RuntimeError: as `rms_norm` and `linear`.
    Source: transformers BitNetAttention.
    """
    sizes = shape or ()
    return (
        x.new_empty(projection_shape(x, q_weight, sizes[0:2])),
        x.new_empty(projection_shape(x, k_weight, sizes[2:4])),
        x.new_empty(projection_shape(x, v_weight, sizes[4:6])),
    )


@operator
def mlp_forward(
    x: Tensor,
    norm_weight: Tensor,
    gate_weight: Tensor,
    gate_scale: Tensor,
    up_weight: Tensor,
    up_scale: Tensor,
    sub_norm_weight: Tensor | None,
    down_weight: Tensor,
    down_scale: Tensor,
    eps: float,
    activation: str,
    shape: Sequence[int] | None = None,
    activation_format: str = "int8",
) -> Tensor:
    """Norm, gate and up, activation, sub-norm and down projection in one op; no residual inside.

    `h = rms_norm(x)`, `z = act(linear(h, gate), linear(h, up))`, `y = linear(rms_norm(z), down)`,
    where act is `relu2_mul`, `silu_and_mul` or `gelu_tanh_and_mul`; without sub_norm_weight the
    second norm is left out. Equal to that composition bit for bit for float32 and bfloat16. For
    float16 everything between the first norm and y stays float32, because squared ReLU overflows
    float16.

    Args:
        x: F [..., K].
        norm_weight: F [K].
        gate_weight, up_weight: packed uint8 [I, 32 * ceil(K / 128)], or CPU-specific layouts.
        sub_norm_weight: F [I] or None.
        down_weight: packed uint8 [N, 32 * ceil(I / 128)], or such a layout.
        gate_scale, up_scale, down_scale: as of `linear`; gate's and up's of groups of one size, or
            neither.
        eps: as `rms_norm`, for both norms.
        activation: "relu2", "silu" or "gelu_pytorch_tanh".
        shape: (I, K, I, K, N, I), of gate, up and down, as for `linear`.
        activation_format: as of `linear`; "int8" unless all scales are of groups.
    Returns:
        x.dtype [..., N].
    Raises:
        RuntimeError: as `rms_norm` and `linear`; another activation.
    Source: transformers BitNetMLP, LlamaMLP.
    """
    return x.new_empty(projection_shape(x, down_weight, (shape or ())[4:]))


@operator
def paged_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: str = "rows",
    window: int = 0,
    policy: str = "",
    key_bounds: Tensor | None = None,
) -> Tensor:
    """Causal grouped-query attention of any sequences' new tokens over a pool of blocks.

    `softmax(scale * q k^T) v` in float32; the token at position p of a sequence sees its positions
    0 .. p, with a window p - window + 1 .. p; query head h reads key/value head h // (H / KV).
    Every sequence has its own number of new tokens, which are its last ones, and its positions lie
    in the blocks of its row of block_table: position p in block_table[s, p // block_size] at p %
    block_size. Prompts in chunks, decoding and the check of a draft may share a call. Pools are
    read where they lie; only a chunk of 64 positions that one block does not hold, or whose keys
    and values have other strides, is first put together in the cache.
    Positions are taken in chunks of 64, whose softmaxes are merged in ascending order, so a token's
    result does not depend on how prefill was split. Positions that score -inf weigh nothing. Chunks
    before the window are not read and cost nothing; positions of its first chunk that lie before it
    take no part, whatever they hold.
    Over int8 caches queries and weights become 16-bit integers and both sums are exact, so the
    result is off by those roundings alone. Over bfloat16 caches queries and weights become bfloat16
    (what is below 2^-55: 0) and sums run in the order of the matrix instruction TDPBF16PS: for
    every 32 features, or positions of a chunk, one chain over the even and one over the odd ones
    (csrc/kernels/kernel_table.h, attend_chunk, defines both).
    A rectangular cache [B, KV, L, D] is a pool of B blocks: `nn.kv_pool.attend_rectangular`.

    Args:
        query: F [tokens, H, D], already rotated, one sequence's tokens behind the other's.
        key_pool, value_pool: C [blocks, block_size, KV, D] with any strides but a contiguous D,
            holding the keys and values of these tokens too
            (`paged_cache_update` first). SGLang's [slots, KV, D] is `unflatten(0, (-1, page_size))`
            of it, vLLM's [blocks, KV, block_size, D] its `transpose(1, 2)`.
        query_start_loc: int64 or int32 [n + 1], ascending: the first token of each sequence, and
            the number of tokens.
        seq_lens: int64 or int32 [n], the tokens of each sequence, the new ones included.
        block_table: int64 or int32 [n, columns]; what is behind a sequence's blocks is not read.
        scale: multiplies the scores, usually 1 / sqrt(D).
        key_scale, value_scale: float32 [blocks, block_size, KV] with int8 pools, whose D is at most
            512; any strides.
        layout: "rows", or "panels" of a bfloat16 or int8 pool as `paged_cache_update` writes them,
            with the same results: in the place of 16 rows of a head, whose stride is then D, their
            numbers by words of w = 2 (bfloat16) or 4: keys [D / w, 16, w], values [16 / w, D, w].
            block_size and D are multiples of 16.
        window: of a sliding window, how many positions a token sees, itself included; 0: all.
            Blocks that lie wholly before it are not read, though the table has to name some.
        policy: what a token sees, as the keys of an attention block say it
            (docs/reference/program.md), such as "window=256 sinks=4"; window is 0 then.
        key_bounds: bfloat16 [blocks, block_size / 64, KV, 2 * D], as `paged_cache_update` keeps
            them, for a policy that chooses pages.
    Returns:
        query.dtype [tokens, H, D].
    Raises:
        RuntimeError: a wrong dtype or shape, H not a multiple of KV, a block outside the pool, a
            table too narrow for a length, a negative window, a policy that is none.
    Source: Vaswani et al. 2017; GQA, arXiv 2305.13245; windows as in Mistral 7B, arXiv 2310.06825;
        PagedAttention, arXiv 2309.06180; names as in vLLM.
    """
    return query.new_empty(query.shape)


@operator
def paged_cache_update(
    key_pool: Tensor,
    value_pool: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: str = "rows",
    key_bounds: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the pools, in place.

    `key_pool[slot // block_size, slot % block_size] = key[t]` for slot = slot_mapping[t], likewise
    value, rounded to the pool's dtype. A slot out of range is an error before anything is written.
    An 8-bit float cache saturates: a finite number beyond 448 (float8_e4m3fn) or 57344
    (float8_e5m2) becomes that, never NaN or an infinity; NaN stays NaN; an infinity stays one in
    float8_e5m2 and becomes 448 in float8_e4m3fn, which has none. The 16-bit types are casts of
    torch (beyond the largest number lies infinity), but what is below 2^-55 becomes 0 in bfloat16.
    An int8 cache gets `round(x * (127 / a))`, half to even, and the scale `a / 127`, with
    a = max(absmax of the row, 1e-30); a row that holds NaN or an infinity becomes zeros with the
    scale NaN.

    Args:
        key_pool, value_pool: C [blocks, block_size, KV, D], as
            `paged_attention` takes them; both are mutated.
        key, value: F [tokens, KV, D], of one dtype.
        slot_mapping: int64 or int32 [tokens], all different.
        key_scale, value_scale: float32 [blocks, block_size, KV] with int8 pools, mutated too.
        layout: "rows" or "panels", as `paged_attention` takes it.
        key_bounds: bfloat16 [blocks, block_size / 64, KV, 2 * D], mutated too: of each page of 64
            positions, once its last one is written, the largest of every feature of its keys as
            they are stored, then the smallest, rounded away from them; NaN where one is. block_size
            is a multiple of 64.
    Raises:
        RuntimeError: a wrong dtype or shape, a slot outside the pool or given twice, overlapping
            tensors.
    Source: PagedAttention, arXiv 2309.06180; names as in vLLM.
    """
    return None


@operator
def delta_net(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Tensor,
    A_log: Tensor,  # noqa: N803  (Hugging Face's name)
    dt_bias: Tensor,
    states: list[Tensor],
    layer: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_steps: Tensor,
    key_heads: int,
    key_dim: int,
) -> Tensor:
    """Gated DeltaNet on any sequences' new tokens: convolution, gates and delta rule over states.

    Channels of qkv are the queries and keys of key_heads heads of key_dim features, then the values
    of HV heads of DV. `y_t = silu(sum_j conv[j] * qkv_{t - kernel + 1 + j})`, causal, zeros before
    the start; queries and keys of a head are brought to length 1 (`x / sqrt(sum x^2 + 1e-6)`),
    queries divided by sqrt(DK); `decay = exp(-exp(A_log) * softplus(a + dt_bias))`, `beta =
    sigmoid(b)`. Of a value head n with the queries and keys of head n // (HV / key_heads) and the
    state S [DK, DV], for every token:

        e = beta * (v - decay * S^T k);  S <- decay * S + k e^T;  out = S^T q

    All in float32, sums over the rows of S in ascending order, token by token: so a token's result
    does not depend on how a prompt was split or what else is in the batch. The last tokens of a
    sequence may be drafts: its state stays that in front of them, and the next step follows as many
    of them as it says. A draft that turned out wrong costs nothing, one that was right one pass.

    Args:
        qkv: F [tokens, C], one sequence's tokens behind the other's.
        a, b: float32 [tokens, HV].
        conv: float32 [kernel, C], kernel from 2 to 8, the last row that of the current token.
        A_log, dt_bias: float32 [HV].
        states: float32, contiguous but for the strides of slots and layers, which may be any that
            keep them apart: the recurrent states [slots, layers, HV, DV / 32, DK, 32], columns in
            slabs of 32; the last inputs of the convolution [slots, layers, kernel - 1 + drafts, C],
            oldest first; what is kept of drafts [slots, layers, drafts, HV, DV / 32, DK + 48]. DK
            and DV are multiples of 32 up to 256. All are mutated.
        layer: whose states.
        query_start_loc, seq_lens: as `paged_attention` takes them. A sequence whose first new token
            stands at position 0 begins without a state, whatever its slot holds.
        state_steps: int64 [n, 3], of each sequence its slot, how many drafts of its last step to
            follow first, and how many of its new tokens, the last ones, are drafts.
        key_heads, key_dim: heads of queries and keys, and DK.
    Returns:
        float32 [tokens, HV * DV].
    Raises:
        RuntimeError: a wrong dtype or shape, a slot that is not there or is given twice, more
            drafts than there is room for, states that overlap what is read.
    Source: Gated Delta Networks, arXiv 2412.06464; transformers Qwen3_5GatedDeltaNet.
    """
    return a.new_empty([qkv.shape[0], qkv.shape[1] - 2 * key_heads * key_dim])


@operator
def bind_program(program: str, names: str, tensors: list[Tensor]) -> Tensor:
    """Parse a model program and bind its names to tensors: once, for any number of `model_step`s.

    A program is a listing of blocks, one a line, `kind key=value ...`, whose names stand for
    tensors: docs/reference/program.md lists the kinds of lines and their keys. The tensors stay
    alive until `release_program`. Values that change in place are seen by the next step, and so is
    memory that is exchanged below a tensor (`tensor.data = ...`) between steps; while one runs in
    another thread, memory that was freed may be read.

    Args:
        program: the listing.
        names: the name of each tensor, one a line.
        tensors: a projection P has P.weight, in any layout that `linear` takes, P.weight_scale
            and maybe P.bias float32 [N] and P.rms_norm.weight float32 [K]; a norm P has P.weight
            float32 [n]; the head's weight P has P.weight and maybe P.scale, as `lm_head` takes
            them; a rope names its frequencies float32 [D / 2], an adapter its factors.
    Returns:
        int64 [1], a handle: the number of the program in this process.
    Raises:
        RuntimeError: a line, key or name that is not known, with its line; a tensor of another
            dtype, shape or layout, by its name.
    Source: a graph that is built once and run many times, as XNNPACK's subgraphs.
    """
    return torch.empty([1], dtype=torch.int64)


@operator
def release_program(program: Tensor) -> None:
    """Release a program and its tensors; its handle must not be used again.

    Args:
        program: int64 [1], the handle; one that is not known, or no longer, is left alone.
    Raises:
        RuntimeError: another dtype or shape.
    Source: as `bind_program`.
    """
    return None


@operator
def run_program(
    x: Tensor,
    program: Tensor,
    cache_names: str,
    caches: list[Tensor],
    step_names: str,
    step: list[Tensor],
    out_features: int,
    layout: str = "rows",
    largest: int = 0,
) -> Tensor:
    """All blocks of a program on the new tokens of any sequences: one call, one parallel region.

    Chunks of prompts, single tokens and drafts of different sequences share a call. A token's
    logits are the same, bit for bit, whatever else is in the call, whatever the blocks of the cache
    and the chunks, and equal to those of single ops (models/composed.py). Memory for activations
    grows with the number of tokens.

    Args:
        x: float32 [tokens, hidden], the embedded new tokens, one sequence's behind the other's.
        program: int64 [1], as `bind_program` returned it.
        cache_names, caches: by name, one a line, in any order; all are mutated. "key" and "value"
            C [layers, blocks, block_size, KV, D], with any strides but a contiguous D; with int8
            "key_scale" and "value_scale" float32 [layers, blocks, block_size, KV]; of a program
            whose blocks choose pages "key_bounds" bfloat16 [layers, blocks, block_size / 64, KV,
            2 * D] (`paged_cache_update`); of one with blocks delta_net their states "recurrent",
            "inputs" and "kept" (`delta_net`). Each block of a kind has a layer, in their order.
            States may lie in the memory of keys and values where slot n is block n: a step then
            uses a block for either.
        step_names, step: likewise. int64 or int32: "positions" [tokens], of the rotary embedding;
            "slot_mapping" [tokens], where keys and values go; "query_start_loc", "seq_lens" and
            "block_table" as `paged_attention` takes them; "logit_rows" [r], in any order, r at most
            the number of tokens: the tokens whose logits are wanted; only they are computed behind
            the last attention. Where there is need of them: "adapters" [sequences], the number of
            each one's LoRA adapter in the program, -1: none; "state_steps" as `delta_net` takes it,
            of a program with such blocks; "draws" float64 [r, 2], the temperature (finite, at least
            0) and the uniform (in [0, 1)) with which `sample_tokens` draws from each row without
            filters. With largest above 0 a row whose temperature is above 0 then wants the logit of
            the token that is drawn, and no other.
        out_features: V, the program's vocab.
        layout: "rows" or "panels", as `paged_attention` takes it.
        largest: only so many of each row's largest logits are wanted, lower ids first among equals;
            those of tokens that cannot be among them may be -inf. 0: all are wanted.
    Returns:
        float32 [r, V], the logits.
    Raises:
        RuntimeError: a handle that is not known, a name that is not, or is missing, a wrong dtype
            or shape, caches that overlap what is read, and as `paged_attention` and
            `paged_cache_update`; nothing has been written then.
    Source: transformers BitNetForCausalLM, LlamaForCausalLM; LoRA, arXiv 2106.09685; names as in
        vLLM.
    """
    rows = step[step_names.split("\n").index("logit_rows")]
    return x.new_empty([rows.shape[0], out_features], dtype=torch.float32)


@operator
def model_step(
    x: Tensor,
    program: Tensor,
    caches: list[Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    logit_rows: Tensor,
    out_features: int,
    adapters: Tensor | None = None,
    layout: str = "rows",
    state_steps: Tensor | None = None,
    largest: int = 0,
    draws: Tensor | None = None,
) -> Tensor:
    """`run_program` in the form of version 0.1: caches by their places.

    Args:
        x, program, out_features, layout, largest: as `run_program` takes them.
        caches: its caches in the order in which they stand there, without names.
        positions, slot_mapping, query_start_loc, seq_lens, block_table: of its step.
        logit_rows, adapters, state_steps, draws: of its step.
    Returns:
        float32 [r, V], the logits.
    Raises:
        RuntimeError: as `run_program`.
    Source: as `run_program`.
    """
    return x.new_empty([logit_rows.shape[0], out_features], dtype=torch.float32)
