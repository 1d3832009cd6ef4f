// One parallel region on torch's threads that runs a program of stages (runtime/team.h): the one
// place where a team and torch meet.
// Must not know what the program does.
#pragma once

#include "ops/door.h"
#include "runtime/team.h"

namespace bitnet::ops {

// The team is the calling thread's own: two programs on it at once would mix.
template <class Program>
void run_program(Team& team, const Program& program, int64_t shares) {
  struct Context {
    Team& team;
    const Program& program;
  } context{team, program};
  team.start(shares, program);
  if (shares == 1) return team.work(0, 1, program);
  run_shares_raw(
      shares,
      [](int64_t begin, int64_t end, void* raw) {
        auto* c = static_cast<Context*>(raw);
        c->team.work(begin, end, c->program);
      },
      &context);
}

}  // namespace bitnet::ops
