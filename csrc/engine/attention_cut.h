// How attention of a step is cut into tasks: groups of tokens, the pieces of the positions that
// they read, and what a thread takes at once. Knows lengths and policies, not memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/attention_policy.h"
#include "engine/kv_cache.h"
#include "engine/page_choice.h"
#include "kernels/kernel_table.h"

namespace bitnet::engine {

struct AttentionShape {
  int64_t heads, kv_heads, dim;
  DType query_type;  // of query and out
  float scale;
  CachePool pool;  // strides only; each call brings the data
  AttentionPolicy policy{};
};

// Roughly the multiply-adds of one half of attention (scores, or values).
int64_t attention_work(const AttentionShape& shape, const Sequences& sequences);

// A group is a block of tokens of one sequence, times the query heads of one KV head. A group that
// is more than a fair share of all work is split: each chunk of its positions is a task, and the
// thread that finishes the last chunk merges them, without a barrier. Any other group is one task.
// The result is the same, bit for bit, for every cut. What a group reads is a list of pieces, each
// some of the positions of one chunk. Where tokens choose their pages, a piece names the tokens of
// the group that read it, and their rows are computed together.
class AttentionCut {
 public:
  struct Group {
    int64_t sequence, kv_head;
    int64_t token, tokens;  // [token, token + tokens) of all tokens
    int64_t position;       // of its first token
    int64_t first_piece;    // in pieces_, which the heads of a block of tokens share
    int64_t pieces;         // an upper bound if the group chooses pages
    int64_t row_pieces;     // sum over its rows of the pieces that a row reads; likewise a bound
    int64_t choice = -1;    // where its choice lies if it chooses pages
    int64_t counter = -1;   // of a split group: its counter, and where its states begin
    int64_t states = 0;
  };
  // What a group reads of a chunk. Each token sees positions up to its own: those in its window,
  // all of them, or those below `sinks`. A chunk may be two pieces; the sinks are then the first.
  struct Piece {
    enum Kind : int32_t { kWindow, kAll, kSinks };
    int32_t chunk;
    Kind kind;
    uint64_t tokens = 0;  // of a chosen page: a bit for each token of the group that reads it
    int64_t begin() const { return chunk * kAttentionChunk; }
  };
  struct Task {
    int32_t group, piece;  // piece -1: all pieces
  };

  // The arrays of `sequences` must be valid for as long as the cut is used. Reuses the memory of an
  // earlier cut.
  void build(const AttentionShape& shape, const Sequences& sequences, int64_t threads);

  const AttentionShape& shape() const { return shape_; }
  const Sequences& sequences() const { return sequences_; }
  const std::vector<Group>& groups() const { return groups_; }
  int64_t tasks() const { return static_cast<int64_t>(tasks_.size()); }
  // Tasks [0, split_tasks()) are chunks; the others are groups, the most expensive first.
  int64_t split_tasks() const { return split_tasks_; }
  const Task& task(int64_t i) const { return tasks_[static_cast<size_t>(i)]; }
  const Group& group_of(const Task& task) const { return groups_[static_cast<size_t>(task.group)]; }
  // Groups that choose what they read.
  int64_t choices() const { return static_cast<int64_t>(choosing_.size()); }
  const Group& choosing(size_t i) const { return groups_[static_cast<size_t>(choosing_[i])]; }
  int64_t max_pages() const { return max_pages_; }        // that a group chooses from
  int64_t max_choosing() const { return max_choosing_; }  // tokens of such a group

  // The sizes of a group's states and queries.
  int64_t rows_per_token() const { return rows_per_token_; }
  int64_t max_rows() const { return max_rows_; }
  int64_t rows_of(const Group& group) const { return group.tokens * rows_per_token_; }
  int64_t state_floats() const { return attention_state_floats(shape_.dim); }
  static bool reads_by_token(const Group& group) { return group.choice >= 0 && group.tokens > 1; }
  bool some_read_by_token() const { return some_read_by_token_; }

