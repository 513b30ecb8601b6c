#include "chaos.h"

#include <chrono>
#include <thread>

#include "settings.h"
#include "stream.h"

namespace sim {
namespace {

using namespace std::chrono_literals;
constexpr std::uint64_t kOneIn = 16;  // tasks that are held
constexpr auto kQuiet = 600us;        // the others have stopped when none has finished a task for so long
constexpr auto kLongest = 20ms;       // a stream is never held longer

std::uint64_t others_done(Stream& held) {
  std::uint64_t sum = 0;
  held.device().each_stream([&](Stream& stream) {
    if (&stream != &held) sum += stream.done();
  });
  return sum;
}

}  // namespace

Chaos::Chaos(int stream)
    : state_((settings().chaos.value_or(0) + 1) * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(stream) * 0xD1B54A32D192ED03ull),
      active_(settings().chaos.has_value()) {}

// One step of SplitMix64 (Steele, Lea, Flood 2014).
bool Chaos::chosen() {
  std::uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) % kOneIn == 0;
}

void Chaos::maybe_hold(Stream& stream) {
  if (!active_ || !chosen()) return;
  const auto begun = Clock::now();
  auto last_change = begun;
  std::uint64_t seen = others_done(stream);
  while (Clock::now() - begun < kLongest && Clock::now() - last_change < kQuiet) {
    std::this_thread::sleep_for(100us);
    if (const std::uint64_t now = others_done(stream); now != seen) {
      seen = now;
      last_change = Clock::now();
    }
  }
}

}  // namespace sim
