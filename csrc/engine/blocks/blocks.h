// The kinds of blocks of a program: one file each, one row of `kKinds` in blocks.cpp.
#pragma once

#include "engine/program/program.h"

namespace bitnet::engine {

// The block of the line whose keys `binding` has. Throws ProgramError for another kind.
std::unique_ptr<Block> make_block(Binding& binding);

std::unique_ptr<Block> make_attention(Binding& binding);
std::unique_ptr<Block> make_delta_net(Binding& binding);
std::unique_ptr<Block> make_mlp(Binding& binding);
std::unique_ptr<Block> make_draft_keys(Binding& binding);
std::unique_ptr<Block> make_draft_input(Binding& binding);
std::unique_ptr<Block> make_head(Binding& binding);

}  // namespace bitnet::engine
