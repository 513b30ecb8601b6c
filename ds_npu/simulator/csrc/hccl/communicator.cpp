#include "hccl/communicator.h"

#include <algorithm>
#include <cstdio>
#include <thread>

#include "acl/acl_base.h"
#include "acl/error_codes/rt_error_codes.h"
#include "chaos.h"
#include "failure.h"
#include "known_bytes.h"
#include "settings.h"

namespace sim::hccl {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 50ms;       // how often a waiting rank checks that the others still live
constexpr auto kClosedWait = 10s;  // how long calls may still wait after the communicator was destroyed
constexpr int kSpins = 200;        // checks before the first sleep: a peer in the same call is soon there

// The code that the device stops with: torch_npu raises its message and does nothing else, such as a repair of memory.
constexpr int kCommunicationFailed = ACL_ERROR_RT_AICPU_EXCEPTION;

std::string name_from(const Address& address, const Options& options) {
  if (!options.name.empty()) return options.name;
  char text[40];
  std::snprintf(text, sizeof text, "hccl_%016llx", static_cast<unsigned long long>(address.nonce[0]));
  return text;
}

void check_rank(std::uint32_t rank, std::uint32_t ranks) {
  if (ranks == 0 || rank >= ranks)
    throw Failure(HCCL_E_PARA, "there is no rank " + std::to_string(rank) + " in a communicator of " + std::to_string(ranks));
}

std::string seconds_of(Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

Communicator::Communicator(const Address& address, std::uint32_t ranks, std::uint32_t rank, const Options& options,
                           const Absence& absence)
    : device_(current_device()),
      size_(ranks),
      rank_(rank),
      options_(options),
      absence_(absence),
      name_(name_from(address, options)),
      segment_(address, ranks),
      buffers_(BufferCharge::of(device_.memory(), options)),
      sends_(ranks),
      receives_(ranks) {}

Communicator::~Communicator() {
  RankState present = RankState::ready;
  own().state.compare_exchange_strong(present, RankState::left);
  segment_.announce();
}

std::shared_ptr<Communicator> Communicator::join(const Address& address, std::uint32_t ranks, std::uint32_t rank,
                                                 const Options& options, const Absence& absence) {
  check_rank(rank, ranks);
  std::shared_ptr<Communicator> made(new Communicator(address, ranks, rank, options, absence));
  made->enter();
  return made;
}

void Communicator::enter() {
  RankState nobody = RankState::absent;
  if (!own().state.compare_exchange_strong(nobody, RankState::claimed))
    throw Failure(HCCL_E_PARA, "communicator " + name_ + ": rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                                   " has joined already, as process " + std::to_string(own().process.pid));
  own().process = ProcessId::own();
  own().device = device_.index();
  own().npu = settings().devices[static_cast<std::size_t>(device_.index())];
  own().memory_file = device_.memory().file();
  own().memory_span = device_.memory().span();
  own().state.store(RankState::registered);
  segment_.announce();
  await_joined(RankState::registered);
  check_devices();
  for (std::uint32_t peer = 0; peer < size_; ++peer) peers_.push_back(std::make_unique<Peer>(slot(peer)));
  own().state.store(RankState::ready);
  segment_.announce();
  await_joined(RankState::ready);
}

int Communicator::npu_of(std::uint32_t rank) const { return has_absent() ? absence_.npus[rank] : slot(rank).npu; }

// Two ranks on one NPU are refused, as by HCCL. Each rank sees all slots, so all ranks fail.
void Communicator::check_devices() const {
  for (std::uint32_t peer = 0; peer < size_; ++peer)
    for (std::uint32_t other = 0; other < peer; ++other)
      if (npu_of(peer) == npu_of(other))
        throw Failure(HCCL_E_PARA, "communicator " + name_ + ": " + named(other) + " and " + named(peer) +
                                       " are on one NPU, and each rank needs one of its own. What to do: call "
                                       "torch.npu.set_device(int(os.environ[\"LOCAL_RANK\"])) before anything uses an NPU");
}

// As "rank 1 (pid 4711, NPU 0)".
std::string Communicator::named(std::uint32_t peer) const {
  return "rank " + std::to_string(peer) + " (pid " + std::to_string(slot(peer).process.pid) + ", NPU " +
         std::to_string(npu_of(peer)) + ")";
}

void Communicator::await_joined(RankState at_least) {
  const auto begun = Clock::now();
  const auto here = [&](std::uint32_t peer) { return slot(peer).state.load() >= at_least; };
  while (true) {
    const auto generation = segment_.generation();
    const std::string missing_ranks = missing(here);
    if (missing_ranks.empty()) return;
    const std::string prefix = "communicator " + name_ + ", rank " + std::to_string(rank_) + ": ";
    if (const std::string failure = segment_.failure(); !failure.empty()) throw Failure(HCCL_E_PARA, prefix + failure);
    if (Clock::now() - begun > connect_timeout()) {
      const std::string why = "of its " + std::to_string(size_) + " ranks " + missing_ranks + " did not join within " +
                              seconds_of(connect_timeout()) + " (HCCL_CONNECT_TIMEOUT)";
      segment_.fail_all(why);
      throw Failure(HCCL_E_TIMEOUT, prefix + why);
    }
    segment_.sleep(generation, kLook);
  }
}

std::shared_ptr<Communicator> Communicator::split(const std::vector<std::uint32_t>& members, std::uint32_t rank,
                                                  std::uint64_t id, const Options& options) {
  check_rank(rank, static_cast<std::uint32_t>(members.size()));
  if (has_absent())
    throw Failure(HCCL_E_NOT_SUPPORT, "communicator " + name_ + ": it is not divided where ranks have no process");
  for (const auto member : members) check_rank(member, size_);
  if (members[rank] != rank_)
    throw Failure(HCCL_E_PARA, "communicator " + name_ + ": rank " + std::to_string(rank_) + " is not the one listed as rank " +
                                   std::to_string(rank) + " of the new communicator");
  const std::scoped_lock one_at_a_time(splitting_);
  Slot& first = segment_.slot(members[0]);
  if (rank == 0) {
    first.offered = Segment::create();
    first.offered_id = id;
    first.offering.store(true);
    segment_.announce();
    // Everybody has joined, or nobody will: the offer ends before the others can make their next one of this number.
    const auto withdraw = [&] {
      first.offering.store(false);
      Segment::release(first.offered);
    };
    try {
      auto made = join(first.offered, static_cast<std::uint32_t>(members.size()), rank, options);
      withdraw();
      return made;
    } catch (...) {
      withdraw();
      throw;
    }
  }
  const auto begun = Clock::now();
  while (true) {
    const auto generation = segment_.generation();
    if (first.offering.load() && first.offered_id == id)
      return join(first.offered, static_cast<std::uint32_t>(members.size()), rank, options);
    if (Clock::now() - begun > connect_timeout())
      throw Failure(HCCL_E_TIMEOUT, "communicator " + name_ + ", rank " + std::to_string(rank_) + ": rank " +
                                        std::to_string(members[0]) + " did not offer the communicator " + std::to_string(id) +
                                        " of its ranks within " + seconds_of(connect_timeout()) + " (HCCL_CONNECT_TIMEOUT)");
    segment_.sleep(generation, kLook);
  }
}

std::uint64_t Communicator::offset_of(const void* buffer, std::uint64_t bytes) const {
  if (bytes == 0) return kNowhere;
  Memory& memory = device_.memory();
  const auto* first = static_cast<const char*>(buffer);
  if (memory.contains(first) && memory.contains(first + bytes - 1)) return static_cast<std::uint64_t>(first - memory.base());
  const Device* other = device_of(buffer);
  throw Failure(HCCL_E_PARA, "communicator " + name_ + ", rank " + std::to_string(rank_) + ": a buffer of " +
                                 std::to_string(bytes) + " bytes lies in " +
                                 (other == nullptr ? "host memory" : "the memory of NPU " + std::to_string(other->index())) +
                                 "; it has to be in the memory of NPU " + std::to_string(device_.index()));
}

bool Communicator::knows(const void* buffer, std::uint64_t bytes) {
  return !dry_run() || bytes == 0 || known_bytes().knows(buffer, bytes);
}

void Communicator::close() { closed_at_.store(Clock::now().time_since_epoch().count()); }

HcclResult Communicator::async_error() {
  // Tell the peers also of a device that stopped outside of communication.
  if (device_.failed()) {
    try {
      device_.throw_if_failed();
    } catch (const Failure& failure) {
      tell_failure(failure.what());
    }
  }
  const std::scoped_lock lock(mutex_);
  if (error_ != HCCL_SUCCESS) set_recent_error(error_message_);
  return error_;
}

void Communicator::tell_failure(const std::string& why) {
  if (own().state.load() != RankState::ready) return;
  why.copy(own().failure, kTextBytes - 1);
  own().state.store(RankState::failed);
  segment_.announce();
}

std::string Communicator::waited_for() const {
  if (own().state.load() != RankState::ready || size_ == 1) return "";
  bool all_exited = true;
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    if (absence_.acting(peer) == rank_) continue;
    const Slot& told = slot(peer);
    const auto posted = told.posted.load();
    const bool exited = peers_[peer]->exited();
    if (!exited && posted > own().posted.load())
      return named(peer) + " waits in call " + std::to_string(posted) + ", " + describe(told.call) + ", of communicator " +
             name_ + " for " + named(rank_);
    all_exited = all_exited && exited;
  }
  return all_exited ? "all other ranks of communicator " + name_ + " have exited" : "";
}

void Communicator::give_up(const std::string& why) { tell_failure(why); }

void Communicator::fail(HcclResult kind, const std::string& why) {
  const std::string message = "communicator " + name_ + ", rank " + std::to_string(rank_) + ": " + why;
  {
    const std::scoped_lock lock(mutex_);
    error_ = kind;
    error_message_ = message;
    tell_failure(why);
  }
  throw Failure(kCommunicationFailed, message);
}

Nanoseconds Communicator::begin(std::uint64_t sequence, const std::string& what) {
  {
    const std::scoped_lock lock(mutex_);
    if (performed_ + 1 == sequence) return performed_at_;
  }
  const WithoutTurn others_go_on;
  const auto begun = Clock::now();
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, kLook, [&] { return performed_ + 1 == sequence; })) {
    device_.throw_if_failed();
    const auto waits_for = performed_ + 1;
    lock.unlock();
    give_up_if_late("call " + std::to_string(waits_for) + " of this rank is not over", what, begun);
    lock.lock();
  }
  return performed_at_;
}

