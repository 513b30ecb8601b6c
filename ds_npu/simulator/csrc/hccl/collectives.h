// The collectives, as they run in a task of a stream: each returns when this rank has what it gets and nobody needs its
// buffers any more. `sequence` is the call's place among the communicator's calls, Communicator::reserve on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "hccl/communicator.h"

namespace sim::hccl {

void all_reduce(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t count,
                HcclDataType type, HcclReduceOp reduction);

void all_gather(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t send_count,
                HcclDataType type);

void reduce_scatter(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive,
                    std::uint64_t receive_count, HcclDataType type, HcclReduceOp reduction);

void broadcast(Communicator& communicator, std::uint64_t sequence, void* buffer, std::uint64_t count, HcclDataType type,
               std::uint32_t root);

void reduce(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t count,
            HcclDataType type, HcclReduceOp reduction, std::uint32_t root);

void scatter(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t receive_count,
             HcclDataType type, std::uint32_t root);

void all_to_all(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t count_each,
                HcclDataType type);

void barrier(Communicator& communicator, std::uint64_t sequence);

// How many elements go to, and come from, each rank, and where they begin in the two buffers.
struct Parts {
  std::vector<std::uint64_t> send_counts;
  std::vector<std::uint64_t> send_displacements;
  std::vector<std::uint64_t> receive_counts;
  std::vector<std::uint64_t> receive_displacements;

  std::uint64_t send_extent() const;  // elements from the beginning of the buffer to the end of its last part
  std::uint64_t receive_extent() const;
};

// all_gather_v, all_to_all_v and all_to_all_vc differ in their name and in which parts the caller can choose.
void exchange(Communicator& communicator, std::uint64_t sequence, Operation operation, const void* send, void* receive,
              HcclDataType type, const Parts& parts);

void reduce_scatter_v(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, HcclDataType type,
                      HcclReduceOp reduction, const Parts& parts);

}  // namespace sim::hccl
