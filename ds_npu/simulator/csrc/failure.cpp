// The last error of each thread.
#include "failure.h"

namespace sim {
namespace {
thread_local std::string recent_error;
}  // namespace

void set_recent_error(std::string message) { recent_error = std::move(message); }

std::string take_recent_error() { return std::exchange(recent_error, {}); }

}  // namespace sim
