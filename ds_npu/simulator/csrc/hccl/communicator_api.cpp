// The functions of HCCL that create, destroy and describe communicators.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "api.h"
#include "hccl/communicator.h"
#include "hccl/hccl.h"
#include "hccl/opening.h"

using namespace sim::hccl;
using sim::Failure;

namespace {

Address address_in(const HcclRootInfo& info) {
  Address address;
  static_assert(sizeof address <= sizeof info.internal);
  std::memcpy(&address, info.internal, sizeof address);
  return address;
}

// Root infos of this process that no communicator has been made with: their files stay open until one has.
class Offers {
 public:
  void add(const Address& address) {
    const std::scoped_lock lock(mutex_);
    open_[{address.nonce[0], address.nonce[1]}] = address;
  }
  void end(const Address& address) {
    const std::scoped_lock lock(mutex_);
    const auto found = open_.find({address.nonce[0], address.nonce[1]});
    if (found == open_.end()) return;
    Segment::release(found->second);
    open_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<std::array<std::uint64_t, 2>, Address> open_;
};

Offers& offers() {
  static auto* all = new Offers;
  return *all;
}

// A line for each communicator that this process has opened by a root info, for tests: its ranks and options.
class Openings {
 public:
  void add(std::uint32_t ranks, const Options& options) {
    const std::scoped_lock lock(mutex_);
    for (const std::uint64_t number : {std::uint64_t{ranks}, options.buffer_bytes >> 20, std::uint64_t{options.expansion_mode},
                                       std::uint64_t{options.traffic_class}, std::uint64_t{options.service_level}})
      text_ += std::to_string(number) + ' ';
    text_ += options.name + '\n';
  }
  void copy(char* text, std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    text[text_.copy(text, bytes - 1)] = '\0';
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

Openings& openings() {
  static auto* all = new Openings;
  return *all;
}

void make_root_info(HcclRootInfo* info) {
  *info = {};
  const Address address = Segment::create();
  std::memcpy(info->internal, &address, sizeof address);
  offers().add(address);
}

std::shared_ptr<Communicator> join(const HcclRootInfo& info, std::uint32_t ranks, std::uint32_t rank,
                                   const HcclCommConfig* config) {
  const Address address = address_in(info);
  const struct End {
    const Address& address;
    ~End() { offers().end(address); }
  } end{address};
  const Options options = Options::from(config);
  openings().add(ranks, options);
  return Communicator::join(address, ranks, rank, options, absence_of(address, ranks));
}

// Each device joins in a thread of its own, since joining waits for the others.
std::vector<std::shared_ptr<Communicator>> join_all(const std::vector<int>& devices) {
  HcclRootInfo info;
  make_root_info(&info);
  std::vector<std::shared_ptr<Communicator>> made(devices.size());
  std::vector<std::exception_ptr> failures(devices.size());
  std::vector<std::thread> joining;
  const auto join_one = [&](std::size_t i) {
    try {
      sim::set_current_device(devices[i]);
      made[i] = Communicator::join(address_in(info), static_cast<std::uint32_t>(devices.size()), static_cast<std::uint32_t>(i),
                                   Options::from(nullptr));
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  for (std::size_t i = 0; i < devices.size(); ++i) joining.emplace_back(join_one, i);
  for (auto& thread : joining) thread.join();
  offers().end(address_in(info));
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
  return made;
}

// The only setting is whether results are the same each time; here they always are.
std::atomic<int> deterministic{0};

void check_setting(HcclConfig setting) {
  if (setting != HCCL_DETERMINISTIC)
    throw Failure(HCCL_E_NOT_SUPPORT, "HCCL's setting " + std::to_string(setting) + " is not simulated");
}

}  // namespace

SIM_PLAIN void ds_npu_sim_openings(char* text, std::size_t bytes) { openings().copy(text, bytes); }

SIM_API(HcclResult, HcclGetRootInfo, (HcclRootInfo * info)) { make_root_info(info); }

SIM_API(HcclResult, HcclCommInitRootInfoConfig,
        (uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config, HcclComm* comm)) {
  *comm = handle_of(join(*info, ranks, rank, config));
}

SIM_API(HcclResult, HcclCommInitRootInfo, (uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm)) {
  *comm = handle_of(join(*info, ranks, rank, nullptr));
}

SIM_API(HcclResult, HcclCommInitAll, (uint32_t count, int32_t* devices, HcclComm* comms)) {
  std::ranges::transform(join_all({devices, devices + count}), comms, handle_of);
}

SIM_API(HcclResult, HcclCreateSubCommConfig,
        (HcclComm * parent, uint32_t ranks, uint32_t* members, uint64_t id, uint32_t rank, HcclCommConfig* config,
         HcclComm* comm)) {
  const auto from = communicator_of(*parent);
  *comm = nullptr;
  if (members == nullptr) return;  // this rank is not among them
  *comm = handle_of(from->split({members, members + ranks}, rank, id, Options::from(config)));
}

SIM_API(HcclResult, HcclCommDestroy, (HcclComm comm)) { forget(comm); }

SIM_API(HcclResult, HcclGetCommName, (HcclComm comm, char* name)) {
  const auto communicator = communicator_of(comm);
  name[communicator->name().copy(name, COMM_NAME_MAX_LENGTH - 1)] = '\0';
}

SIM_API(HcclResult, HcclGetRankSize, (HcclComm comm, uint32_t* ranks)) { *ranks = communicator_of(comm)->size(); }
SIM_API(HcclResult, HcclGetRankId, (HcclComm comm, uint32_t* rank)) { *rank = communicator_of(comm)->rank(); }

SIM_API(HcclResult, HcclGetCommAsyncError, (HcclComm comm, HcclResult* error)) {
  *error = communicator_of(comm)->async_error();
}

SIM_API(HcclResult, HcclCommResume, (HcclComm comm)) {
  if (communicator_of(comm)->async_error() != HCCL_SUCCESS)
    throw Failure(HCCL_E_NOT_SUPPORT, "a communicator that has failed stays so on simulated NPUs; start the processes again");
}

SIM_API(HcclResult, HcclSetConfig, (HcclConfig setting, HcclConfigValue value)) {
  check_setting(setting);
  deterministic = value.value;
}

SIM_API(HcclResult, HcclGetConfig, (HcclConfig setting, HcclConfigValue* value)) {
  check_setting(setting);
  value->value = deterministic;
}

// All fields of HcclCommConfig are understood; those that concern only the network have no effect.
SIM_PLAIN uint32_t HcclGetCommConfigCapability() {
  watch_opening();  // torch_npu asks each time before it may open a communicator
  return HCCL_COMM_CONFIG_RESERVED;
}

SIM_PLAIN const char* HcclGetErrorString(HcclResult code) {
  static constexpr std::array<const char*, 25> kNames{
      "HCCL_SUCCESS",           "HCCL_E_PARA",        "HCCL_E_PTR",           "HCCL_E_MEMORY",        "HCCL_E_INTERNAL",
      "HCCL_E_NOT_SUPPORT",     "HCCL_E_NOT_FOUND",   "HCCL_E_UNAVAIL",       "HCCL_E_SYSCALL",       "HCCL_E_TIMEOUT",
      "HCCL_E_OPEN_FILE_FAILURE", "HCCL_E_TCP_CONNECT", "HCCL_E_ROCE_CONNECT", "HCCL_E_TCP_TRANSFER", "HCCL_E_ROCE_TRANSFER",
      "HCCL_E_RUNTIME",         "HCCL_E_DRV",         "HCCL_E_PROFILING",     "HCCL_E_CCE",           "HCCL_E_NETWORK",
      "HCCL_E_AGAIN",           "HCCL_E_REMOTE",      "HCCL_E_SUSPENDING",    "HCCL_E_OPRETRY_FAIL",  "HCCL_E_OOM"};
  const auto index = static_cast<std::size_t>(code);
  return index < kNames.size() ? kNames[index] : "unknown error of HCCL";
}
