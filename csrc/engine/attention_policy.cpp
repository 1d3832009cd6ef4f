// Policies from text; see attention_policy.h.
#include "engine/attention_policy.h"

namespace bitnet::engine {

AttentionPolicy read_policy(Keys& keys) {
  AttentionPolicy policy;
  policy.window = keys.integer("window", 0, INT64_MAX, 0);
  for (const auto& [name, value] :
       {std::pair("sinks", &policy.sinks), std::pair("stride", &policy.stride)}) {
    if (!keys.has(name)) continue;
    *value = keys.integer(name, 1, INT64_MAX);
    if (policy.window == 0) keys.fail(name, "beside a window", std::to_string(*value));
  }
  return policy;
}

}  // namespace bitnet::engine
