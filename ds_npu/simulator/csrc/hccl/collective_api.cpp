// The functions of HCCL that communicate.
#include <algorithm>
#include <utility>

#include "api.h"
#include "hccl/calls.h"
#include "hccl/collectives.h"
#include "hccl/hccl.h"
#include "hccl/reduction.h"

using namespace sim::hccl;
using sim::Failure;

namespace {

void check_root(const Communicator& communicator, std::uint32_t root) {
  if (root >= communicator.size())
    throw Failure(HCCL_E_PARA, "communicator " + communicator.name() + " of " + std::to_string(communicator.size()) +
                                   " ranks has no rank " + std::to_string(root) + " as root");
}

void check_same_type(HcclDataType send, HcclDataType receive) {
  if (send != receive)
    throw Failure(HCCL_E_PARA, "what is sent is " + name_of(send) + ", what is received " + name_of(receive));
}

// Buffers must be equal or disjoint: a reduction whose buffers overlap in part has no defined result.
void check_overlap(const void* send, const void* receive, std::uint64_t bytes) {
  const auto* a = static_cast<const char*>(send);
  const auto* b = static_cast<const char*>(receive);
  if (a != b && a < b + bytes && b < a + bytes)
    throw Failure(HCCL_E_PARA, "the send and the receive buffer overlap without being the same");
}

std::vector<std::uint64_t> numbers(const void* values, std::uint64_t count) {
  if (values == nullptr) throw Failure(HCCL_E_PTR, "counts or displacements are a null pointer");
  const auto* first = static_cast<const std::uint64_t*>(values);
  return {first, first + count};
}

void enqueue_exchange(const char* name, Operation operation, const void* send, void* receive, HcclDataType type, Parts parts,
                      const std::shared_ptr<Communicator>& communicator, aclrtStream stream) {
  const std::uint64_t size = bytes_of(type);
  const std::vector<Buffer> buffers{{send, parts.send_extent() * size}, {receive, parts.receive_extent() * size}};
  enqueue(name, communicator, stream, buffers, [=, parts = std::move(parts)](Communicator& group, std::uint64_t sequence) {
    exchange(group, sequence, operation, send, receive, type, parts);
  });
}

}  // namespace

SIM_API(HcclResult, HcclAllReduce,
        (void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp reduction, HcclComm comm,
         aclrtStream stream)) {
  check_reducible(type, reduction);
  const std::uint64_t bytes = count * bytes_of(type);
  check_overlap(send, receive, bytes);
  enqueue("HcclAllReduce", communicator_of(comm), stream, {{send, bytes}, {receive, bytes}},
          [=](Communicator& group, std::uint64_t sequence) {
            all_reduce(group, sequence, send, receive, count, type, reduction);
          });
}

