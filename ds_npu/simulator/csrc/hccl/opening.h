// Threads that wait for a communicator which nobody opens.
//
// The first rank of a communicator puts its root info into torch's store; the others wait there for it (torch_npu,
// ProcessGroupHCCL::broadcastMasterID), without a call of HCCL, until the process group's timeout of half an hour. Where that
// wait cannot end, because other ranks wait for this one or have exited, the simulator ends the process sooner.
#pragma once

namespace sim::hccl {

// This thread may be about to wait for a root info: watch it from now on.
void watch_opening();

}  // namespace sim::hccl
