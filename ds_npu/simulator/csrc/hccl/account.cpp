#include "hccl/account.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "hccl/reduction.h"
#include "machine.h"
#include "trace.h"

namespace sim::hccl {
namespace {

// The collective of the machine's profile whose phases a function has.
const std::map<std::string, std::string>& kinds() {
  static const std::map<std::string, std::string> all{
      {"HcclAllReduce", "all_reduce"},         {"HcclReduce", "reduce"},        {"HcclReduceScatter", "reduce_scatter"},
      {"HcclReduceScatterV", "reduce_scatter"}, {"HcclBroadcast", "broadcast"},  {"HcclScatter", "scatter"},
      {"HcclAllGather", "all_gather"},         {"HcclAllGatherV", "all_gather"}, {"HcclAlltoAll", "all_to_all"},
      {"HcclAlltoAllV", "all_to_all"},         {"HcclAlltoAllVC", "all_to_all"}, {"HcclBarrier", "barrier"}};
  return all;
}

int64_t node_of(const Communicator& communicator, std::uint32_t rank) {
  return communicator.npu_of(rank) / machine().node;
}

}  // namespace

std::string told(const Communicator& communicator, std::uint64_t sequence) {
  if (!tracing()) return "";
  std::string npus;
  for (std::uint32_t rank = 0; rank < communicator.size(); ++rank)
    npus += (npus.empty() ? "" : ",") + std::to_string(communicator.npu_of(rank));
  const std::string call = sequence == 0 ? "" : ",\"call\":" + std::to_string(sequence);
  return ",\"communicator\":" + quoted(communicator.name()) + ",\"rank\":" + std::to_string(communicator.rank()) +
         ",\"npus\":[" + npus + "]" + call;
}

Account account_of(const char* name, const Communicator& communicator, std::uint64_t sequence,
                   const std::vector<Buffer>& buffers) {
  std::set<int64_t> nodes;
  for (std::uint32_t rank = 0; rank < communicator.size(); ++rank) nodes.insert(node_of(communicator, rank));
  const auto count = static_cast<int64_t>(nodes.size());
  const int64_t near = (static_cast<int64_t>(communicator.size()) + count - 1) / count;
  std::vector<Touch> touches;
  std::uint64_t bytes = 0;
  for (const Buffer& buffer : buffers) {
    const Access access = buffers.size() == 1 ? Access::kChanged : touches.empty() ? Access::kRead : Access::kWritten;
    touches.push_back(touched(buffer.address, buffer.bytes, access));
    bytes = std::max(bytes, buffer.bytes);
  }
  const double seconds = machine().collective_seconds(kinds().at(name), static_cast<double>(bytes), near, count);
  Account account = sim::account_of({.kind = "collective"}, std::move(touches), seconds);
  if (tracing())
    account.communication = told(communicator, sequence) + ",\"collective\":" + quoted(kinds().at(name)) +
                            ",\"bytes\":" + std::to_string(bytes);
  return account;
}

Account account_of(const Communicator& communicator, const std::vector<Message>& messages) {
  // Bytes to and from this node and other nodes; both ways at once.
  double near[2] = {}, far[2] = {};
  std::set<std::uint32_t> peers;
  std::string listed;
  std::vector<Touch> touches;
  for (const Message& message : messages) {
    const std::uint64_t bytes = message.count * bytes_of(message.type);
    touches.push_back(touched(message.buffer, bytes, message.sends ? Access::kRead : Access::kWritten));
    const bool is_near = node_of(communicator, message.peer) == node_of(communicator, communicator.rank());
    (is_near ? near : far)[message.sends] += static_cast<double>(bytes);
    if (is_near) peers.insert(message.peer);
    if (tracing())
      listed += (listed.empty() ? "[" : ",[") + std::to_string(message.sends) + "," + std::to_string(message.peer) + "," +
                std::to_string(message.number) + "," + std::to_string(bytes) + "]";
  }
  const double sent = machine().sending_seconds(near[1], static_cast<int64_t>(peers.size()), far[1]);
  const double received = machine().sending_seconds(near[0], static_cast<int64_t>(peers.size()), far[0]);
  Account account = sim::account_of({.kind = "message"}, std::move(touches), machine().message + std::max(sent, received));
  if (tracing()) account.communication = told(communicator, 0) + ",\"messages\":[" + listed + "]";
  return account;
}

}  // namespace sim::hccl