void Communicator::end(std::uint64_t sequence, Nanoseconds time) {
  {
    const std::scoped_lock lock(mutex_);
    performed_ = sequence;
    performed_at_ = time;
  }
  ended_.notify_all();
}

void Communicator::await(const Reached& reached, const std::string& what) {
  std::uint32_t peer = 0;
  for (int spin = 0; spin < kSpins; ++spin) {
    while (peer < size_ && reached(peer)) ++peer;
    if (peer == size_) return;
  }
  const WithoutTurn others_go_on;
  const auto begun = Clock::now();
  auto looked = begun;
  while (true) {
    const auto generation = segment_.generation();
    while (peer < size_ && reached(peer)) ++peer;
    if (peer == size_) return;
    segment_.sleep(generation, kLook);
    if (Clock::now() - looked < kLook) continue;
    looked = Clock::now();
    give_up_if_hopeless(reached, what, begun);
  }
}

void Communicator::give_up_if_hopeless(const Reached& reached, const std::string& what, Clock::time_point begun) {
  if (device_.failed()) {
    try {
      device_.throw_if_failed();
    } catch (const Failure& failure) {
      tell_failure(failure.what());
      throw;
    }
  }
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    // Test `reached` after `exited`: a peer may reach it and exit in between.
    const auto state = slot(peer).state.load();
    const bool exited = peers_[peer]->exited();
    if (peer == rank_ || reached(peer)) continue;
    const std::string who = "rank " + std::to_string(peer) + " (pid " + std::to_string(peers_[peer]->id().pid) + ")";
    const std::string waits = "; this rank waits for it in " + what;
    if (state == RankState::failed) fail(HCCL_E_REMOTE, who + " has stopped: " + slot(peer).failure + waits);
    if (exited) fail(HCCL_E_REMOTE, who + " has exited" + waits);
    if (state == RankState::left) fail(HCCL_E_REMOTE, who + " has destroyed the communicator" + waits);
  }
  const std::string missing_ranks = missing(reached);
  if (!missing_ranks.empty()) give_up_if_late(missing_ranks + " did not come", what, begun);
}

