// Device memory, pinned host memory, and the copies between them.
#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"
#include "api.h"
#include "known_bytes.h"
#include "settings.h"
#include "stream.h"

using sim::Failure;

namespace {

// Ranges of host memory.
class Ranges {
 public:
  void add(const void* address, size_t bytes) {
    const std::scoped_lock lock(mutex_);
    ranges_[static_cast<const char*>(address)] = bytes;
  }
  void remove(const void* address) {
    const std::scoped_lock lock(mutex_);
    if (ranges_.erase(static_cast<const char*>(address)) == 0)
      throw Failure(ACL_ERROR_INVALID_PARAM, "this host memory is not pinned");
  }
  bool contains(const void* address, size_t bytes = 1) {
    const std::scoped_lock lock(mutex_);
    auto range = ranges_.upper_bound(static_cast<const char*>(address));
    if (range == ranges_.begin()) return false;
    --range;
    return static_cast<const char*>(address) + bytes <= range->first + range->second;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
};

// For aclrtPointerGetAttributes. Never destroyed: torch frees pinned memory while the process ends.
Ranges& pinned() {
  static auto* ranges = new Ranges;
  return *ranges;
}

// What aclrtHostRegister has pinned, and mapped to devices at the same address.
Ranges& registered() {
  static auto* ranges = new Ranges;
  return *ranges;
}

sim::Memory& memory_with(void* address) {
  sim::Device* owner = sim::device_of(address);
  if (owner == nullptr) throw Failure(ACL_ERROR_INVALID_PARAM, "this address is not in the memory of a device");
  return owner->memory();
}

struct Physical {
  sim::Device* device;
  size_t bytes;
};

std::mutex mappings_mutex;
// Bytes mapped at an address.
std::map<void*, size_t>& mappings() {
  static auto* all = new std::map<void*, size_t>;
  return *all;
}

void check_sides(const void* to, const void* from, aclrtMemcpyKind kind) {
  const bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  const bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (kind > ACL_MEMCPY_DEVICE_TO_DEVICE) return;
  if ((sim::device_of(to) != nullptr) != to_device || (sim::device_of(from) != nullptr) != from_device)
    throw Failure(ACL_ERROR_INVALID_PARAM, "the kind of this copy does not fit where its source and its target lie");
}

void check_copy(const void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room)
    throw Failure(ACL_ERROR_INVALID_PARAM, std::to_string(bytes) + " bytes do not fit into " + std::to_string(room));
  if (bytes != 0) check_sides(to, from, kind);
}

void copy(void* to, const void* from, size_t bytes) {
  if (!sim::dry_run()) {
    std::memmove(to, from, bytes);
    return;
  }
  sim::copy_known(to, from, bytes, sim::device_of(from) != nullptr, sim::device_of(to) != nullptr);
}

void copy_async(const char* name, void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                aclrtStream stream) {
  check_copy(to, room, from, bytes, kind);
  const bool within_device = kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  sim::stream_of(stream).push({.name = name,
                               .work = [=] { copy(to, from, bytes); },
                               .account = sim::copy_of(to, from, bytes, within_device)});
}

// For the search for races: whoever still touches the bytes does it too late.
void note_freed(const char* name, void* address, size_t bytes) {
  if (!sim::settings().races) return;
  sim::on_host(name, sim::account_of({.kind = "none"}, {sim::touched(address, bytes, sim::Access::kWritten)}, 0));
}

void allocate_on_device(void** address, size_t bytes) {
  *address = sim::current_device().memory().allocate(bytes, "an allocation");
}

}  // namespace

bool sim::is_mapped(const void* address, size_t bytes) { return registered().contains(address, bytes); }

SIM_API(aclError, aclrtMalloc, (void** address, size_t bytes, aclrtMemMallocPolicy)) { allocate_on_device(address, bytes); }

SIM_API(aclError, aclrtMallocAlign32, (void** address, size_t bytes, aclrtMemMallocPolicy)) {
  allocate_on_device(address, bytes);
}

SIM_API(aclError, aclrtFree, (void* address)) { note_freed("aclrtFree", address, memory_with(address).free(address)); }

SIM_API(aclError, aclrtGetMemInfo, (aclrtMemAttr, size_t* free, size_t* total)) {
  const auto& memory = sim::current_device().memory();
  *total = memory.capacity();
  *free = memory.capacity() - std::min(memory.used(), memory.capacity());
}

SIM_API(aclError, aclrtMallocHost, (void** address, size_t bytes)) {
  *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*address == nullptr) throw Failure(ACL_ERROR_BAD_ALLOC, "the host has no " + std::to_string(bytes) + " bytes to pin");
  pinned().add(*address, bytes);
}

