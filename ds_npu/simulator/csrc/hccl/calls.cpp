#include "hccl/calls.h"

#include <utility>

#include "failure.h"
#include "hccl/account.h"
#include "hccl/call.h"
#include "stream.h"
#include "trace.h"

namespace sim::hccl {
namespace {

// Messages of one communicator and stream that wait for the HcclGroupEnd of this thread.
struct Held {
  std::shared_ptr<Communicator> communicator;
  aclrtStream stream;
  std::vector<Message> messages;
};

thread_local int group_depth = 0;
thread_local std::vector<Held> held;

Stream& stream_for(const Communicator& communicator, aclrtStream handle) {
  Stream& stream = stream_of(handle);
  if (&stream.device() != &communicator.device())
    throw Failure(HCCL_E_PARA, "communicator " + communicator.name() + ": a stream of NPU " +
                                   std::to_string(stream.device().index()) + ", but the communicator is on NPU " +
                                   std::to_string(communicator.device().index()));
  return stream;
}

// For the trace: communicator and rank, by which lines of different ranks can be matched.
std::string detail(const Communicator& communicator, const std::string& call) {
  return "communicator " + communicator.name() + ", rank " + std::to_string(communicator.rank()) + ": " + call;
}

std::string detail(const Communicator& communicator, const std::vector<Message>& messages) {
  if (!tracing()) return "";
  std::string all;
  for (const Message& message : messages) all += (all.empty() ? "" : "; ") + describe(message);
  return detail(communicator, all);
}

void push(const char* name, const std::shared_ptr<Communicator>& communicator, aclrtStream stream,
          std::vector<Message> messages) {
  std::string told = detail(*communicator, messages);
  Account account = account_of(*communicator, messages);
  stream_for(*communicator, stream)
      .push({.name = name,
             .work = [communicator, messages = std::move(messages)] { transfer(*communicator, messages); },
             .detail = std::move(told),
             .account = std::move(account),
             .dispatch = Dispatch::kCollective,
             .is_foreign = true});
}

}  // namespace

void enqueue(const char* name, const std::shared_ptr<Communicator>& communicator, aclrtStream stream,
             const std::vector<Buffer>& buffers, Collective collective) {
  Stream& target = stream_for(*communicator, stream);
  for (const Buffer& buffer : buffers) communicator->offset_of(buffer.address, buffer.bytes);
  const auto sequence = communicator->reserve();
  std::string told = tracing() ? detail(*communicator, "call " + std::to_string(sequence)) : "";
  target.push({.name = name,
               .work = [communicator, sequence, collective = std::move(collective)] { collective(*communicator, sequence); },
               .detail = std::move(told),
               .account = account_of(name, *communicator, sequence, buffers),
               .dispatch = Dispatch::kCollective,
               .is_foreign = true});
}

void enqueue(const char* name, const std::shared_ptr<Communicator>& communicator, aclrtStream stream,
             std::vector<Message> messages) {
  stream_for(*communicator, stream);
  for (const Message& message : messages) {
    if (message.peer >= communicator->size())
      throw Failure(HCCL_E_PARA, "communicator " + communicator->name() + " of " + std::to_string(communicator->size()) +
                                     " ranks has no rank " + std::to_string(message.peer));
    communicator->offset_of(message.buffer, message.count * bytes_of(message.type));
  }
  for (Message& message : messages)
    message.number = message.sends ? communicator->reserve_send(message.peer) : communicator->reserve_receive(message.peer);
  if (group_depth == 0) return push(name, communicator, stream, std::move(messages));
  for (Held& group : held)
    if (group.communicator == communicator && group.stream == stream) {
      group.messages.insert(group.messages.end(), messages.begin(), messages.end());
      return;
    }
  held.push_back({communicator, stream, std::move(messages)});
}

void begin_group() { ++group_depth; }

void end_group() {
  if (group_depth == 0) throw Failure(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart in this thread");
  if (--group_depth > 0) return;
  for (Held& group : std::exchange(held, {}))
    push("HcclGroupEnd", group.communicator, group.stream, std::move(group.messages));
}

}  // namespace sim::hccl