SIM_API(HcclResult, HcclReduce,
        (void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp reduction, uint32_t root, HcclComm comm,
         aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_root(*communicator, root);
  check_reducible(type, reduction);
  const std::uint64_t bytes = count * bytes_of(type);
  const bool receives = communicator->rank() == root;
  if (receives) check_overlap(send, receive, bytes);
  enqueue("HcclReduce", communicator, stream, {{send, bytes}, {receive, receives ? bytes : 0}},
          [=](Communicator& group, std::uint64_t sequence) {
            reduce(group, sequence, send, receive, count, type, reduction, root);
          });
}

SIM_API(HcclResult, HcclReduceScatter,
        (void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp reduction, HcclComm comm,
         aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_reducible(type, reduction);
  const std::uint64_t bytes = count * bytes_of(type);
  enqueue("HcclReduceScatter", communicator, stream, {{send, bytes * communicator->size()}, {receive, bytes}},
          [=](Communicator& group, std::uint64_t sequence) {
            reduce_scatter(group, sequence, send, receive, count, type, reduction);
          });
}

SIM_API(HcclResult, HcclReduceScatterV,
        (void* send, const void* send_counts, const void* send_displacements, void* receive, uint64_t receive_count,
         HcclDataType type, HcclReduceOp reduction, HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_reducible(type, reduction);
  const std::uint32_t ranks = communicator->size();
  const Parts parts{.send_counts = numbers(send_counts, ranks),
                    .send_displacements = numbers(send_displacements, ranks),
                    .receive_counts = std::vector<std::uint64_t>(ranks, receive_count),
                    .receive_displacements = std::vector<std::uint64_t>(ranks, 0)};
  const std::uint64_t size = bytes_of(type);
  enqueue("HcclReduceScatterV", communicator, stream, {{send, parts.send_extent() * size}, {receive, receive_count * size}},
          [=](Communicator& group, std::uint64_t sequence) {
            reduce_scatter_v(group, sequence, send, receive, type, reduction, parts);
          });
}

SIM_API(HcclResult, HcclBroadcast,
        (void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_root(*communicator, root);
  enqueue("HcclBroadcast", communicator, stream, {{buffer, count * bytes_of(type)}},
          [=](Communicator& group, std::uint64_t sequence) { broadcast(group, sequence, buffer, count, type, root); });
}

SIM_API(HcclResult, HcclScatter,
        (void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_root(*communicator, root);
  const std::uint64_t bytes = count * bytes_of(type);
  const std::uint64_t sent = communicator->rank() == root ? bytes * communicator->size() : 0;
  enqueue("HcclScatter", communicator, stream, {{send, sent}, {receive, bytes}},
          [=](Communicator& group, std::uint64_t sequence) { scatter(group, sequence, send, receive, count, type, root); });
}

SIM_API(HcclResult, HcclAllGather,
        (void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  const std::uint64_t bytes = count * bytes_of(type);
  enqueue("HcclAllGather", communicator, stream, {{send, bytes}, {receive, bytes * communicator->size()}},
          [=](Communicator& group, std::uint64_t sequence) { all_gather(group, sequence, send, receive, count, type); });
}

SIM_API(HcclResult, HcclAllGatherV,
        (void* send, uint64_t send_count, void* receive, const void* receive_counts, const void* receive_displacements,
         HcclDataType type, HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  const std::uint32_t ranks = communicator->size();
  Parts parts{.send_counts = std::vector<std::uint64_t>(ranks, send_count),
              .send_displacements = std::vector<std::uint64_t>(ranks, 0),
              .receive_counts = numbers(receive_counts, ranks),
              .receive_displacements = numbers(receive_displacements, ranks)};
  enqueue_exchange("HcclAllGatherV", Operation::all_gather_v, send, receive, type, std::move(parts), communicator, stream);
}

SIM_API(HcclResult, HcclAlltoAll,
        (const void* send, uint64_t send_count, HcclDataType send_type, const void* receive, uint64_t receive_count,
         HcclDataType receive_type, HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_same_type(send_type, receive_type);
  if (send_count != receive_count)
    throw Failure(HCCL_E_PARA, std::to_string(send_count) + " elements to each rank, but " + std::to_string(receive_count) +
                                   " from each");
  const std::uint64_t bytes = send_count * bytes_of(send_type) * communicator->size();
  enqueue("HcclAlltoAll", communicator, stream, {{send, bytes}, {receive, bytes}},
          [=](Communicator& group, std::uint64_t sequence) {
            all_to_all(group, sequence, send, const_cast<void*>(receive), send_count, send_type);
          });
}

SIM_API(HcclResult, HcclAlltoAllV,
        (const void* send, const void* send_counts, const void* send_displacements, HcclDataType send_type, const void* receive,
         const void* receive_counts, const void* receive_displacements, HcclDataType receive_type, HcclComm comm,
         aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_same_type(send_type, receive_type);
  const std::uint32_t ranks = communicator->size();
  Parts parts{.send_counts = numbers(send_counts, ranks),
              .send_displacements = numbers(send_displacements, ranks),
              .receive_counts = numbers(receive_counts, ranks),
              .receive_displacements = numbers(receive_displacements, ranks)};
  enqueue_exchange("HcclAlltoAllV", Operation::all_to_all_v, send, const_cast<void*>(receive), send_type, std::move(parts),
                   communicator, stream);
}

// Entry (i, j) of the matrix is what rank i sends to rank j; the parts lie without gaps in both buffers.
SIM_API(HcclResult, HcclAlltoAllVC,
        (const void* send, const void* matrix, HcclDataType send_type, const void* receive, HcclDataType receive_type,
         HcclComm comm, aclrtStream stream)) {
  const auto communicator = communicator_of(comm);
  check_same_type(send_type, receive_type);
  const std::uint64_t ranks = communicator->size();
  const std::uint64_t rank = communicator->rank();
  const auto counts = numbers(matrix, ranks * ranks);
  Parts parts;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (std::uint64_t peer = 0; peer < ranks; ++peer) {
    parts.send_counts.push_back(counts[rank * ranks + peer]);
    parts.receive_counts.push_back(counts[peer * ranks + rank]);
    parts.send_displacements.push_back(std::exchange(sent, sent + parts.send_counts.back()));
    parts.receive_displacements.push_back(std::exchange(received, received + parts.receive_counts.back()));
  }
  enqueue_exchange("HcclAlltoAllVC", Operation::all_to_all_vc, send, const_cast<void*>(receive), send_type, std::move(parts),
                   communicator, stream);
}

SIM_API(HcclResult, HcclBarrier, (HcclComm comm, aclrtStream stream)) {
  enqueue("HcclBarrier", communicator_of(comm), stream, std::vector<Buffer>{}, barrier);
}

SIM_API(HcclResult, HcclSend,
        (void* buffer, uint64_t count, HcclDataType type, uint32_t target, HcclComm comm, aclrtStream stream)) {
  const Message message{.sends = true, .peer = target, .buffer = buffer, .count = count, .type = type};
  enqueue("HcclSend", communicator_of(comm), stream, {message});
}

SIM_API(HcclResult, HcclRecv,
        (void* buffer, uint64_t count, HcclDataType type, uint32_t source, HcclComm comm, aclrtStream stream)) {
  const Message message{.sends = false, .peer = source, .buffer = buffer, .count = count, .type = type};
  enqueue("HcclRecv", communicator_of(comm), stream, {message});
}

SIM_API(HcclResult, HcclBatchSendRecv, (HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream)) {
  std::vector<Message> messages;
  for (const HcclSendRecvItem* item = items; item != items + count; ++item)
    messages.push_back({.sends = item->sendRecvType == HCCL_SEND,
                        .peer = item->remoteRank,
                        .buffer = item->buf,
                        .count = item->count,
                        .type = item->dataType});
  enqueue("HcclBatchSendRecv", communicator_of(comm), stream, std::move(messages));
}

SIM_API(HcclResult, HcclGroupStart, ()) { begin_group(); }
SIM_API(HcclResult, HcclGroupEnd, ()) { end_group(); }
