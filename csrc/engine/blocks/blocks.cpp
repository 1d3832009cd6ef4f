// The table of blocks.h.
#include "engine/blocks/blocks.h"

namespace bitnet::engine {
namespace {

struct Kind {
  const char* name;
  std::unique_ptr<Block> (*make)(Binding& binding);
};
constexpr Kind kKinds[] = {
    {"attention", make_attention},   {"delta_net", make_delta_net},     {"mlp", make_mlp},
    {"draft_keys", make_draft_keys}, {"draft_input", make_draft_input}, {"head", make_head},
};

}  // namespace

std::unique_ptr<Block> make_block(Binding& binding) {
  std::string known = "model, rope, lora";
  for (const Kind& kind : kKinds) {
    if (binding.keys.kind() == kind.name) return kind.make(binding);
    known += std::string(", ") + kind.name;
  }
  throw ProgramError("expected a line of the program to be one of " + known + ", got " +
                     binding.keys.kind());
}

}  // namespace bitnet::engine
