#include "hccl/opening.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include "hccl/communicator.h"

namespace sim::hccl {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 500ms;
constexpr auto kPatience = 60s;  // or HCCL_CONNECT_TIMEOUT, if that is less
constexpr std::string_view kWaiting = "broadcastMasterID";

// The frames of a thread, written by the thread itself when it gets kSignal. One thread is asked at a time.
std::array<void*, 64> frames;
std::atomic<int> depth{-1};

int signal_number() { return SIGRTMAX - 5; }

void write_frames(int) {
  const int kept = errno;
  depth.store(backtrace(frames.data(), static_cast<int>(frames.size())));
  errno = kept;
}

// Whether `thread` is in torch_npu's wait for a root info now.
bool waits_for_root_info(pid_t thread) {
  struct sigaction action {};
  if (sigaction(signal_number(), nullptr, &action) != 0) return false;
  if (action.sa_handler != write_frames && action.sa_handler != SIG_DFL) return false;
  void* first = nullptr;
  backtrace(&first, 1);  // loads what backtrace needs now, not inside of the signal handler
  action = {};
  action.sa_handler = write_frames;
  action.sa_flags = SA_RESTART;
  sigaction(signal_number(), &action, nullptr);
  depth.store(-1);
  if (syscall(SYS_tgkill, getpid(), thread, signal_number()) != 0) return false;
  for (int wait = 0; wait < 100 && depth.load() < 0; ++wait) std::this_thread::sleep_for(10ms);
  const auto end = frames.begin() + std::max(depth.load(), 0);
  return std::any_of(frames.begin(), end, [](void* frame) {
    Dl_info found{};
    return dladdr(frame, &found) != 0 && found.dli_sname != nullptr &&
           std::string_view(found.dli_sname).find(kWaiting) != std::string_view::npos;
  });
}

[[noreturn]] void end_process(const std::string& waited_for, Clock::duration waited) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(waited).count();
  const std::string why = "it has waited " + std::to_string(seconds) +
                          " s for a communicator that no other rank opens, while " + waited_for +
                          ". torch_npu has a communicator for each group and each NPU it is used from: either this process "
                          "uses a group from an NPU that is not its own, or the ranks use their groups in different orders. "
                          "What to do: call torch.npu.set_device(int(os.environ[\"LOCAL_RANK\"])) before anything uses an "
                          "NPU, and use groups in the same order on every rank";
  for (const auto& communicator : communicators()) communicator->give_up(why);
  std::fprintf(stderr, "ds_npu sim: process %d cannot go on: %s\n", static_cast<int>(getpid()), why.c_str());
  std::fflush(stderr);
  _exit(1);
}

class Watch {
 public:
  Watch() : process_(getpid()), patience_(std::min<Clock::duration>(kPatience, connect_timeout())) {
    std::thread([this] { run(); }).detach();
  }

  pid_t process() const { return process_; }

  void note(pid_t thread) {
    const std::scoped_lock lock(mutex_);
    last_[thread] = Clock::now();
  }

 private:
  [[noreturn]] void run() {
    std::string seen;
    auto since = Clock::now();
    while (true) {
      std::this_thread::sleep_for(kLook);
      const std::string now = waited_for();
      if (now != seen || now.empty()) {
        seen = now;
        since = Clock::now();
      }
      if (Clock::now() - since < patience_) continue;
      for (const auto& [thread, noted] : older_than(Clock::now() - patience_))
        if (waits_for_root_info(thread)) end_process(seen, Clock::now() - noted);
      since = Clock::now();  // its threads do something else: ask again later
    }
  }

  static std::string waited_for() {
    for (const auto& communicator : communicators())
      if (std::string text = communicator->waited_for(); !text.empty()) return text;
    return "";
  }

  std::map<pid_t, Clock::time_point> older_than(Clock::time_point time) {
    const std::scoped_lock lock(mutex_);
    std::map<pid_t, Clock::time_point> found;
    for (const auto& [thread, noted] : last_)
      if (noted < time) found[thread] = noted;
    return found;
  }

  const pid_t process_;
  const Clock::duration patience_;
  std::mutex mutex_;
  std::map<pid_t, Clock::time_point> last_;  // thread -> when it last said that it may open a communicator
};

}  // namespace

void watch_opening() {
  // Never destroyed: its thread runs until the process ends. A forked child has no such thread, and no communicators.
  static auto* watch = new Watch;
  static thread_local const pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));
  if (watch->process() == getpid()) watch->note(thread);
}

}  // namespace sim::hccl
