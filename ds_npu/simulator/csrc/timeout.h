// The clock and the timeouts of the simulator.
#pragma once

#include <chrono>
#include <optional>

namespace sim {

using Clock = std::chrono::steady_clock;
using Timeout = std::optional<std::chrono::milliseconds>;  // without a value: wait for ever

}  // namespace sim
