// `ds_npu sim --fault NAME[:CALL][@RANK]=CODE|exit`, several separated by commas: call number CALL (1 if left out) of the
// function NAME fails with CODE, or the process is killed there; on every rank, or only where the variable RANK says so.
#include "fault.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sstream>
#include <vector>

#include "failure.h"
#include "settings.h"

namespace sim {
namespace {

struct Fault {
  std::string spec;
  std::string name;
  long call = 1;
  int code = 0;  // 0: the process dies
  std::atomic<long> calls{0};
};

bool concerns_this_rank(const std::string& rank) {
  const char* mine = std::getenv("RANK");
  return rank.empty() || (mine != nullptr && rank == mine);
}

// `ds_npu sim` has checked the form; this only splits it.
std::vector<std::unique_ptr<Fault>> planted() {
  std::vector<std::unique_ptr<Fault>> result;
  std::istringstream list(settings().fault);
  for (std::string spec; std::getline(list, spec, ',');) {
    auto fault = std::make_unique<Fault>();
    fault->spec = spec;
    const std::string what = spec.substr(spec.find('=') + 1);
    std::string where = spec.substr(0, spec.find('='));
    std::string rank;
    if (const auto at = where.find('@'); at != std::string::npos) {
      rank = where.substr(at + 1);
      where.resize(at);
    }
    if (const auto colon = where.find(':'); colon != std::string::npos) {
      fault->call = std::strtol(where.c_str() + colon + 1, nullptr, 10);
      where.resize(colon);
    }
    fault->name = where;
    fault->code = what == "exit" ? 0 : std::atoi(what.c_str());
    if (concerns_this_rank(rank)) result.push_back(std::move(fault));
  }
  return result;
}

// Written before the fault can kill the process, so that `ds_npu sim` can name the faults that never fired.
void tell_fired(const std::string& spec) {
  if (settings().fired.empty()) return;
  const int file = open(settings().fired.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file < 0) return;
  const std::string line = spec + "\n";
  if (write(file, line.data(), line.size()) < 0) {
    // The command that reads it has ended.
  }
  close(file);
}

// A function that fails from a call on, as memory that is used up does, until it is told otherwise; for tests that fail
// in one process again and again.
struct Shortage {
  std::mutex mutex;
  std::string name;
  long first = 0;  // 0: no call fails, they are counted
  long calls = 0;
  int code = 0;
};

Shortage& shortage() {
  static auto* the = new Shortage;  // never destroyed: torch frees memory while the process ends
  return *the;
}

std::atomic<bool> has_shortage{false};

void throw_shortage(const char* name) {
  Shortage& now = shortage();
  const std::scoped_lock lock(now.mutex);
  if (now.name != name || ++now.calls < now.first || now.first == 0) return;
  throw Failure(now.code, "planted by ds_npu_sim_fail_from, call " + std::to_string(now.calls));
}

}  // namespace

// Calls of `name` fail with `code` from now on, after the next `first` - 1 of them; `first` 0: none fails. Returns the
// number of calls of the function that was named before, since then. An empty name ends it.
extern "C" __attribute__((visibility("default"))) long ds_npu_sim_fail_from(const char* name, long first, int code) {
  Shortage& now = shortage();
  const std::scoped_lock lock(now.mutex);
  const long calls = now.calls;
  now.name = name;
  now.first = first;
  now.calls = 0;
  now.code = code;
  has_shortage = !now.name.empty();
  return calls;
}

void throw_planted_fault(const char* name) {
  if (has_shortage.load(std::memory_order_relaxed)) throw_shortage(name);
  static const auto faults = planted();
  for (const auto& fault : faults) {
    if (fault->name != name || ++fault->calls != fault->call) continue;
    tell_fired(fault->spec);
    if (fault->code == 0) kill(getpid(), SIGKILL);
    throw Failure(fault->code, "planted by ds_npu sim --fault, call " + std::to_string(fault->call));
  }
}

}  // namespace sim