  // Memory that all threads share: a counter for each split group, the states of these, choices.
  int64_t shared_floats() const {
    return whole_lines(choices_at() + chosen_pieces_ * kPieceFloats);
  }
  float* states_of(const Group& group, float* shared) const {
    return shared + counter_floats() + group.states;
  }
  // The pieces of a group that chooses, behind one whose `chunk` is their number.
  Piece* choice_of(const Group& group, float* shared) const {
    return reinterpret_cast<Piece*>(shared + choices_at()) + group.choice;
  }
  int64_t pieces_of(const Group& group, float* shared) const {
    return group.choice < 0 ? group.pieces : choice_of(group, shared)[0].chunk;
  }
  Piece piece_of(const Group& group, int64_t i, float* shared) const {
    if (group.choice >= 0) return choice_of(group, shared)[1 + i];
    return pieces_[static_cast<size_t>(group.first_piece + i)];
  }

  static int64_t chunks_of(int64_t positions) {
    return (positions + kAttentionChunk - 1) / kAttentionChunk;
  }
  // How many positions of the chunk the group sees.
  int64_t positions_of(const Group& group, const Piece& piece) const {
    const int64_t end =
        piece.kind == Piece::kSinks ? shape_.policy.sinks : group.position + group.tokens;
    return std::min(kAttentionChunk, end - piece.begin());
  }
  // How many positions of the chunk lie before the windows of all rows, so that no row sees them.
  int64_t hidden_in(const Group& group, const Piece& piece) const {
    if (piece.kind != Piece::kWindow) return 0;
    return std::max<int64_t>(0, first_seen(group.position) - piece.begin());
  }
  // How many rows have a token before the chunk: they see nothing of it.
  int64_t rows_before(const Group& group, const Piece& piece) const {
    return std::max<int64_t>(0, piece.begin() - group.position) * rows_per_token_;
  }
  // How many rows, from the first one on, have a window that begins in or before the chunk.
  int64_t rows_up_to(const Group& group, const Piece& piece) const {
    const int64_t window = shape_.policy.window_at(group.position);
    if (piece.kind != Piece::kWindow || window >= group.position + group.tokens)
      return rows_of(group);
    const int64_t last = piece.begin() + kAttentionChunk + window - 2;  // token that sees the chunk
    return std::min(group.tokens, last - group.position + 1) * rows_per_token_;
  }

 private:
  static constexpr int64_t kPieceFloats = sizeof(Piece) / sizeof(float);
  static constexpr int64_t kChoosingTokens = 64;  // most tokens of a group: bits of Piece::tokens

  static int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }
  int64_t counter_floats() const { return whole_lines(split_groups_); }
  int64_t choices_at() const { return counter_floats() + whole_lines(states_floats_); }
  void choose_block_tokens(int64_t threads);
  void make_groups();
  void add_choice(Group& group);
  void add_pieces(int64_t position, int64_t tokens);
  void make_tasks(int64_t threads);
  int64_t cost_of(const Group& group) const;
  // The first position of a token's window.
  int64_t first_seen(int64_t position) const {
    const int64_t window = shape_.policy.window_at(position);
    return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
  }
  // Whether there is no gap between sinks and window: the token reads whole chunks, as it would
  // without a policy.
  bool sees_all(int64_t position) const { return first_seen(position) <= shape_.policy.sinks; }

  AttentionShape shape_{};
  Sequences sequences_;
  std::vector<Group> groups_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> choosing_;  // groups
  std::vector<Task> tasks_;
  int64_t rows_per_token_ = 1, block_tokens_ = 1, max_rows_ = 0;
  int64_t max_pages_ = 0, max_choosing_ = 0;
  bool some_read_by_token_ = false;
  int64_t split_groups_ = 0, split_tasks_ = 0, states_floats_ = 0;
  int64_t chosen_pieces_ = 0;  // room for all choices, their counts included
};

}  // namespace bitnet::engine
