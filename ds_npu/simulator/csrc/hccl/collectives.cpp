#include "hccl/collectives.h"

#include <algorithm>
#include <cstring>

#include "hccl/reduction.h"
#include "stream.h"

namespace sim::hccl {
namespace {

constexpr std::uint64_t kSmallBytes = 32 << 10;  // below this, dividing the arithmetic over ranks costs more than it saves

// One call of this rank: published to the others, compared with theirs, and over when all ranks have announced its end.
class Exchange {
 public:
  Exchange(Communicator& communicator, std::uint64_t sequence, const Call& call, const Parts* parts = nullptr)
      : communicator_(communicator),
        sequence_(sequence),
        call_(call),
        what_("call " + std::to_string(sequence) + ", " + describe(call)) {
    stream_.begin_at(communicator_.begin(sequence_, what_));
    call_.ready = stream_.begun();
    call_.duration = stream_.duration();
    publish(parts);
    communicator_.await([&](auto peer) { return slot(peer).posted.load() >= sequence_; }, what_);
    for (std::uint32_t peer = 0; peer < communicator_.size(); ++peer) {
      compare(peer);
      // In virtual time a collective begins when its last rank is ready and takes as long as it takes the slowest.
      stream_.begin_at(slot(peer).call.ready);
      stream_.take(slot(peer).call.duration);
      known_ = known_ && slot(peer).call.known;
    }
    if (parts != nullptr)
      for (std::uint32_t peer = 0; peer < communicator_.size(); ++peer) {
        if (communicator_.is_absent(peer)) known_ = known_ && sends_what_is_expected(peer);
        else compare_parts(peer);
      }
  }

  // Names what this rank receives. In a dry run that does not know what some rank sends the call ends here: false.
  bool gives(void* receive, std::uint64_t bytes, HcclDataType type) {
    received_ = receive;
    received_bytes_ = bytes;
    received_type_ = type;
    if (!known_) finish();
    return known_;
  }

  const char* sent_by(std::uint32_t peer) const { return at(peer, slot(peer).call.send); }
  const char* received_by(std::uint32_t peer) const { return at(peer, slot(peer).call.receive); }

  std::vector<const char*> sent_by_all(std::uint64_t bytes_on = 0) const {
    std::vector<const char*> result;
    for (std::uint32_t peer = 0; peer < communicator_.size(); ++peer) result.push_back(sent_by(peer) + bytes_on);
    return result;
  }

  // All shares of the reduction are in their rank's receive buffer, and the send buffers are read.
  void await_reduced() {
    communicator_.own().reduced.store(sequence_);
    communicator_.segment().announce();
    communicator_.await([&](auto peer) { return slot(peer).reduced.load() >= sequence_; }, what_);
  }

  // This rank has read all it needs; on return nobody reads its buffers.
  void finish() {
    communicator_.own().done.store(sequence_);
    communicator_.segment().announce();
    communicator_.await([&](auto peer) { return slot(peer).done.load() >= sequence_; }, what_);
    communicator_.end(sequence_, stream_.end());
    arrived(received_, received_bytes_, received_type_, known_);
  }

 private:
  Slot& slot(std::uint32_t peer) const { return communicator_.slot(peer); }
  const char* at(std::uint32_t peer, std::uint64_t offset) const {
    return offset == kNowhere ? nullptr : communicator_.at(peer, offset);
  }

  void publish(const Parts* parts) {
    Segment& segment = communicator_.segment();
    if (parts != nullptr) {
      std::ranges::copy(parts->send_counts, segment.send_counts(communicator_.rank()));
      std::ranges::copy(parts->send_displacements, segment.send_displacements(communicator_.rank()));
      std::ranges::copy(parts->receive_counts, segment.receive_counts(communicator_.rank()));
    }
    communicator_.own().call = call_;
    communicator_.own().posted.store(sequence_);
    segment.announce();
  }

