// Policies from text; see attention_policy.h.
#include "engine/attention_policy.h"

namespace bitnet::engine {
namespace {

// In (0, 1].
float share(Keys& keys, const char* name) {
  const float value = keys.number(name);
  if (!(value > 0 && value <= 1)) keys.fail(name, "above 0 and at most 1", std::to_string(value));
  return value;
}

}  // namespace

AttentionPolicy read_policy(Keys& keys) {
  AttentionPolicy policy;
  policy.window = keys.integer("window", 0, INT64_MAX, 0);
  policy.skip = keys.integer("skip", 0, INT64_MAX, 0);
  for (const auto& [name, value] :
       {std::pair("sinks", &policy.sinks), std::pair("stride", &policy.stride)}) {
    if (!keys.has(name)) continue;
    *value = keys.integer(name, 1, INT64_MAX);
  }
  if (keys.has("top_k")) policy.min_ratio = policy.max_ratio = share(keys, "top_k");
  if (keys.has("threshold")) policy.threshold = share(keys, "threshold");
  if (keys.has("max_ratio")) {
    if (keys.has("top_k")) keys.fail("max_ratio", "without top_k", "both");
    policy.max_ratio = share(keys, "max_ratio");
    policy.min_ratio = share(keys, "min_ratio");
    if (policy.min_ratio > policy.max_ratio)
      keys.fail("min_ratio", "at most max_ratio", std::to_string(policy.min_ratio));
  }
  if (policy.threshold > 0 && policy.max_ratio > 0)
    keys.fail("threshold", "without ratios", "both");
  if (policy.chooses()) {
    policy.dense_below = keys.integer("dense_below", 0, INT64_MAX, kDenseBelow);
    if (policy.window != 0) keys.fail("window", "without a choice of pages", "both");
  }
  if (policy.skip != 0 && (policy.window != 0 || policy.chooses()))
    keys.fail("skip", "without a window and a choice of pages", "both");
  if (policy.stride != 0 && policy.window == 0)
    keys.fail("stride", "beside a window", std::to_string(policy.stride));
  if (policy.sinks != 0 && policy.window == 0 && !policy.chooses())
    keys.fail("sinks", "beside a window or a choice of pages", std::to_string(policy.sinks));
  return policy;
}

}  // namespace bitnet::engine