void Communicator::give_up_if_late(const std::string& missing, const std::string& what, Clock::time_point begun) {
  const auto now = Clock::now();
  if (options_.execution_timeout && now - begun > *options_.execution_timeout)
    fail(HCCL_E_TIMEOUT, missing + " within " + seconds_of(*options_.execution_timeout) +
                             " (HCCL_EXEC_TIMEOUT); this rank waits in " + what);
  const auto closed = closed_at_.load();
  if (closed != 0 && now.time_since_epoch().count() - closed > Clock::duration(kClosedWait).count())
    fail(HCCL_E_TIMEOUT, missing + " within " + seconds_of(kClosedWait) +
                             " after this rank destroyed the communicator; it waits in " + what);
}

// As "ranks 1 (its last call: 6, all_reduce(sum, 4 x fp32)) and 3 (its last call: none)".
std::string Communicator::missing(const std::function<bool(std::uint32_t)>& present) const {
  std::string text;
  for (std::uint32_t peer = 0; peer < size_; ++peer) {
    if (present(peer)) continue;
    const Slot& told = slot(peer);
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(peer);
    if (told.state.load() < RankState::ready) continue;
    const auto posted = told.posted.load();
    text += posted == 0 ? " (which has made no call)"
                        : " (whose last call is " + std::to_string(posted) + ", " + describe(told.call) + ")";
  }
  return text;
}

}  // namespace sim::hccl
