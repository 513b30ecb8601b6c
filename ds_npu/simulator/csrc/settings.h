// What `ds_npu sim` asked for, read from the environment once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sim {

struct Settings {
  std::vector<int> devices;            // numbers on the machine: DS_NPU_SIM_DEVICES of them, or ASCEND_RT_VISIBLE_DEVICES
  std::string soc;                     // DS_NPU_SIM_SOC, as aclrtGetSocName gives it
  std::size_t memory_bytes;            // DS_NPU_SIM_MEMORY, of one device
  std::optional<std::uint64_t> chaos;  // DS_NPU_SIM_CHAOS, the seed
  std::string fault;                   // DS_NPU_SIM_FAULT
  std::string fired;                   // DS_NPU_SIM_FIRED, the file that lists the faults that fired; "": none
  std::string machine;                 // DS_NPU_SIM_MACHINE, as machine.h reads it
  int task_queue;                      // TASK_QUEUE_ENABLE, 0 with ASCEND_LAUNCH_BLOCKING=1
  std::string routing;                 // DS_NPU_SIM_ROUTING, as routing.cpp reads it
  bool dry;                            // DS_NPU_SIM_DRY
  std::vector<int> present;            // DS_NPU_SIM_PRESENT, ascending: the NPUs that have a process; empty: all
  bool races;                          // DS_NPU_SIM_RACES: the trace has touched bytes and Python stacks
  std::string trace;                   // DS_NPU_SIM_TRACE, a folder; "": none
};

const Settings& settings();

}  // namespace sim
