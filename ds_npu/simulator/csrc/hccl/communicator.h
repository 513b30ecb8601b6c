// A communicator: its ranks, their shared segment, and the waits for other ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "hccl/absence.h"
#include "hccl/hccl_types.h"
#include "hccl/options.h"
#include "hccl/peer.h"
#include "hccl/segment.h"

namespace sim::hccl {

class Communicator {
 public:
  // Returns when all ranks have joined; throws Failure with an HCCL code.
  static std::shared_ptr<Communicator> join(const Address& address, std::uint32_t ranks, std::uint32_t rank,
                                            const Options& options, const Absence& absence = {});

  // A communicator of some ranks of this one; `members[rank]` is this rank. The first member makes it for the others.
  std::shared_ptr<Communicator> split(const std::vector<std::uint32_t>& members, std::uint32_t rank, std::uint64_t id,
                                      const Options& options);
  ~Communicator();

  const std::string& name() const { return name_; }
  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }
  Device& device() const { return device_; }
  // Whether no process runs as this rank, and another one acts for it.
  bool is_absent(std::uint32_t rank) const { return absence_.acting(rank) != rank; }
  bool has_absent() const { return !absence_.npus.empty(); }
  // The number of a rank's NPU on the machine.
  int npu_of(std::uint32_t rank) const;

  // On the host: the place of the next call in the communicator's order.
  std::uint64_t reserve() { return ++reserved_; }
  // On the host: the place of the next message in the order of those to, or from, a peer.
  std::uint64_t reserve_send(std::uint32_t target) { return ++sends_[target]; }
  std::uint64_t reserve_receive(std::uint32_t source) { return ++receives_[source]; }

  // The offset of a buffer in the device's memory. Throws Failure HCCL_E_PARA for one that is not there.
  std::uint64_t offset_of(const void* buffer, std::uint64_t bytes) const;
  // Whether a dry run knows a buffer.
  static bool knows(const void* buffer, std::uint64_t bytes);

  // The host has destroyed the communicator; calls that still wait fail soon.
  void close();

  // In words: the call in which other ranks wait for this one, or that they have all exited; "": none of them waits.
  std::string waited_for() const;
  // This rank is about to end: the other ranks' waits for it fail with `why`.
  void give_up(const std::string& why);

  // The code of the first call that failed; its message becomes this thread's last error.
  HcclResult async_error();

  // In a stream's task ------------------------------------------------------------------------------------------------

  Segment& segment() { return segment_; }
  Slot& own() const { return segment_.slot(rank_); }
  // What a rank tells all others, or the rank that acts for it.
  Slot& slot(std::uint32_t rank) const { return segment_.slot(absence_.acting(rank)); }
  // What a rank, or the one that acts for it, sends to each peer.
  std::uint64_t* send_counts(std::uint32_t rank) { return segment_.send_counts(absence_.acting(rank)); }
  std::uint64_t* send_displacements(std::uint32_t rank) { return segment_.send_displacements(absence_.acting(rank)); }
  char* at(std::uint32_t peer, std::uint64_t offset) const { return peers_[peer]->at(offset); }

  // Waits until the calls before `sequence` are over, whatever stream they are on.
  // Returns when, in virtual time, they were.
  Nanoseconds begin(std::uint64_t sequence, const std::string& what);
  void end(std::uint64_t sequence, Nanoseconds time);

  // Waits until `reached(peer)` for all peers. `what` says in an error what this rank was doing.
  using Reached = std::function<bool(std::uint32_t)>;
  void await(const Reached& reached, const std::string& what);

  // Throws out of the task, stops the device, and marks this rank as failed for its peers.
  [[noreturn]] void fail(HcclResult kind, const std::string& why);

 private:
  Communicator(const Address& address, std::uint32_t ranks, std::uint32_t rank, const Options& options,
               const Absence& absence);
  void enter();
  void await_joined(RankState at_least);
  void check_devices() const;
  void tell_failure(const std::string& why);
  void give_up_if_hopeless(const Reached& reached, const std::string& what, Clock::time_point begun);
  void give_up_if_late(const std::string& missing, const std::string& what, Clock::time_point begun);
  std::string missing(const std::function<bool(std::uint32_t)>& present) const;
  std::string named(std::uint32_t peer) const;

  Device& device_;
  const std::uint32_t size_;
  const std::uint32_t rank_;
  const Options options_;
  const Absence absence_;
  const std::string name_;
  Segment segment_;
  std::shared_ptr<BufferCharge> buffers_;
  std::vector<std::unique_ptr<Peer>> peers_;

  std::atomic<std::uint64_t> reserved_{0};
  std::vector<std::atomic<std::uint64_t>> sends_;
  std::vector<std::atomic<std::uint64_t>> receives_;
  std::atomic<std::int64_t> closed_at_{0};  // ticks of Clock, 0: open

  std::mutex mutex_;
  std::condition_variable ended_;
  std::uint64_t performed_ = 0;
  Nanoseconds performed_at_ = 0;
  HcclResult error_ = HCCL_SUCCESS;
  std::string error_message_;
  std::mutex splitting_;
};

// This process's communicators ----------------------------------------------------------------------------------------

// What an HcclComm stands for. Throws Failure HCCL_E_PARA for anything else.
std::shared_ptr<Communicator> communicator_of(HcclComm handle);
HcclComm handle_of(std::shared_ptr<Communicator> communicator);
void forget(HcclComm handle);
std::vector<std::shared_ptr<Communicator>> communicators();

// The communicator of the current device with this name, as operators that communicate are given it. Throws Failure.
std::shared_ptr<Communicator> communicator_named(const std::string& name);

}  // namespace sim::hccl
