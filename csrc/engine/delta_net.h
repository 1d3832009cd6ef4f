// Gated DeltaNet on new tokens of any sequences: convolution, gates and delta rule over the states
// of their slots, cut into units for threads that the caller owns. The arithmetic is in the kernels
// (kernels/delta).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/kept.h"
#include "engine/kv_cache.h"
#include "kernels/kernel_table.h"

namespace bitnet::engine {

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t taps;  // of the convolution, the current token's included

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  // Of the convolution: queries, keys, values.
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t slabs() const { return value_dim / kStateColumns; }
  // Of queries, of keys and of values, in this order; and a row of any of them: the rows of a head
  // lie together, so that the tokens of a prompt are one stream.
  int64_t heads() const { return 2 * key_heads + value_heads; }
  int64_t head_floats() const { return key_dim > value_dim ? key_dim : value_dim; }
  int64_t mixed_floats(int64_t tokens) const { return heads() * tokens * head_floats(); }
  int64_t slab_floats() const { return key_dim * kStateColumns; }
  int64_t state_floats() const { return value_heads * slabs() * slab_floats(); }
  // What a slab keeps of a draft: k, e, decay.
  int64_t kept_floats() const { return key_dim + kStateColumns + 16; }
  // What a sequence keeps, in the order of DeltaStates.
  std::vector<KeptBuffer> buffers() const {
    return {{"recurrent", {value_heads, slabs(), key_dim, kStateColumns}},
            {"inputs", {channels()}, taps - 1},
            {"kept", {value_heads, slabs(), kept_floats()}, 0}};
  }
  bool operator==(const DeltaShape&) const = default;
};

struct DeltaWeights {
  const float* conv;             // [taps, channels]
  const float *a_log, *dt_bias;  // [value_heads]
};

// What the memory of a unit is made for: features of a head's keys, and taps.
inline constexpr int64_t kMaxKeyDim = 256, kMaxTaps = 8;

// The states of one layer in all slots, float32. *_slot: floats from one slot to the next.
//   recurrent  [value_heads][slabs][key_dim][kStateColumns]
//   inputs     [taps - 1 + drafts][channels], the last inputs of the convolution, oldest first
//   kept       [drafts][value_heads][slabs][kept_floats]
struct DeltaStates {
  float *recurrent, *inputs, *kept;
  int64_t recurrent_slot, inputs_slot, kept_slot;

  // Of a layer of DeltaShape::buffers().
  static DeltaStates of(const KeptMemory* buffers, int64_t layer) {
    const auto at = [&](int i) { return buffers[i].data + layer * buffers[i].layer; };
    return {at(0), at(1), at(2), buffers[0].slot, buffers[1].slot, buffers[2].slot};
  }
};

// Rows of one token; q and k are normalised, queries divided by sqrt(key_dim).
struct DeltaRows {
  const void* u;  // [tokens, channels] of `type`, what the convolution sees
  DType type;
  float* mixed;         // [heads, tokens, head_floats], behind the convolution
  float *decay, *beta;  // [tokens, value_heads]
  float* out;           // [tokens, values]
};

// Units of different kinds: those of `mix` before those of `rule`; of either, any order.
class DeltaNet {
 public:
  DeltaNet(const DeltaShape& shape, const DeltaWeights& weights);

  const DeltaShape& shape() const { return shape_; }
  int64_t mix_units(const Sequences& s) const { return s.count * shape_.heads(); }
  int64_t rule_units(const Sequences& s) const {
    return s.count * shape_.value_heads * shape_.slabs();
  }
  // Floats of a thread's scratch, for either.
  int64_t thread_floats() const;

  // Unit: a head of queries, keys or values of a sequence.
  void mix(const KernelTable& kernels, const Sequences& s, const StateStep* steps,
           const DeltaStates& states, const DeltaRows& rows, int64_t unit, float* scratch) const;
  // Unit: a slab of a value head of a sequence.
  void rule(const KernelTable& kernels, const Sequences& s, const StateStep* steps,
            const DeltaStates& states, const DeltaRows& rows, int64_t unit, float* scratch) const;
  // Rows [begin, end) of decay and beta from a and b [rows, value_heads].
  void gates(const KernelTable& kernels, const float* a, const float* b, int64_t head,
             int64_t heads, float* decay, float* beta) const;

 private:
  float* kept(const DeltaStates& states, int64_t slot, int64_t draft, int64_t slab) const;

  DeltaShape shape_;
  DeltaWeights weights_;
  std::vector<float> key_scale_, query_scale_;  // what a normalised row is multiplied by
};

// All of it in regions of its own; a, b [tokens, value_heads]. rows.mixed, decay and beta may be
// null: they are allocated.
void delta_net(const DeltaNet& net, const Sequences& s, const StateStep* steps,
               const DeltaStates& states, const DeltaRows& rows, const float* a, const float* b);

}  // namespace bitnet::engine
