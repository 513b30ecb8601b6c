// Device memory of one simulated NPU: a reserved range of addresses backed by an anonymous file (memfd), so that the other
// ranks can map it, with a capacity. Pages are allocated when first written and released when freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace sim {

class Memory {
 public:
  explicit Memory(int device) : device_(device) {}
  ~Memory();
  Memory(const Memory&) = delete;

  // Throws Failure ACL_ERROR_RT_MEMORY_ALLOCATION when the capacity is used up.
  void* allocate(std::size_t bytes, const char* what);
  std::size_t free(void* address);  // its bytes

  // Bytes counted without an address: physical memory that will be mapped into a reserved range, HCCL's buffers.
  void charge(std::size_t bytes, const char* what);
  void release(std::size_t bytes);

  // Addresses without memory, for aclrtReserveMemAddress; `discard` gives the pages below a mapping back.
  void* reserve(std::size_t bytes);
  void unreserve(void* address);
  void discard(void* address, std::size_t bytes);

  bool contains(const void* address) const;
  std::size_t capacity() const;
  std::size_t used() const;

  // For other processes: the file behind the range, and where the range begins and how long it is.
  int file();
  char* base();
  std::size_t span() const;

 private:
  void open();
  void* take(std::size_t bytes);
  std::size_t give_back(void* address);

  const int device_;
  mutable std::mutex mutex_;
  int file_ = -1;
  char* base_ = nullptr;
  std::size_t used_ = 0;
  std::map<std::size_t, std::size_t> free_;   // offset -> bytes
  std::map<std::size_t, std::size_t> taken_;  // offset -> bytes
};

// Whether these bytes of the host are mapped to the devices, by aclrtHostRegister.
bool is_mapped(const void* address, std::size_t bytes);

}  // namespace sim