  void compare(std::uint32_t peer) {
    if (agree(call_, slot(peer).call)) return;
    communicator_.fail(HCCL_E_PARA, "call " + std::to_string(sequence_) + " is " + describe(call_) + ", but rank " +
                                        std::to_string(peer) + " calls " + describe(slot(peer).call));
  }

  void compare_parts(std::uint32_t peer) {
    const Segment& segment = communicator_.segment();
    const auto rank = communicator_.rank();
    compare_part(rank, segment.send_counts(rank)[peer], peer, segment.receive_counts(peer)[rank]);
    compare_part(peer, segment.send_counts(peer)[rank], rank, segment.receive_counts(rank)[peer]);
  }

  // Of a rank that has no process: the rank that acts for it may divide what it sends in another way.
  bool sends_what_is_expected(std::uint32_t peer) const {
    const auto rank = communicator_.rank();
    return communicator_.send_counts(peer)[rank] == communicator_.segment().receive_counts(rank)[peer];
  }

  void compare_part(std::uint32_t source, std::uint64_t sent, std::uint32_t target, std::uint64_t expected) {
    if (sent == expected) return;
    communicator_.fail(HCCL_E_PARA, "in " + what_ + ", rank " + std::to_string(source) + " sends " + std::to_string(sent) +
                                        " elements to rank " + std::to_string(target) + ", which expects " +
                                        std::to_string(expected));
  }

  Communicator& communicator_;
  const std::uint64_t sequence_;
  Call call_;
  const std::string what_;
  Stream& stream_ = *Stream::of_this_thread();
  bool known_ = true;
  void* received_ = nullptr;
  std::uint64_t received_bytes_ = 0;
  HcclDataType received_type_ = HCCL_DATA_TYPE_RESERVED;
};

// Where a rank writes its result while others may still read its send buffer: the receive buffer, or, where the two overlap,
// memory of its own.
class Arriving {
 public:
  Arriving(void* receive, std::uint64_t receive_bytes, const void* send, std::uint64_t send_bytes)
      : receive_(static_cast<char*>(receive)) {
    const auto* first = static_cast<const char*>(send);
    if (receive_ < first + send_bytes && first < receive_ + receive_bytes)
      aside_.assign(receive_, receive_ + receive_bytes);
  }
  char* data() { return aside_.empty() ? receive_ : aside_.data(); }
  // When nobody reads the send buffer any more.
  void settle() { std::ranges::copy(aside_, receive_); }

