// What the ranks of a communicator tell each other: a small anonymous file (memfd) that all of them map. The kernel
// removes it with the last process that has it open, however that process ends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "hccl/call.h"
#include "hccl/process.h"

namespace sim::hccl {

// How a segment is found: what HcclRootInfo holds. The nonce tells a segment from another file of a process that has since
// got the same pid.
struct Address {
  char magic[8];
  std::int32_t pid;
  std::int32_t file;
  std::uint64_t nonce[2];
};

enum class RankState : std::uint32_t { absent, claimed, registered, ready, left, failed };

constexpr std::size_t kTextBytes = 1024;

// What one rank tells all others. Plain fields are written before the atomic that announces them.
struct Slot {
  std::atomic<RankState> state;
  ProcessId process;
  std::int32_t device;  // its index in the process
  std::int32_t npu;     // its number on the machine
  std::int32_t memory_file;
  std::uint64_t memory_span;
  char failure[kTextBytes];  // when `failed`

  // Numbers of the last call of which this rank has ...
  std::atomic<std::uint64_t> posted;   // written `call`
  std::atomic<std::uint64_t> reduced;  // its own share of an all-reduce in its receive buffer
  std::atomic<std::uint64_t> done;     // read all it needs from the others
  Call call;

  // A communicator that this rank offers to make with other ranks of this one.
  std::atomic<bool> offering;
  std::uint64_t offered_id;
  Address offered;
};

// Messages from one rank to one other, one at a time: message `sent` lies at `offset` until `received` has reached it, and
// its times stand there until `settled` has.
struct Channel {
  std::atomic<std::uint64_t> sent;
  std::atomic<std::uint64_t> received;
  std::atomic<std::uint64_t> settled;
  Nanoseconds sender_ready;  // in virtual time
  Nanoseconds receiver_ready;
  std::uint64_t offset;
  std::uint64_t count;
  HcclDataType type;
  bool known;
};

// Part of a file in this process's addresses, shared with whoever else has mapped it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int file, std::size_t bytes);  // throws Failure HCCL_E_SYSCALL
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  char* base() const { return base_; }

 private:
  char* base_ = nullptr;
  std::size_t bytes_ = 0;
};

class Segment {
 public:
  // A new one, not yet sized. This process keeps its file open until `release`.
  static Address create();
  static void release(const Address& address);

  // Throws Failure when it no longer exists, or has been opened for another number of ranks.
  Segment(const Address& address, std::uint32_t ranks);

  Slot& slot(std::uint32_t rank) const;
  Channel& channel(std::uint32_t source, std::uint32_t target) const;

  // Counts of `rank`'s call, an entry for each peer.
  std::uint64_t* send_counts(std::uint32_t rank) const;
  std::uint64_t* send_displacements(std::uint32_t rank) const;
  std::uint64_t* receive_counts(std::uint32_t rank) const;

  // Ends the joining of all ranks with an error; the first failure is kept.
  void fail_all(std::string_view why);
  std::string failure() const;  // or ""

  // To sleep without missing a wake-up: read the generation, test the condition, sleep until the generation has changed.
  std::uint32_t generation() const;
  void announce();
  void sleep(std::uint32_t generation, std::chrono::milliseconds longest) const;

 private:
  struct Header;
  std::uint64_t* counts(std::uint32_t rank) const;

  Header& header() const { return *reinterpret_cast<Header*>(mapping_.base()); }

  const std::uint32_t ranks_;
  Mapping mapping_;
};

}  // namespace sim::hccl
