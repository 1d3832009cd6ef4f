// THE CATALOGUE: every operator of torch.ops.bitnet, its schema under one comment. The functions
// behind them stand in ops/ and are registered there; fakes and documentation:
// python/bitnet_ops/ops.
//
// F stands for float32, bfloat16 or float16, C for a type of caches: F, float8_e4m3fn, float8_e5m2
// or int8.  R = 32 * ceil(K / 128), the bytes of a packed row (format/layout.h).  Scales multiply.
// Nothing aliases; what is mutated carries an alias mark.
// W stands for a ternary matrix of N x K: canonical uint8 [N, R], or one of the CPU-specific
// layouts of the kernels that run, 2 bit uint8 [tiles, lines, 4 L] or 1.6 bit uint8 [tiles, lines,
// L, 4].  S stands for its scales of groups of G = 128 or 64 weights of a row: float32 [N, ceil(K /
// G)], or beside a CPU-specific layout float32 or float16 [tiles, ceil(K / G), rows of a tile].
// shape is [N, K] of W, which its padded bytes do not record: CPU-specific layouts need it, and x
// is checked against its K; with canonical rows it may be left out, and then any K that needs as
// many bytes is taken.  A stands for what activations become: "int8" (one scale a token),
// "int8_group" or "int16_group" (one a token and group of G; with weights that have S).
// Inputs come first, then weights; gemv and gemm alone begin with the weight.
#include "ops/namespace.h"

