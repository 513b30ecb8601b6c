// Threads that wait for a communicator which nobody opens.
//
// A rank other than the first opens a communicator with what the first one has put into torch's store, and waits for it
// there (torch_npu, ProcessGroupHCCL::broadcastMasterID), without a call of HCCL, until the process group's timeout: half
// an hour. Here it is told sooner, where this wait cannot end: while others wait for this rank, or when they have exited.
#pragma once

namespace sim::hccl {

// This thread may be about to wait so. From here on it is looked after.
void watch_opening();

}  // namespace sim::hccl
