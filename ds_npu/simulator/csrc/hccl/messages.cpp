#include "hccl/messages.h"

#include <algorithm>
#include <cstring>

#include "hccl/reduction.h"
#include "stream.h"

namespace sim::hccl {

std::string describe(const Message& message) {
  return (message.sends ? "send" : "receive") + std::string(" number ") + std::to_string(message.number) +
         (message.sends ? " to" : " from") + " rank " + std::to_string(message.peer) + ", " + std::to_string(message.count) +
         " x " + name_of(message.type);
}

namespace {

class Transfer {
 public:
  Transfer(Communicator& communicator, std::vector<Message> messages)
      : communicator_(communicator), pending_(std::move(messages)) {
    std::erase_if(pending_, [&](const Message& message) { return is_over(message); });
    announced_.resize(pending_.size());
  }

  void run() {
    while (!pending_.empty()) {
      if (advance_all()) continue;
      const Message& first = pending_.front();
      // Messages can complete in any order: this returns as soon as one of them can go on.
      communicator_.await([&](std::uint32_t peer) { return peer != first.peer || some_possible(); }, describe(first));
    }
  }

 private:
  Channel& channel(const Message& message) const {
    const auto rank = communicator_.rank();
    return message.sends ? communicator_.segment().channel(rank, message.peer)
                         : communicator_.segment().channel(message.peer, rank);
  }

  // A rank that has no process takes everything at once, and sends what nobody knows.
  bool is_over(const Message& message) const {
    if (!communicator_.is_absent(message.peer)) return false;
    if (!message.sends) arrived(message.buffer, message.count * bytes_of(message.type), message.type, false);
    return true;
  }

  bool possible(std::size_t i) const {
    const Message& message = pending_[i];
    const Channel& way = channel(message);
    if (!message.sends) return way.received.load() + 1 == message.number && way.sent.load() >= message.number;
    return announced_[i] ? way.received.load() >= message.number : way.settled.load() + 1 == message.number;
  }

  bool some_possible() const {
    for (std::size_t i = 0; i < pending_.size(); ++i)
      if (possible(i)) return true;
    return false;
  }

  bool advance_all() {
    bool advanced = false;
    for (std::size_t i = 0; i < pending_.size();) {
      if (!possible(i)) {
        ++i;
        continue;
      }
      advanced = true;
      if (advance(i)) {
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
        announced_.erase(announced_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    return advanced;
  }

  // One step of a message that can take one; true when it was the last.
  bool advance(std::size_t i) {
    const Message& message = pending_[i];
    if (!message.sends) {
      receive(message);
      return true;
    }
    Channel& way = channel(message);
    if (announced_[i]) {
      begin_at(way.receiver_ready);
      way.settled.store(message.number);
      communicator_.segment().announce();
      return true;
    }
    way.sender_ready = ready_;
    way.offset = communicator_.offset_of(message.buffer, message.count * bytes_of(message.type));
    way.count = message.count;
    way.type = message.type;
    way.known = Communicator::knows(message.buffer, message.count * bytes_of(message.type));
    way.sent.store(message.number);
    communicator_.segment().announce();
    announced_[i] = true;
    return false;
  }

  void receive(const Message& message) {
    Channel& way = channel(message);
    if (way.count != message.count || way.type != message.type)
      communicator_.fail(HCCL_E_PARA, describe(message) + ", but that rank sends " + std::to_string(way.count) + " x " +
                                          name_of(way.type));
    if (way.count != 0 && way.known)
      std::memmove(message.buffer, communicator_.at(message.peer, way.offset), way.count * bytes_of(way.type));
    arrived(message.buffer, way.count * bytes_of(way.type), way.type, way.known);
    begin_at(way.sender_ready);
    way.receiver_ready = ready_;
    way.received.store(message.number);
    communicator_.segment().announce();
  }

  // In virtual time messages of a task begin when both ranks of each are ready.
  static void begin_at(Nanoseconds earliest) { Stream::of_this_thread()->begin_at(earliest); }

  Communicator& communicator_;
  const Nanoseconds ready_ = Stream::of_this_thread()->begun();
  std::vector<Message> pending_;
  std::vector<bool> announced_;  // sends that the receiver can take
};

}  // namespace

void transfer(Communicator& communicator, std::vector<Message> messages) { Transfer(communicator, std::move(messages)).run(); }

}  // namespace sim::hccl
