// Virtual time: that of the simulated machine, not of the machine that simulates it.
#pragma once

#include <cmath>
#include <cstdint>

namespace sim {

using Nanoseconds = std::int64_t;  // since the process began; all processes begin together

inline Nanoseconds nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

}  // namespace sim