 private:
  char* receive_;
  std::vector<char> aside_;
};

void copy(char* to, const char* from, std::uint64_t bytes) {
  if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

// The ranks, beginning with the next one, so that at any time each rank is read by a different one.
std::vector<std::uint32_t> peers_in_turn(const Communicator& communicator) {
  std::vector<std::uint32_t> result;
  for (std::uint32_t i = 1; i <= communicator.size(); ++i) result.push_back((communicator.rank() + i) % communicator.size());
  return result;
}

// The elements of which `rank` makes the sums.
struct Share {
  std::uint64_t first;
  std::uint64_t count;
};

Share share_of(std::uint32_t rank, std::uint32_t ranks, std::uint64_t count) {
  constexpr std::uint64_t kWhole = 64;  // elements: no two ranks write to the same line of a cache
  const std::uint64_t each = ((count + ranks - 1) / ranks + kWhole - 1) / kWhole * kWhole;
  const std::uint64_t first = std::min(rank * each, count);
  return {first, std::min(each, count - first)};
}

Call call_of(const Communicator& communicator, Operation operation, HcclDataType type, std::uint64_t count, const void* send,
             std::uint64_t send_count, const void* receive, std::uint64_t receive_count) {
  Call call;
  call.operation = operation;
  call.type = type;
  call.count = count;
  call.send = communicator.offset_of(send, send_count * bytes_of(type));
  call.receive = communicator.offset_of(receive, receive_count * bytes_of(type));
  call.known = Communicator::knows(send, send_count * bytes_of(type));
  return call;
}

std::uint64_t extent(const std::vector<std::uint64_t>& counts, const std::vector<std::uint64_t>& displacements) {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < counts.size(); ++i)
    if (counts[i] != 0) end = std::max(end, displacements[i] + counts[i]);
  return end;
}

}  // namespace

std::uint64_t Parts::send_extent() const { return extent(send_counts, send_displacements); }
std::uint64_t Parts::receive_extent() const { return extent(receive_counts, receive_displacements); }

void all_reduce(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t count,
                HcclDataType type, HcclReduceOp reduction) {
  Call call = call_of(communicator, Operation::all_reduce, type, count, send, count, receive, count);
  call.reduction = reduction;
  Exchange exchange(communicator, sequence, call);
  const std::uint64_t size = bytes_of(type);
  auto* result = static_cast<char*>(receive);
  if (!exchange.gives(receive, count * size, type)) return;
  // A rank that has no process computes no share.
  if (count * size <= kSmallBytes || communicator.has_absent()) {
    std::vector<char> sums(count * size);
    reduce(reduction, type, exchange.sent_by_all(), count, sums.data());
    exchange.finish();
    std::ranges::copy(sums, result);
    return;
  }
  const Share own = share_of(communicator.rank(), communicator.size(), count);
  reduce(reduction, type, exchange.sent_by_all(own.first * size), own.count, result + own.first * size);
  exchange.await_reduced();
  for (const auto peer : peers_in_turn(communicator)) {
    const Share share = share_of(peer, communicator.size(), count);
    copy(result + share.first * size, exchange.received_by(peer) + share.first * size, share.count * size);
  }
  exchange.finish();
}

void all_gather(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t send_count,
                HcclDataType type) {
  const std::uint64_t total = send_count * communicator.size();
  Exchange exchange(communicator, sequence,
                    call_of(communicator, Operation::all_gather, type, send_count, send, send_count, receive, total));
  const std::uint64_t bytes = send_count * bytes_of(type);
  if (!exchange.gives(receive, bytes * communicator.size(), type)) return;
  // In place this rank's part lies where it belongs, and nothing is written to it.
  const bool in_place = send == static_cast<char*>(receive) + communicator.rank() * bytes;
  Arriving arriving(receive, bytes * communicator.size(), send, in_place ? 0 : bytes);
  for (const auto peer : peers_in_turn(communicator)) copy(arriving.data() + peer * bytes, exchange.sent_by(peer), bytes);
  exchange.finish();
  arriving.settle();
}

void reduce_scatter(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive,
                    std::uint64_t receive_count, HcclDataType type, HcclReduceOp reduction) {
  const std::uint64_t total = receive_count * communicator.size();
  Call call = call_of(communicator, Operation::reduce_scatter, type, receive_count, send, total, receive, receive_count);
  call.reduction = reduction;
  Exchange exchange(communicator, sequence, call);
  const std::uint64_t bytes = receive_count * bytes_of(type);
  const std::uint64_t own = communicator.rank() * bytes;
  if (!exchange.gives(receive, bytes, type)) return;
  // In place the result lies on this rank's own part, which nobody else reads.
  const bool in_place = receive == static_cast<const char*>(send) + own;
  Arriving arriving(receive, bytes, send, in_place ? 0 : bytes * communicator.size());
  reduce(reduction, type, exchange.sent_by_all(own), receive_count, arriving.data());
  exchange.finish();
  arriving.settle();
}

void broadcast(Communicator& communicator, std::uint64_t sequence, void* buffer, std::uint64_t count, HcclDataType type,
               std::uint32_t root) {
  Call call = call_of(communicator, Operation::broadcast, type, count, buffer, count, nullptr, 0);
  call.root = root;
  call.known = call.known || communicator.rank() != root;
  Exchange exchange(communicator, sequence, call);
  if (!exchange.gives(buffer, count * bytes_of(type), type)) return;
  if (communicator.rank() != root) copy(static_cast<char*>(buffer), exchange.sent_by(root), count * bytes_of(type));
  exchange.finish();
}

void reduce(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t count,
            HcclDataType type, HcclReduceOp reduction, std::uint32_t root) {
  Call call = call_of(communicator, Operation::reduce, type, count, send, count, receive,
                      communicator.rank() == root ? count : 0);
  call.reduction = reduction;
  call.root = root;
  Exchange exchange(communicator, sequence, call);
  if (!exchange.gives(receive, communicator.rank() == root ? count * bytes_of(type) : 0, type)) return;
  if (communicator.rank() == root) reduce(reduction, type, exchange.sent_by_all(), count, static_cast<char*>(receive));
  exchange.finish();
}

void scatter(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t receive_count,
             HcclDataType type, std::uint32_t root) {
  const std::uint64_t total = communicator.rank() == root ? receive_count * communicator.size() : 0;
  Call call = call_of(communicator, Operation::scatter, type, receive_count, send, total, receive, receive_count);
  call.root = root;
  Exchange exchange(communicator, sequence, call);
  const std::uint64_t bytes = receive_count * bytes_of(type);
  if (!exchange.gives(receive, bytes, type)) return;
  Arriving arriving(receive, bytes, send, total * bytes_of(type));
  copy(arriving.data(), exchange.sent_by(root) + communicator.rank() * bytes, bytes);
  exchange.finish();
  arriving.settle();
}

void all_to_all(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, std::uint64_t count_each,
                HcclDataType type) {
  const std::uint64_t total = count_each * communicator.size();
  Exchange exchange(communicator, sequence,
                    call_of(communicator, Operation::all_to_all, type, count_each, send, total, receive, total));
  const std::uint64_t bytes = count_each * bytes_of(type);
  if (!exchange.gives(receive, bytes * communicator.size(), type)) return;
  Arriving arriving(receive, bytes * communicator.size(), send, bytes * communicator.size());
  for (const auto peer : peers_in_turn(communicator))
    copy(arriving.data() + peer * bytes, exchange.sent_by(peer) + communicator.rank() * bytes, bytes);
  exchange.finish();
  arriving.settle();
}

void barrier(Communicator& communicator, std::uint64_t sequence) { Exchange(communicator, sequence, Call{}).finish(); }

void exchange(Communicator& communicator, std::uint64_t sequence, Operation operation, const void* send, void* receive,
              HcclDataType type, const Parts& parts) {
  Exchange exchange(communicator, sequence,
                    call_of(communicator, operation, type, 0, send, parts.send_extent(), receive, parts.receive_extent()),
                    &parts);
  const std::uint64_t size = bytes_of(type);
  if (!exchange.gives(receive, parts.receive_extent() * size, type)) return;
  Arriving arriving(receive, parts.receive_extent() * size, send, parts.send_extent() * size);
  for (const auto peer : peers_in_turn(communicator)) {
    const std::uint64_t from = communicator.send_displacements(peer)[communicator.rank()];
    copy(arriving.data() + parts.receive_displacements[peer] * size, exchange.sent_by(peer) + from * size,
         parts.receive_counts[peer] * size);
  }
  exchange.finish();
  arriving.settle();
}

void reduce_scatter_v(Communicator& communicator, std::uint64_t sequence, const void* send, void* receive, HcclDataType type,
                      HcclReduceOp reduction, const Parts& parts) {
  const std::uint64_t count = parts.receive_counts[communicator.rank()];
  Call call = call_of(communicator, Operation::reduce_scatter_v, type, 0, send, parts.send_extent(), receive, count);
  call.reduction = reduction;
  Exchange exchange(communicator, sequence, call, &parts);
  const std::uint64_t size = bytes_of(type);
  if (!exchange.gives(receive, count * size, type)) return;
  std::vector<const char*> sources;
  for (std::uint32_t peer = 0; peer < communicator.size(); ++peer)
    sources.push_back(exchange.sent_by(peer) +
                      communicator.send_displacements(peer)[communicator.rank()] * size);
  Arriving arriving(receive, count * size, send, parts.send_extent() * size);
  reduce(reduction, type, sources, count, arriving.data());
  exchange.finish();
  arriving.settle();
}

}  // namespace sim::hccl
