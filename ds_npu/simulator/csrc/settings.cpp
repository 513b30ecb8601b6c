#include "settings.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace sim {
namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

// As the driver reads ASCEND_RT_VISIBLE_DEVICES: it ignores the first entry that is no device, and all after it.
std::vector<int> visible(int devices) {
  std::vector<int> numbers;
  const std::string list = variable("ASCEND_RT_VISIBLE_DEVICES", "");
  if (list.empty()) {
    for (int device = 0; device < devices; ++device) numbers.push_back(device);
    return numbers;
  }
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    char* end = nullptr;
    const long device = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || device < 0 || device >= devices) break;
    numbers.push_back(static_cast<int>(device));
  }
  return numbers;
}

std::vector<int> numbers_in(const std::string& list) {
  std::vector<int> numbers;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) numbers.push_back(std::atoi(entry.c_str()));
  return numbers;
}

Settings from_environment() {
  Settings result;
  result.devices = visible(std::atoi(variable("DS_NPU_SIM_DEVICES", "8").c_str()));
  result.soc = variable("DS_NPU_SIM_SOC", "Ascend910B2");
  result.memory_bytes = std::strtoull(variable("DS_NPU_SIM_MEMORY", "68719476736").c_str(), nullptr, 10);
  const std::string chaos = variable("DS_NPU_SIM_CHAOS", "");
  if (!chaos.empty()) result.chaos = std::strtoull(chaos.c_str(), nullptr, 10);
  result.fault = variable("DS_NPU_SIM_FAULT", "");
  result.fired = variable("DS_NPU_SIM_FIRED", "");
  result.machine = variable("DS_NPU_SIM_MACHINE", "");
  result.task_queue = variable("ASCEND_LAUNCH_BLOCKING", "0") == "1"
                          ? 0
                          : std::atoi(variable("TASK_QUEUE_ENABLE", "1").c_str());
  result.routing = variable("DS_NPU_SIM_ROUTING", "");
  result.dry = !variable("DS_NPU_SIM_DRY", "").empty();
  result.present = numbers_in(variable("DS_NPU_SIM_PRESENT", ""));
  result.races = !variable("DS_NPU_SIM_RACES", "").empty();
  result.trace = variable("DS_NPU_SIM_TRACE", "");
  return result;
}

}  // namespace

const Settings& settings() {
  static const Settings once = from_environment();
  return once;
}

}  // namespace sim
