#include "hccl/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "failure.h"
#include "hccl/hccl_types.h"

namespace sim::hccl {
namespace {

// Field 22 of /proc/PID/stat (proc(5)); the second field is a name in brackets that may hold anything. 0: no such process.
std::uint64_t start_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(text.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

}  // namespace

ProcessId ProcessId::own() { return {getpid(), start_of(getpid())}; }

int open_file_of(pid_t pid, int file) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0)
    throw Failure(HCCL_E_REMOTE, "the memory of process " + std::to_string(pid) + " cannot be opened (" + path +
                                     "): " + std::strerror(errno));
  return opened;
}

Process::Process(ProcessId id) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, id.pid, 0))) {
  if (descriptor_ < 0 && errno != ESRCH)
    throw Failure(HCCL_E_SYSCALL, "pidfd_open of process " + std::to_string(id.pid) + ": " + std::strerror(errno));
  if (descriptor_ >= 0 && start_of(id.pid) != id.started) {
    close(descriptor_);
    descriptor_ = -1;
  }
}

Process::~Process() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool Process::exited() const {
  pollfd entry{descriptor_, POLLIN, 0};
  return descriptor_ < 0 || poll(&entry, 1, 0) > 0;
}

}  // namespace sim::hccl
