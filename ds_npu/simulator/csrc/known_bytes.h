// Which bytes a dry run knows: those that the host wrote, and what is computed of integers among them.
//
// In a dry run (`ds_npu sim --dry`) an operator with an unknown input computes nothing, touches no page of memory, and its
// results are unknown. So are floating-point results of floating-point numbers that the host wrote (weights), and of nothing
// (zeros, random numbers); of known integers they are computed (torch_npu sorts integers as float32). The host reads 1, 0 or
// false of an unknown scalar.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "work.h"

namespace sim {

class KnownBytes {
 public:
  // The bytes become known (`given` by the host, or computed), or unknown numbers of a type.
  void set_known(const void* begin, std::size_t bytes, bool given) { set(begin, bytes, given ? kGiven : kComputed); }
  void set_unknown(const void* begin, std::size_t bytes, at::ScalarType type);
  // Nothing is known of the bytes any more: memory that was freed.
  void forget(const void* begin, std::size_t bytes);

  bool knows(const void* begin, std::size_t bytes);
  bool has_computed(const void* begin, std::size_t bytes);
  // The type of the number at an address, if it is unknown and was computed.
  std::optional<at::ScalarType> type_at(const void* address);

 private:
  using Address = std::uintptr_t;
  static constexpr int kComputed = -1, kGiven = -2;
  struct Range {
    Address end;
    int state;  // kComputed, kGiven, or the type of unknown numbers
  };
  bool all_of(const void* begin, std::size_t bytes, int least);
  void set(const void* begin, std::size_t bytes, int state);
  void cut(Address begin, Address end);

  std::mutex mutex_;
  std::map<Address, Range> ranges_;  // by their beginning; disjoint
};

// Of this process: device memory, and what copies brought to the host.
KnownBytes& known_bytes();

bool dry_run();

// Whether a task of a dry run computes.
bool computes(const Account& account);
// What a task has written is known now if it has computed it.
void conclude(const Account& account, bool computed);

void mark_known(const at::Tensor& tensor);

// A copy in a dry run.
void copy_known(void* to, const void* from, std::size_t bytes, bool from_device, bool to_device);

}  // namespace sim
