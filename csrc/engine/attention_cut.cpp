// Cutting attention into tasks; see attention_cut.h. The constants that decide the cut are at the
// top.
#include "engine/attention_cut.h"

#include <algorithm>

namespace bitnet::engine {
namespace {

constexpr int64_t kBlockRows = 96;       // query rows that meet a chunk while it is in cache
constexpr int64_t kMinRows = 24;         // smaller blocks waste the loads of keys and values
constexpr int64_t kGroupsPerThread = 8;  // enough for an even split without cutting positions
constexpr int64_t kMaxSplitFloats = int64_t{1} << 22;  // states of split groups: 16 MiB
constexpr int64_t kReadingRows = 4;  // to read a chunk takes as long as 4 rows' arithmetic

}  // namespace

int64_t attention_work(const AttentionShape& shape, const Sequences& sequences) {
  int64_t positions = 0;
  for (int64_t s = 0; s < sequences.count; ++s) {
    const AttentionPolicy& p = shape.policy;
    int64_t seen = sequences.lengths[s];
    if (p.window != 0)  // not p.window + p.sinks, which could overflow
      seen = std::min(seen, std::min(p.window, seen) + std::min(p.sinks, seen) +
                                (p.stride == 0 ? 0 : seen / p.stride));
    positions += seen * sequences.tokens(s);
  }
  return positions * shape.heads * shape.dim;
}

void AttentionCut::build(const AttentionShape& shape, const Sequences& sequences, int64_t threads) {
  shape_ = shape;
  sequences_ = sequences;
  rows_per_token_ = shape.heads / shape.kv_heads;
  choose_block_tokens(threads);
  make_groups();
  make_tasks(threads);
}

void AttentionCut::choose_block_tokens(int64_t threads) {
  int64_t longest = 1;
  for (int64_t s = 0; s < sequences_.count; ++s) longest = std::max(longest, sequences_.tokens(s));
  if (shape_.policy.skip != 0) longest = 1;  // the window of a group is that of its only token
  block_tokens_ = std::clamp<int64_t>(kBlockRows / rows_per_token_, 1, longest);
  const auto groups = [&] {
    int64_t blocks = 0;
    for (int64_t s = 0; s < sequences_.count; ++s) {
      blocks += (sequences_.tokens(s) + block_tokens_ - 1) / block_tokens_;
    }
    return blocks * shape_.kv_heads;
  };
  while (block_tokens_ > 1 && block_tokens_ * rows_per_token_ / 2 >= kMinRows &&
         groups() < kGroupsPerThread * threads) {
    block_tokens_ = (block_tokens_ + 1) / 2;
  }
}

void AttentionCut::make_groups() {
  groups_.clear();
  pieces_.clear();
  choosing_.clear();
  chosen_pieces_ = max_pages_ = max_choosing_ = 0;
  some_read_by_token_ = false;
  max_rows_ = 0;
  for (int64_t s = 0; s < sequences_.count; ++s) {
    const int64_t tokens = sequences_.tokens(s), start = sequences_.start(s);
    for (int64_t t = 0, count = 0; t < tokens; t += count) {
      const int64_t position = start + t;
      count = std::min(block_tokens_, tokens - t);
      // tokens with a gap behind the sinks read other pieces than tokens without one
      for (int64_t i = 1; shape_.policy.sinks > 0 && i < count; ++i) {
        if (sees_all(position + i) != sees_all(position)) count = i;
      }
      const bool choice = chooses_pages(shape_.policy, position);
      if (choice) count = std::min(count, kChoosingTokens);
      for (int64_t i = 1; shape_.policy.chooses() && i < count; ++i) {
        if (chooses_pages(shape_.policy, position + i) != choice) count = i;
      }
      const auto first_piece = static_cast<int64_t>(pieces_.size());
      if (!choice) add_pieces(position, count);
      const int64_t pieces = static_cast<int64_t>(pieces_.size()) - first_piece;
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        groups_.push_back({s, h, sequences_.query_start[s] + t, count, position, first_piece,
                           pieces, count * rows_per_token_ * pieces});
        if (choice) add_choice(groups_.back());
      }
      max_rows_ = std::max(max_rows_, count * rows_per_token_);
    }
  }
}

void AttentionCut::add_choice(Group& group) {
  const int64_t pages = (group.position + group.tokens - 1) / kAttentionChunk + 1;
  const int64_t max_pages = group.tokens * max_pages_read(shape_.policy, pages);
  group.pieces = std::min(pages, max_pages);
  group.row_pieces = max_pages * rows_per_token_;
  group.choice = chosen_pieces_;
  chosen_pieces_ += 1 + group.pieces;
  max_pages_ = std::max(max_pages_, pages);
  max_choosing_ = std::max(max_choosing_, group.tokens);
  some_read_by_token_ = some_read_by_token_ || reads_by_token(group);
  choosing_.push_back(static_cast<int32_t>(groups_.size() - 1));
}

// The pieces that `tokens` tokens from `position` on read. With sinks, sees_all() is the same for
// all of them.
void AttentionCut::add_pieces(int64_t position, int64_t tokens) {
  const AttentionPolicy& policy = shape_.policy;
  const bool all = sees_all(position + tokens - 1);
  const int64_t end = chunks_of(position + tokens);
  const int64_t window = all ? 0 : first_seen(position) / kAttentionChunk;
  const auto add = [this](int64_t chunk, Piece::Kind kind) {
    pieces_.push_back({static_cast<int32_t>(chunk), kind});
  };
  const auto whole = [&](int64_t chunk) {
    return all || (policy.stride != 0 && chunk % policy.stride == 0);
  };
  const bool skips = policy.sinks == 0 && policy.stride == 0;
  for (int64_t c = skips ? window : 0; c < end; ++c) {
    if (whole(c)) {
      add(c, Piece::kAll);
      continue;
    }
    if (c * kAttentionChunk < policy.sinks) add(c, Piece::kSinks);
    if (c >= window) add(c, Piece::kWindow);
  }
}

int64_t AttentionCut::cost_of(const Group& group) const {
  return group.row_pieces + group.pieces * kReadingRows;
}

void AttentionCut::make_tasks(int64_t threads) {
  tasks_.clear();
  split_groups_ = states_floats_ = 0;
  int64_t cost = 0;
  for (const Group& group : groups_) cost += cost_of(group);
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const int64_t floats = group.pieces * rows_of(group) * state_floats();
    if (group.pieces == 1 || cost_of(group) * kGroupsPerThread * threads <= cost ||
        states_floats_ + floats > kMaxSplitFloats) {
      continue;
    }
    group.counter = split_groups_++;
    group.states = states_floats_;
    states_floats_ += floats;
    for (int64_t i = 0; i < group.pieces; ++i) {
      tasks_.push_back({static_cast<int32_t>(g), static_cast<int32_t>(i)});
    }
  }
  split_tasks_ = tasks();
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].counter < 0) tasks_.push_back({static_cast<int32_t>(g), -1});
  }
  // not stable_sort, which allocates
  std::sort(tasks_.begin() + split_tasks_, tasks_.end(), [this](const Task& a, const Task& b) {
    const int64_t left = cost_of(groups_[static_cast<size_t>(a.group)]);
    const int64_t right = cost_of(groups_[static_cast<size_t>(b.group)]);
    return left != right ? left > right : a.group < b.group;
  });
}

}  // namespace bitnet::engine
