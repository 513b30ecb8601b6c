#include "hccl/absence.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "failure.h"
#include "hccl/hccl_types.h"
#include "settings.h"

namespace sim::hccl {
namespace {

using Nonce = std::array<std::uint64_t, 2>;

std::mutex mutex;

std::map<Nonce, std::vector<int>>& told_npus() {
  static auto* all = new std::map<Nonce, std::vector<int>>;
  return *all;
}

}  // namespace

// The NPUs of the ranks of the communicator that is made with a root info, before it is made. HCCL's ranks find each other;
// those that have no process cannot.
extern "C" __attribute__((visibility("default"))) void ds_npu_sim_communicator(const char* root_info, std::uint32_t ranks,
                                                                              const int* npus) {
  Address address;
  std::memcpy(&address, root_info, sizeof address);
  const std::scoped_lock lock(mutex);
  told_npus()[{address.nonce[0], address.nonce[1]}] = {npus, npus + ranks};
}

Absence absence_of(const Address& address, std::uint32_t ranks) {
  const std::vector<int>& present = settings().present;
  if (present.empty()) return {};
  Absence found;
  {
    const std::scoped_lock lock(mutex);
    found.npus = told_npus()[{address.nonce[0], address.nonce[1]}];
  }
  if (found.npus.size() != ranks)
    throw Failure(HCCL_E_PARA, "the NPUs of a communicator of " + std::to_string(ranks) + " ranks are not known, but of " +
                                   std::to_string(found.npus.size()) + ", and some ranks have no process");
  const auto is_present = [&](int npu) { return std::ranges::binary_search(present, npu); };
  if (std::ranges::all_of(found.npus, is_present)) return {};
  for (const int npu : found.npus) {
    const auto after = std::ranges::upper_bound(present, npu);
    const auto actor = after == present.begin() ? found.npus.end() : std::ranges::find(found.npus, *(after - 1));
    if (actor == found.npus.end())
      throw Failure(HCCL_E_PARA, "no process acts for NPU " + std::to_string(npu) + " in a communicator of " +
                                     std::to_string(ranks) + " ranks");
    found.actors.push_back(static_cast<std::uint32_t>(actor - found.npus.begin()));
  }
  return found;
}

}  // namespace sim::hccl
