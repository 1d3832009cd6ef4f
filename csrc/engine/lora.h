// LoRA beside the projections of a model step. Tokens with an adapter get
// y = round(y + ((x A^T) B^T) * scaling). Both products sum as the dense head does, so a token's
// result does not depend on the tokens beside it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace bitnet::engine {

// Of one projection and one adapter.
struct LoraWeight {
  DType type;     // of both factors, floating
  const void* a;  // [rank, k]
  const void* b;  // [lora_tiles(rows), rank, 16]: row n in lane n % 16 of tile n / 16
  int64_t rank;   // 0: this adapter has none here
  float scaling;
};

constexpr int64_t kLoraTileRows = 16;
constexpr int64_t lora_tiles(int64_t rows) { return (rows + kLoraTileRows - 1) / kLoraTileRows; }

// The tokens of a stage ordered by adapter: a token's place is its row in the buffers of LoRA.
// Those without an adapter come last and have no row there.
class AdapterGroups {
 public:
  struct Group {
    int64_t adapter, begin, end;  // places
  };

  // adapters: of each of `count` tokens, -1: none.
  void build(const int64_t* adapters, int64_t count);

  int64_t count() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t with_adapter() const { return groups_.empty() ? 0 : groups_.back().end; }
  const std::vector<Group>& groups() const { return groups_; }
  int64_t place(int64_t token) const { return places_[static_cast<size_t>(token)]; }
  int64_t token(int64_t place) const { return tokens_[static_cast<size_t>(place)]; }

 private:
  std::vector<Group> groups_;
  std::vector<int64_t> places_, tokens_;
};

// One projection's LoRA weights and what they read and write.
struct LoraProjection {
  const LoraWeight* weights;  // of every adapter
  int64_t k, rows;
  const float* x;  // [with_adapter, k], by place: what the projection read, not yet quantised
  float* inner;    // [with_adapter, max_rank]: x A^T, of a group in rows of its own rank
  int64_t max_rank;
  Prefetch ahead;
  DType type;       // what outputs are rounded to
  void* y;          // [tokens, rows] of it, the projection's outputs
  float* residual;  // [tokens, rows]: what outputs are added to; null: they stay in y
};

// inner = x A^T. A unit: a few rows of A x a block of a group's tokens.
int64_t shrink_units(const AdapterGroups& groups, const LoraProjection& p);
void shrink(const KernelTable& kernels, const AdapterGroups& groups, const LoraProjection& p,
            int64_t begin, int64_t end);

// y = round(y + (inner B^T) * scaling), then residual += y, of tokens without an adapter too.
// A unit: a block of places x a block of rows.
int64_t expand_units(const AdapterGroups& groups, const LoraProjection& p);
void expand(const KernelTable& kernels, const AdapterGroups& groups, const LoraProjection& p,
            int64_t begin, int64_t end);

}  // namespace bitnet::engine
