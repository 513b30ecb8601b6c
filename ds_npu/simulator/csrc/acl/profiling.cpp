// Profiles of aclprof: the folders and files of what streams did, in virtual time, which the stand-in of msprof exports.
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>

#include "acl/acl_prof.h"
#include "api.h"
#include "device.h"
#include "host.h"
#include "profiling/aprof_pub.h"
#include "settings.h"
#include "trace.h"

struct aclprofConfig {
  int device;  // its number on the machine
};

namespace sim {
namespace {

constexpr std::int64_t kGiga = 1000000000;

std::int64_t now_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return time.tv_sec * kGiga + time.tv_nsec;
}

std::string& folder() {
  static std::string path;
  return path;
}

// A new folder PROF_<number>_<time>_<process> in the folder of aclprofInit: torch_npu looks for such a name.
std::filesystem::path new_folder() {
  static int number = 0;
  char name[80];
  std::snprintf(name, sizeof name, "PROF_%06d_%lld_%d", ++number, static_cast<long long>(now_of(CLOCK_REALTIME) / 1000),
                static_cast<int>(getpid()));
  return std::filesystem::path(folder()) / name;
}

// Both clocks of the machine, by which torch_npu puts its own events and those of the device on one axis, and the host's
// virtual time at the same moment.
void write_start(const std::filesystem::path& made) {
  std::ofstream file(made / "host" / "start_info");
  file << "{\"collectionTimeBegin\": \"" << now_of(CLOCK_REALTIME) / 1000 << "\", \"clockMonotonicRaw\": \""
       << now_of(CLOCK_MONOTONIC_RAW) << "\", \"virtualNanoseconds\": " << host().now() << "}\n";
  if (!file.flush()) throw Failure(ACL_ERROR_PROFILING_FAILURE, "cannot write " + (made / "host" / "start_info").string());
}

}  // namespace
}  // namespace sim

SIM_API(aclError, aclprofInit, (const char* path, std::size_t length)) { sim::folder() = std::string(path, length); }

SIM_API(aclError, aclprofFinalize, ()) {}

SIM_PLAIN aclprofConfig* aclprofCreateConfig(uint32_t* devices, uint32_t count, aclprofAicoreMetrics,
                                             const aclprofAicoreEvents*, uint64_t) {
  return new aclprofConfig{count > 0 ? static_cast<int>(devices[0]) : 0};
}

SIM_API(aclError, aclprofDestroyConfig, (const aclprofConfig* config)) { delete config; }

SIM_API(aclError, aclprofWarmup, (const aclprofConfig*)) {}

SIM_API(aclError, aclprofSetConfig, (aclprofConfigType, const char*, std::size_t)) {}

SIM_API(aclError, aclprofStart, (const aclprofConfig* config)) {
  const auto made = sim::new_folder(), data = made / ("device_" + std::to_string(config->device)) / "data";
  std::error_code error;
  std::filesystem::create_directories(made / "host" / "data", error);
  std::filesystem::create_directories(data, error);
  if (error) throw sim::Failure(ACL_ERROR_PROFILING_FAILURE, "cannot make " + data.string() + ": " + error.message());
  sim::write_start(made);
  sim::profile_to((data / "tasks.jsonl").string());
}

SIM_API(aclError, aclprofStop, (const aclprofConfig*)) { sim::profile_to(""); }

// The driver's counter of cycles: there is none, and torch_npu takes the clock instead.
SIM_PLAIN int halGetAPIVersion(int* version) { return *version = 0; }
SIM_PLAIN int halGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t*) { return 1; }

// What torch_npu reports of its own calls: nothing here reads it.
SIM_PLAIN int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }
SIM_PLAIN int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }
SIM_PLAIN int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
SIM_PLAIN int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
SIM_PLAIN uint64_t MsprofGetHashId(const char* text, std::size_t length) {
  return std::hash<std::string_view>{}({text, length});
}
SIM_PLAIN uint64_t MsprofSysCycleTime() { return static_cast<uint64_t>(sim::now_of(CLOCK_MONOTONIC_RAW)); }
