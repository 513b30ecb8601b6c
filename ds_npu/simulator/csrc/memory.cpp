#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "acl/acl_base.h"
#include "acl/error_codes/rt_error_codes.h"
#include "failure.h"
#include "known_bytes.h"
#include "settings.h"

namespace sim {
namespace {

constexpr std::size_t kGranule = 512;         // alignment of aclrtMalloc
constexpr std::size_t kPage = 4096;
constexpr std::size_t kRangePerCapacity = 16;  // so many addresses that fragmentation never makes an allocation fail

std::size_t rounded(std::size_t bytes, std::size_t to) { return (std::max<std::size_t>(bytes, 1) + to - 1) / to * to; }

std::string gib(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1ull << 30));
  return text;
}

}  // namespace

Memory::~Memory() {
  if (base_ != nullptr) munmap(base_, span());
  if (file_ >= 0) close(file_);
}

std::size_t Memory::capacity() const { return settings().memory_bytes; }

std::size_t Memory::span() const { return rounded(capacity(), kPage) * kRangePerCapacity; }

void Memory::open() {
  if (base_ != nullptr) return;
  file_ = memfd_create("ds_npu_device_memory", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(span())) != 0)
    throw Failure(ACL_ERROR_RT_MEMORY_ALLOCATION, std::string("no anonymous file for device memory: ") + strerror(errno));
  void* range = mmap(nullptr, span(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (range == MAP_FAILED)
    throw Failure(ACL_ERROR_RT_MEMORY_ALLOCATION, "no " + gib(span()) + " of addresses for device memory: " + strerror(errno));
  base_ = static_cast<char*>(range);
  free_[0] = span();
}

void* Memory::take(std::size_t bytes) {
  open();
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    const auto [offset, size] = *hole;
    if (size < bytes) continue;
    free_.erase(hole);
    if (size > bytes) free_[offset + bytes] = size - bytes;
    taken_[offset] = bytes;
    return base_ + offset;
  }
  throw Failure(ACL_ERROR_RT_MEMORY_ALLOCATION, "no free range of " + gib(bytes) + " among the device's addresses");
}

std::size_t Memory::give_back(void* address) {
  const auto offset = static_cast<std::size_t>(static_cast<char*>(address) - base_);
  const auto found = base_ == nullptr ? taken_.end() : taken_.find(offset);
  if (found == taken_.end()) throw Failure(ACL_ERROR_INVALID_PARAM, "this address was not allocated on the device");
  const std::size_t bytes = found->second;
  taken_.erase(found);
  auto hole = free_.emplace(offset, bytes).first;
  if (auto next = std::next(hole); next != free_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    free_.erase(next);
  }
  if (hole != free_.begin()) {
    auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      free_.erase(hole);
    }
  }
  return bytes;
}

void* Memory::allocate(std::size_t bytes, const char* what) {
  bytes = rounded(bytes, kGranule);
  charge(bytes, what);
  const std::scoped_lock lock(mutex_);
  return take(rounded(bytes, kPage));
}

std::size_t Memory::free(void* address) {
  const std::scoped_lock lock(mutex_);
  const std::size_t bytes = give_back(address);
  discard(address, bytes);
  used_ -= std::min(used_, bytes);
  return bytes;
}

void Memory::charge(std::size_t bytes, const char* what) {
  const std::scoped_lock lock(mutex_);
  bytes = rounded(bytes, kPage);
  if (bytes > capacity() - std::min(used_, capacity()))
    throw Failure(ACL_ERROR_RT_MEMORY_ALLOCATION, "simulated NPU " + std::to_string(device_) + " has no " + gib(bytes) +
                                                      " for " + what + ": " + gib(used_) + " of " + gib(capacity()) +
                                                      " are in use");
  used_ += bytes;
}

void Memory::release(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  used_ -= std::min(used_, rounded(bytes, kPage));
}

void* Memory::reserve(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  return take(rounded(bytes, kPage));
}

void Memory::unreserve(void* address) {
  const std::scoped_lock lock(mutex_);
  discard(address, give_back(address));
}

void Memory::discard(void* address, std::size_t bytes) {
  if (dry_run()) known_bytes().forget(address, bytes);
  const auto offset = static_cast<char*>(address) - base_;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
}

bool Memory::contains(const void* address) const {
  const std::scoped_lock lock(mutex_);
  const auto* byte = static_cast<const char*>(address);
  return base_ != nullptr && byte >= base_ && byte < base_ + span();
}

std::size_t Memory::used() const {
  const std::scoped_lock lock(mutex_);
  return used_;
}

int Memory::file() {
  const std::scoped_lock lock(mutex_);
  open();
  return file_;
}

char* Memory::base() {
  const std::scoped_lock lock(mutex_);
  open();
  return base_;
}

}  // namespace sim
