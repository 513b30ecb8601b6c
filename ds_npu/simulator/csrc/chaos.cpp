#include "chaos.h"

#include "device.h"
#include "stream.h"

namespace sim {
namespace {

using namespace std::chrono_literals;
constexpr std::uint64_t kTurnsPerDraw = 8;  // priorities are drawn anew after so many turns, on average
constexpr auto kHostAsleep = 50ms;          // a host that queued nothing for so long is taken to wait

}  // namespace

Chaos::Chaos(Device& device, std::uint64_t seed)
    : device_(device), state_(seed * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(device.index())) {}

// SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t Chaos::random() {
  std::uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

bool Chaos::device_may_run() const { return waiting_hosts_ > 0 || Clock::now() - last_enqueued_.load() > kHostAsleep; }

// The stream of highest priority whose next task can run now; none if there is no such stream.
Stream* Chaos::highest_ready() {
  std::uint64_t highest = 0;
  Stream* found = nullptr;
  device_.each_stream([&](Stream& stream) {
    auto [priority, drawn] = priorities_.try_emplace(stream.id(), 0);
    if (drawn) priority->second = random() | 1;
    if (priority->second <= highest || !stream.next_is_ready()) return;
    highest = priority->second;
    found = &stream;
  });
  return found;
}

void Chaos::begin_turn(Stream& stream) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (!turn_taken_ && chosen_ == nullptr && device_may_run()) {
      chosen_ = highest_ready();
      if (chosen_ != nullptr && chosen_ != &stream) changed_.notify_all();
    }
    if (chosen_ == &stream) break;
    changed_.wait_for(lock, 1ms);
  }
  chosen_ = nullptr;
  turn_taken_ = true;
  if (random() % kTurnsPerDraw == 0) priorities_.clear();
}

void Chaos::end_turn() {
  const std::scoped_lock lock(mutex_);
  turn_taken_ = false;
  changed_.notify_all();
}

void Chaos::enqueued() { last_enqueued_ = Clock::now(); }

void Chaos::host_waits() {
  ++waiting_hosts_;
  changed_.notify_all();
}

void Chaos::host_goes_on() { --waiting_hosts_; }

WithoutTurn::WithoutTurn() : stream_(Stream::of_this_thread()) {
  if (stream_ != nullptr && stream_->device().chaos() != nullptr) stream_->device().chaos()->end_turn();
}

WithoutTurn::~WithoutTurn() {
  if (stream_ == nullptr || stream_->device().chaos() == nullptr) return;
  stream_->set_resuming(true);
  stream_->device().chaos()->begin_turn(*stream_);
  stream_->set_resuming(false);
}

}  // namespace sim
