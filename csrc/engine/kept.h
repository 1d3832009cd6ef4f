// What blocks keep for sequences between steps, by name: recurrent states, inputs of convolutions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitnet::engine {

// A buffer of the blocks of one kind, float32: of each layer of a slot [rows + drafts][shape],
// without rows [shape], contiguous.
struct KeptBuffer {
  std::string name;
  std::vector<int64_t> shape;
  int64_t rows = -1;   // of a layer; every draft adds one; -1: the buffer has no rows
  int64_t layers = 0;  // blocks that have one

  int64_t layer_floats(int64_t drafts) const {
    int64_t floats = rows < 0 ? 1 : rows + drafts;
    for (const int64_t size : shape) floats *= size;
    return floats;
  }
  bool same_form(const KeptBuffer& other) const {
    return name == other.name && shape == other.shape && rows == other.rows;
  }
};

// The memory of a buffer; floats from one slot, and from one layer, to the next.
struct KeptMemory {
  float* data = nullptr;
  int64_t slot = 0, layer = 0;

  // Of `buffer` with room for so many drafts, slots and layers one behind the other.
  static KeptMemory of(const KeptBuffer& buffer, int64_t drafts, float* data) {
    const int64_t layer = buffer.layer_floats(drafts);
    return {data, buffer.layers * layer, layer};
  }
};

// What a step does to the memory of a sequence. A slot holds the state behind the tokens that are
// certain, and for each draft behind them what is needed to replay it. A step first replays the
// drafts that turned out right, `replays`, then takes its own tokens, the last `drafts` of which
// may turn out wrong. A sequence at position 0 begins without a state.
struct StateStep {
  int64_t slot, replays, drafts;
};

}  // namespace bitnet::engine
