// Ranks of a communicator that have no process: in `ds_npu predict` one rank of each pipeline stage acts for the others.
#pragma once

#include <cstdint>
#include <vector>

#include "hccl/segment.h"

namespace sim::hccl {

struct Absence {
  std::vector<int> npus;              // of all ranks; empty: each rank has a process
  std::vector<std::uint32_t> actors;  // for each rank the one that acts for it

  std::uint32_t acting(std::uint32_t rank) const { return actors.empty() ? rank : actors[rank]; }
};

// An NPU without a process (DS_NPU_SIM_PRESENT) is acted for by the last one before it that has one. Throws Failure where
// the communicator does not have that one, or its NPUs are not known (ds_npu_sim_communicator).
Absence absence_of(const Address& address, std::uint32_t ranks);

}  // namespace sim::hccl
