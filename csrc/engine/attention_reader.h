// A chunk's keys and values in the form that kernels take: where they lie in the pool, or copied
// together.
#pragma once

#include <cstdint>

#include "engine/attention_cut.h"

namespace bitnet::engine {

// How the rows of a pool can be read: the same for every layer of a step.
struct PoolAccess {
  int block_bits = -1;  // the pool's block_size is 2^block_bits; below 0: no power of two
  bool pair_unit = false, matrix_unit = false;  // of every AttentionChunk
  bool evenly_strided = true;  // rows and scales have the strides that the kernels take
  bool gathers = false;        // the rows of some chunk have to be copied together

  static PoolAccess of(const CachePool& pool, const Sequences& sequences);
  // Memory of a thread for rows that are copied together.
  int64_t floats(const CachePool& pool) const;
};

// A group's query rows: float32, or for an int8 cache 16-bit integers with one factor a row.
struct AttentionQuery {
  float* rows;
  int16_t* wide;
  float* scale;
};

// Reads one layer's pool for one thread.
class AttentionReader {
 public:
  using Group = AttentionCut::Group;
  using Piece = AttentionCut::Piece;
  // What the thread will read next, to be prefetched; group null: nothing.
  struct Next {
    const Group* group = nullptr;
    Piece piece{};
  };

  // memory: of the thread, access.floats()
  AttentionReader(const AttentionCut& cut, const PoolAccess& access, const CachePool& pool,
                  float* memory)
      : cut_(cut), access_(access), pool_(pool), memory_(memory) {}

  // Enters into `chunk` the keys and values of a piece, and what is prefetched meanwhile.
  void fill(const Group& group, const Piece& piece, const Next& next, const AttentionQuery& query,
            AttentionChunk& chunk) const;

 private:
  struct ChunkRows {
    const void *keys, *values;
    int64_t stride_bytes;
    const float *key_scale, *value_scale;
  };
  // Where a position of a sequence lies in the pool.
  struct Place {
    int64_t block, position;
  };
  using Panels = const void* [kChunkPanels];

  Place place_of(const Group& group, int64_t position) const;
  // Whether the kernels can read a chunk's rows in place.
  bool lies_in_place(int64_t begin, int64_t positions) const;
  // The keys of such a chunk, else null.
  const void* keys_in_place(const Next& next) const;
  ChunkRows rows_of_piece(const Group& group, const Piece& piece) const;
  void find_panels(const Group& group, const Piece& piece, Panels& keys, Panels& values) const;
  // What the kernel takes of an int8 cache.
  Int8Attention int8_of(const AttentionQuery& query, const ChunkRows& rows, const Next& next) const;

  const AttentionCut& cut_;
  const PoolAccess& access_;
  const CachePool& pool_;
  float* memory_;
};

}  // namespace bitnet::engine