SIM_API(aclError, aclrtFreeHost, (void* address)) {
  pinned().remove(address);
  std::free(address);
}

SIM_API(aclError, aclrtHostRegister, (void* address, uint64_t bytes, aclrtHostRegisterType, void** device_address)) {
  registered().add(address, bytes);
  if (device_address != nullptr) *device_address = address;
}

SIM_API(aclError, aclrtHostRegisterV2, (void* address, uint64_t bytes, uint32_t)) { registered().add(address, bytes); }

SIM_API(aclError, aclrtHostUnregister, (void* address)) { registered().remove(address); }

SIM_API(aclError, aclrtPointerGetAttributes, (const void* address, aclrtPtrAttributes* attributes)) {
  *attributes = {};
  if (const sim::Device* owner = sim::device_of(address)) {
    attributes->location = {static_cast<uint32_t>(owner->index()), ACL_MEM_LOCATION_TYPE_DEVICE};
  } else {
    const bool known = pinned().contains(address) || registered().contains(address);
    attributes->location.type = known ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  }
}

// The synchronous calls do not wait for any stream, as on hardware.
SIM_API(aclError, aclrtMemcpy, (void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind)) {
  check_copy(to, room, from, bytes, kind);
  copy(to, from, bytes);
  sim::on_host("aclrtMemcpy", sim::copy_of(to, from, bytes, kind == ACL_MEMCPY_DEVICE_TO_DEVICE));
}

SIM_API(aclError, aclrtMemset, (void* to, size_t room, int32_t value, size_t bytes)) {
  if (bytes > room) throw Failure(ACL_ERROR_INVALID_PARAM, "more bytes to set than there are");
  std::memset(to, value, bytes);
  if (sim::dry_run()) sim::known_bytes().set_known(to, bytes, false);
  sim::on_host("aclrtMemset", sim::account_of(sim::streaming(), {sim::touched(to, bytes, sim::Access::kWritten)}));
}

SIM_API(aclError, aclrtMemcpyAsync,
        (void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream)) {
  copy_async("aclrtMemcpyAsync", to, room, from, bytes, kind, stream);
}

SIM_API(aclError, aclrtMemcpyAsyncWithCondition,
        (void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream)) {
  copy_async("aclrtMemcpyAsyncWithCondition", to, room, from, bytes, kind, stream);
}

SIM_API(aclError, aclrtMemsetAsync, (void* to, size_t room, int32_t value, size_t bytes, aclrtStream stream)) {
  if (bytes > room) throw Failure(ACL_ERROR_INVALID_PARAM, "more bytes to set than there are");
  sim::stream_of(stream).push({.name = "aclrtMemsetAsync",
                               .work = [=] { std::memset(to, value, bytes); },
                               .account = sim::account_of(sim::streaming(), {sim::touched(to, bytes, sim::Access::kWritten)}),
                               .computes = true});
}

// Expandable segments. torch_npu probes for support before it has set a device. A physical handle is counted against
// the capacity; a mapping only records its size, since reserved addresses are backed by pages already.
SIM_API(aclError, aclrtReserveMemAddress, (void** address, size_t bytes, size_t, void*, uint64_t)) {
  *address = sim::device_or_first().memory().reserve(bytes);
}

SIM_API(aclError, aclrtReleaseMemAddress, (void* address)) { memory_with(address).unreserve(address); }

SIM_API(aclError, aclrtMallocPhysical,
        (aclrtDrvMemHandle * handle, size_t bytes, const aclrtPhysicalMemProp* wanted, uint64_t)) {
  sim::Device& device = sim::device(static_cast<int>(wanted->location.id));
  device.memory().charge(bytes, "physical memory");
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new Physical{.device = &device, .bytes = bytes});
}

SIM_API(aclError, aclrtFreePhysical, (aclrtDrvMemHandle handle)) {
  const std::unique_ptr<Physical> physical(reinterpret_cast<Physical*>(handle));
  physical->device->memory().release(physical->bytes);
}

SIM_API(aclError, aclrtMapMem, (void* address, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t)) {
  memory_with(address);
  const std::scoped_lock lock(mappings_mutex);
  mappings()[address] = bytes;
}

SIM_API(aclError, aclrtUnmapMem, (void* address)) {
  const std::scoped_lock lock(mappings_mutex);
  const auto found = mappings().find(address);
  if (found == mappings().end()) throw Failure(ACL_ERROR_INVALID_PARAM, "nothing is mapped at this address");
  memory_with(address).discard(address, found->second);
  note_freed("aclrtUnmapMem", address, found->second);
  mappings().erase(found);
}
