#include "machine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "acl/acl_base.h"
#include "failure.h"
#include "settings.h"

namespace sim {
namespace {

constexpr int64_t kTile[] = {128, 256};

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

double at(const Curve& curve, double size) {
  if (size <= curve.front().first) return curve.front().second;
  for (std::size_t i = 1; i < curve.size(); ++i) {
    const auto [low, before] = curve[i - 1];
    const auto [high, after] = curve[i];
    if (size <= high) return before + (after - before) * std::log(size / low) / std::log(high / low);
  }
  return curve.back().second;
}

std::string field(const std::string& text, const std::string& name) {
  std::istringstream fields(text);
  for (std::string one; fields >> one;)
    if (one.starts_with(name + "=")) return one.substr(name.size() + 1);
  throw Failure(ACL_ERROR_INVALID_PARAM, "DS_NPU_SIM_MACHINE has no " + name + ": simulated NPUs are started by ds_npu sim");
}

double number(const std::string& text, const std::string& name) { return std::strtod(field(text, name).c_str(), nullptr); }

Curve curve(const std::string& text, const std::string& name) {
  Curve result;
  std::istringstream entries(field(text, name));
  for (std::string entry; std::getline(entries, entry, ',');) {
    char* rate = nullptr;
    const double size = std::strtod(entry.c_str(), &rate);
    result.emplace_back(size, std::strtod(rate + 1, nullptr));
  }
  return result;
}

std::map<std::string, std::vector<Phase>> collectives(const std::string& text) {
  std::map<std::string, std::vector<Phase>> result;
  for (const char* kind :
       {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "scatter", "barrier"}) {
    std::vector<Phase>& phases = result[kind];
    std::istringstream entries(field(text, kind));
    for (std::string entry; std::getline(entries, entry, ',');) {
      const auto level = entry.starts_with("near") ? Phase::kNear : entry.starts_with("far") ? Phase::kFar : Phase::kBoth;
      phases.push_back({.level = level, .share = entry.ends_with(":n/g")});
    }
  }
  return result;
}

}  // namespace

double Machine::operator_seconds(double arithmetic, double moved) const {
  return kernel + std::max(arithmetic, memory_seconds(moved));
}

double Machine::memory_seconds(double moved) const { return moved / at(memory, moved); }

double Machine::product_seconds(int64_t rows, int64_t columns, int64_t inner, int64_t itemsize, int64_t count) const {
  const auto [high, wide] = kTile;
  const int64_t tiles =
      std::min(ceil_div(rows, high) * ceil_div(columns, wide), ceil_div(rows, wide) * ceil_div(columns, high));
  const double rounds = std::ceil(static_cast<double>(count * tiles) / cores);
  return rounds * cores * 2 * static_cast<double>(high * wide * inner) / (itemsize <= 2 ? matmul : matmul_float32);
}

double Machine::attention_seconds(double flop, double keys) const { return flop / at(attention, keys); }

double Machine::sending_seconds(double near, int64_t peers, double far) const {
  const double within = peers == 0 ? 0 : near / std::min(port, link * static_cast<double>(peers));
  return std::max(within, far / network);
}

double Machine::collective_seconds(const std::string& kind, double bytes, int64_t near, int64_t nodes) const {
  const auto g = static_cast<double>(near), all = static_cast<double>(near * nodes);
  const double hops = std::ceil(std::log2(static_cast<double>(nodes)));
  double seconds = message;
  for (const auto& [level, share] : collectives.at(kind)) {
    const double part = share ? bytes / g : bytes;
    const double far = part * (all - g) / all;
    if (level == Phase::kNear) seconds += sending_seconds(part * (g - 1) / g, near - 1, 0);
    if (level == Phase::kFar) seconds += sending_seconds(0, 0, far) + hops * hop;
    if (level == Phase::kBoth)
      seconds += sending_seconds(part * (g - 1) / all, near - 1, far) + static_cast<double>(nodes - 1) * hop;
  }
  return seconds;
}

Machine machine_from(const std::string& text) {
  return {.cores = number(text, "cores"),
          .matmul = number(text, "matmul"),
          .matmul_float32 = number(text, "matmul_float32"),
          .memory = curve(text, "memory"),
          .attention = curve(text, "attention"),
          .kernel = number(text, "kernel"),
          .sorting_passes = number(text, "sorting_passes"),
          .message = number(text, "message"),
          .port = number(text, "port"),
          .link = number(text, "link"),
          .network = number(text, "network"),
          .hop = number(text, "hop"),
          .node = static_cast<int64_t>(number(text, "node")),
          .collectives = collectives(text),
          .host = number(text, "host"),
          .dispatch = number(text, "dispatch"),
          .dispatch_fused = number(text, "dispatch_fused"),
          .dispatch_autograd = number(text, "dispatch_autograd"),
          .dispatch_collective = number(text, "dispatch_collective"),
          .dispatch_event = number(text, "dispatch_event"),
          .launch = number(text, "launch"),
          .stream_tasks = static_cast<std::size_t>(number(text, "stream_tasks")),
          .queue_tasks = static_cast<std::size_t>(number(text, "queue_tasks"))};
}

const Machine& machine() {
  static const Machine once = machine_from(settings().machine);
  return once;
}

}  // namespace sim
