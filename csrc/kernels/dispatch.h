// Chooses the kernel table: a best-first list, feature-set
// containment, an override. The one dispatch state of the process
// lives behind these calls. Must not know torch or Python.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace bitnet {

// The table in use.  First call: BITNET_OPS_ISA if set and not empty, else the first table of the
// list whose feature set the CPU has.  Throws std::runtime_error when the named ISA is unknown or
// not available here; the message lists what is.
const KernelTable& active_kernels();

// Forces an available ISA ("" = automatic).  Throws like active_kernels().  Not to be called while
// ops run.
void force_isa(const std::string& name);

// Whether this CPU can execute the table, and the system has not rejected what it needs.
bool runs_here(const KernelTable& kernels);
// Asks the system for what the table needs, which is done for the table that is chosen, and has to
// be done for any other before one of its kernels is called.  False if rejected.
bool make_ready(const KernelTable& kernels);

// Best first.  all_tables: compiled into this build; available_tables: those that run here.
std::vector<const KernelTable*> all_tables();
std::vector<const KernelTable*> available_tables();

}  // namespace bitnet
