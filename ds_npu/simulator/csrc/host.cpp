#include "host.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "machine.h"
#include "settings.h"

namespace sim {
namespace {

constexpr std::string_view kTaskQueueThread = "acl_thread";   // Ascend/pytorch, NPUAffinityController.cpp
constexpr std::string_view kAutogradThread = "pt_autograd_";  // pytorch, engine.cpp; the device's number follows

// How the operators that torch_npu adds to torch begin: Python calls them through functions of its own.
constexpr std::array kFused{
    "aclnnFlashAttention", "aclnnRingAttention", "aclnnScaledMaskedSoftmax", "aclnnRmsNorm", "aclnnAddRmsNorm",
    "aclnnInplaceAddRmsNorm", "aclnnGemmaRmsNorm", "aclnnAddLayerNorm", "aclnnDeepNorm", "aclnnGroupNormSilu",
    "aclnnSwiGlu", "aclnnGeGlu", "aclnnFastGelu", "aclnnRotary", "aclnnApplyRotary", "aclnnInterleaveRope", "aclnnMoe",
    "aclnnGroupedMatmul", "aclnnAllGatherMatmul", "aclnnMatmulReduceScatter", "aclnnMatmulAllReduce", "aclnnAlltoAllv",
    "aclnnGroupedMatMulAlltoAllv", "aclnnApplyAdamW", "aclnnHans", "aclnnCrossEntropyLoss",
};

thread_local bool has_prepared = false;

std::string thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

bool is_main_thread() { return static_cast<pid_t>(syscall(SYS_gettid)) == getpid(); }

struct Cost {
  const char* name;
  double Machine::*seconds;
};

// In the order of Dispatch.
constexpr std::array kCosts{
    Cost{"operator", &Machine::dispatch},           Cost{"fused", &Machine::dispatch_fused},
    Cost{"autograd", &Machine::dispatch_autograd},  Cost{"collective", &Machine::dispatch_collective},
    Cost{"event", &Machine::dispatch_event},        Cost{"none", nullptr},
};

const Cost& cost_of(Dispatch kind) { return kCosts.at(static_cast<std::size_t>(kind)); }

}  // namespace

const char* name_of(Dispatch kind) { return cost_of(kind).name; }

Host& host() {
  static auto* one = new Host;
  return *one;
}

Nanoseconds Host::launch(Dispatch kind, Nanoseconds room) {
  if (kind == Dispatch::kNone) return 0;
  const Nanoseconds dispatch = nanoseconds(machine().*cost_of(kind).seconds), launching = nanoseconds(machine().launch);
  const std::scoped_lock lock(mutex_);
  ++dispatched_;
  now_ += dispatch;
  if (settings().task_queue == 0) return now_ = std::max(now_, room) + launching;
  if (queued_.size() == machine().queue_tasks) {
    now_ = std::max(now_, queued_.front());
    queued_.pop_front();
  }
  launched_ = std::max({launched_, now_, room}) + launching;
  queued_.push_back(launched_);
  return launched_;
}

void Host::wait(Nanoseconds time) {
  const std::scoped_lock lock(mutex_);
  now_ = std::max(now_, time);
}

void Host::spend(Nanoseconds time) {
  const std::scoped_lock lock(mutex_);
  now_ += time;
}

Nanoseconds Host::now() {
  const std::scoped_lock lock(mutex_);
  return now_;
}

std::uint64_t Host::dispatched() {
  const std::scoped_lock lock(mutex_);
  return dispatched_;
}

bool launches_for_others() {
  thread_local const bool is = thread_name() == kTaskQueueThread;
  return is;
}

bool is_fused(const char* name) {
  return std::ranges::any_of(kFused, [&](const char* fused) { return std::string_view(name).starts_with(fused); });
}

Dispatch dispatch_of(bool fused) {
  thread_local const bool is_main = is_main_thread();
  if (launches_for_others()) return fused ? Dispatch::kFused : Dispatch::kOperator;
  has_prepared = true;
  return fused ? Dispatch::kFused : is_main ? Dispatch::kOperator : Dispatch::kAutograd;
}

bool keeps_host_time() {
  // A thread of autograd allocates, and so asks for events, before it has prepared its first operator.
  thread_local const bool dispatches = is_main_thread() || thread_name().starts_with(kAutogradThread);
  return dispatches || has_prepared;
}

}  // namespace sim
