// Time, as everything here measures it.
#pragma once

#include <chrono>
#include <optional>

namespace sim {

using Clock = std::chrono::steady_clock;
using Timeout = std::optional<std::chrono::milliseconds>;  // without a value: wait for ever

}  // namespace sim