BITNET_LIBRARY(m) {
  // codes int8 [N, K] in {-1, 0, 1} -> uint8 [N, R]
  m.def("pack(Tensor codes) -> Tensor");
  // weight uint8 [N, R] -> int8 [N, in_features]
  m.def("unpack(Tensor weight, int in_features) -> Tensor");
  // canonical weight uint8 [N, R], format "2bit" or "1.6bit" -> W in that CPU-specific layout
  m.def("repack(Tensor weight, int in_features, str format, int group_size=0) -> Tensor");
  // W in a CPU-specific layout -> canonical uint8 [N, R]
  m.def("unrepack(Tensor weight, int[] shape) -> Tensor");
  // weight F [N, K] -> codes int8 [N, K], scale float32 [1] (absmean)
  m.def("quantize_weights(Tensor weight) -> (Tensor codes, Tensor scale)");
  // x F [..., K], activation_format A -> q int8 or int16 [..., K], scale float32 [...] (per token,
  //   absmax), or of groups [..., ceil(K / group_size)]
  m.def(
      "quantize_activations(Tensor x, str activation_format=\"int8\", int group_size=128) -> "
      "(Tensor q, Tensor scale)");
  // weight W, x int8 [K], x_scale float32 [1], weight_scale float32 [1] or [N]
  //   -> [N], int32 without scales, float32 with both
  m.def(
      "gemv(Tensor weight, Tensor x, Tensor? x_scale=None, Tensor? weight_scale=None, "
      "int[]? shape=None) -> Tensor");
  // weight W, x int8 [M, K], x_scale float32 [M], weight_scale float32 [1] or [N]
  //   -> [M, N], int32 without scales, float32 with both
  m.def(
      "gemm(Tensor weight, Tensor x, Tensor? x_scale=None, Tensor? weight_scale=None, "
      "int[]? shape=None) -> Tensor");
  // x F [..., K], weight W, weight_scale float32 [1], [N] or S, bias F [N], activation_format A ->
  //   F [..., N]
  m.def(
      "linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, "
      "int[]? shape=None, str activation_format=\"int8\") -> Tensor");
  // x F [..., K], weight F [K] -> F [..., K]
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  // x, residual F [..., K], weight F [K] -> y, residual_out F [..., K]
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor y, Tensor "
      "residual_out)");
  // gate, up float32 or bfloat16 [..., K] -> [..., K]
  m.def("relu2_mul(Tensor gate, Tensor up) -> Tensor");
  // x F [..., 2 d] (gate, then up) -> F [..., d]
  m.def("silu_and_mul(Tensor x) -> Tensor");
  // x F [..., 2 d] (gate, then up) -> F [..., d], gelu by tanh
  m.def("gelu_tanh_and_mul(Tensor x) -> Tensor");
  // gate, up F [..., K], activation "relu2", "silu", "gelu_pytorch_tanh" or "sigmoid" -> F [...,
  // K],
  //   activation(gate) * up
  m.def("gated(Tensor gate, Tensor up, str activation) -> Tensor");
  // x F [..., K], signs float32 [K / B, B] -> F [..., K], each B features times the normalised
  //   Walsh-Hadamard matrix H in Sylvester's order: H (signs * x), or inverse signs * (H x)
  m.def("hadamard(Tensor x, Tensor signs, bool inverse=False) -> Tensor");
  // x F [..., H, D], positions int64 [...], or with sections [3, ...], inv_freq float32 [D / 2]
  //   -> F [..., H, D]; cosines and sines are multiplied by attention_factor
  m.def(
      "rope(Tensor x, Tensor positions, Tensor inv_freq, float attention_factor=1.0, "
      "int[]? sections=None) -> Tensor");
  // x F [..., K], norm_weight F [K], {q,k,v}_weight W, {q,k,v}_scale float32 [1], [N] or S,
  //   shape [N, K] of q, of k and of v, or empty -> q, k, v F [..., N of each]
  m.def(
      "qkv_forward(Tensor x, Tensor norm_weight, Tensor q_weight, Tensor q_scale, Tensor k_weight, "
      "Tensor k_scale, Tensor v_weight, Tensor v_scale, float eps, int[]? shape=None, str "
      "activation_format=\"int8\") -> (Tensor q, Tensor k, Tensor v)");
  // x F [..., K], norm_weight F [K], gate_ and up_weight W of I x K, sub_norm_weight F [I],
  //   down_weight W of N x I, scales float32 [1], per row or S, activation "relu2", "silu" or
  //   "gelu_pytorch_tanh", shape [I, K, I, K, N, I] or empty -> F [..., N], without the residual
  m.def(
      "mlp_forward(Tensor x, Tensor norm_weight, Tensor gate_weight, Tensor gate_scale, "
      "Tensor up_weight, Tensor up_scale, Tensor? sub_norm_weight, Tensor down_weight, "
      "Tensor down_scale, float eps, str activation, int[]? shape=None, str "
      "activation_format=\"int8\") -> Tensor");
  // Over a pool of blocks, read where it lies: query F [tokens, H, D] of all sequences, one behind
  //   the other; pools C [blocks, block_size, KV, D] with any strides of the first three
  //   dimensions, scales float32 [blocks, block_size, KV] of int8 pools; integers int64 or int32:
  //   query_start_loc [n + 1], the first token of each sequence, seq_lens [n], the new tokens
  //   included, block_table [n, at least its blocks]; layout: how bfloat16 and int8 pools hold 16
  //   positions of a head, "rows" or "panels" -> F [tokens, H, D]; the token at position p sees
  //   0 .. p, with a window p - window + 1 .. p
  m.def(
      "paged_attention(Tensor query, Tensor key_pool, Tensor value_pool, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor block_table, float scale, Tensor? key_scale=None, Tensor? "
      "value_scale=None, str layout=\"rows\", int window=0, str policy=\"\", Tensor? "
      "key_bounds=None) -> Tensor");
  // writes key, value F [tokens, KV, D] into slot_mapping [tokens] of such pools, slot = block *
  //   block_size + position (mutated)
  m.def(
      "paged_cache_update(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor key, Tensor value, "
      "Tensor slot_mapping, Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None, str "
      "layout=\"rows\", Tensor(e!)? key_bounds=None) -> ()");
  // Gated DeltaNet on new tokens of all sequences, one behind the other: qkv F [tokens, C], a and b
  //   float32 [tokens, HV], conv float32 [kernel, C], A_log and dt_bias float32 [HV]; states of
  //   slots, all float32 (mutated): recurrent [slots, layers, HV, DV / 32, DK, 32], the last inputs
  //   of the convolution [slots, layers, kernel - 1 + drafts, C], what is kept of drafts [slots,
  //   layers, drafts, HV, DV / 32, DK + 48]; query_start_loc and seq_lens as for paged_attention; a
  //   sequence at position 0 begins without a state; state_steps int64 [n, 3]: the slot of each,
  //   how many of its last drafts to follow first, how many of its last new tokens are drafts
  //   -> float32 [tokens, HV * DV]
  m.def(
      "delta_net(Tensor qkv, Tensor a, Tensor b, Tensor conv, Tensor A_log, Tensor dt_bias, "
      "Tensor(a!)[] states, int layer, Tensor query_start_loc, Tensor seq_lens, Tensor "
      "state_steps, int key_heads, int key_dim) -> Tensor");
  // weight F [V, K], format "int8" -> int8 [V, K], float32 [V]; format "int4", group_size G (64 or
  //   128) -> uint8 [ceil(V / 16), ceil(K / G) * G / 8, 64], bfloat16 [ceil(V / 16), ceil(K / G),
  //   16]
  m.def(
      "quantize_head(Tensor weight, str format, int group_size=128) -> (Tensor packed, Tensor "
      "scale)");
  // x F [..., K], weight F [V, K], or weight and scale as quantize_head returns them, or W and S,
  //   shape [V, K], needed with W; without it an int4 weight has all its padded rows
  //   -> float32 [..., V]
  m.def("lm_head(Tensor x, Tensor weight, Tensor? scale=None, int[]? shape=None) -> Tensor");
  // ids int64 [...], weight, scale and shape as for lm_head -> float32 [..., K]
  m.def("embedding(Tensor ids, Tensor weight, Tensor? scale=None, int[]? shape=None) -> Tensor");
  // logits float32 [R, V], temperature, top_p, min_p and uniforms float64 [R], top_k int64 [R];
  //   edits of single logits: those of row r are edit_starts[r] .. edit_starts[r + 1] (int64
  //   [R + 1]) of edit_ids int64 [E] and edits float32 [E, 3] (bias, repetition, subtracted)
  //   -> int64 [R], -1 for a row without a distribution
  m.def(
      "sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor uniforms, Tensor? edit_starts=None, Tensor? edit_ids=None, Tensor? edits=None) -> "
      "Tensor");
  // as sample_tokens -> float32 [R, V], what it draws from; NaN for a row without a distribution
  m.def(
      "token_probabilities(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor "
      "min_p, Tensor? edit_starts=None, Tensor? edit_ids=None, Tensor? edits=None) -> Tensor");
  // logits float32 [R, V], tokens int64 [R] from -1 to V - 1 -> float32 [R]; int64 and float32 [R,
  //   top]
  m.def(
      "top_logprobs(Tensor logits, Tensor tokens, int top) -> (Tensor logprobs, Tensor top_ids, "
      "Tensor top_logprobs)");
  // A model as a program (docs/reference/program.md): its listing, the names of the tensors, one a
  //   line, and the tensors, which it keeps -> handle int64 [1], for this process
  m.def("bind_program(str program, str names, Tensor[] tensors) -> Tensor");
  // handle -> nothing; it must not be used again
  m.def("release_program(Tensor program) -> ()");
  // The whole program on new tokens of any sequences: x float32 [tokens, K] embedded tokens, the
  //   handle of the program; caches by name, all mutated: key and value, pools as for
  //   paged_attention with one more dimension, the layers, before the others, of int8 pools
  //   key_scale and value_scale, of a program that chooses pages key_bounds, and what its blocks
  //   keep for sequences (engine/kept.h), of delta_net recurrent, inputs and kept; step by name:
  //   positions [tokens] for the rotation, slot_mapping [tokens], query_start_loc, seq_lens and
  //   block_table as there, logit_rows [r], r at most tokens: the tokens whose logits are wanted,
  //   and maybe adapters [sequences]: the LoRA adapter of each, -1: none; state_steps as delta_net;
  //   draws float64 [r, 2]: temperature and uniform of a row; out_features: the program's vocab V
  //   largest: only so many largest logits of a row are wanted, lower ids first among equals, so
  //   that those of other tokens may be -infinity; 0: all; above temperature 0 only the logit of
  //   the token that is drawn is wanted
  //   -> logits float32 [r, V]; of a head without a matrix V is K: the rows behind the last norm
  m.def(
      "run_program(Tensor x, Tensor program, str cache_names, Tensor(a!)[] caches, str step_names, "
      "Tensor[] step, int out_features, str layout=\"rows\", int largest=0) -> Tensor");
  // run_program in the form of 0.1: caches by their places, in the order above, the parts of a step
  //   as arguments of their own
  m.def(
      "model_step(Tensor x, Tensor program, Tensor(a!)[] caches, Tensor positions, Tensor "
      "slot_mapping, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor "
      "logit_rows, int out_features, Tensor? adapters=None, str layout=\"rows\", Tensor? "
      "state_steps=None, int largest=0, Tensor? draws=None) -> Tensor");
}
