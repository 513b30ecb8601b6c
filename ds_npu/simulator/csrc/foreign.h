// Which tasks that wait for others (other ranks, a callback of the host) come before a point of a stream.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

class Foreign {
 public:
  // One more is put on the stream.
  void add(int stream) {
    extend(static_cast<std::size_t>(stream) + 1);
    ++counts_[static_cast<std::size_t>(stream)];
  }
  void join(const Foreign& other) {
    extend(other.counts_.size());
    for (std::size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
  }
  // Whether all of them are among those of `other`.
  bool within(const Foreign& other) const {
    for (std::size_t i = 0; i < counts_.size(); ++i)
      if (counts_[i] > (i < other.counts_.size() ? other.counts_[i] : 0)) return false;
    return true;
  }

 private:
  void extend(std::size_t streams) { counts_.resize(std::max(counts_.size(), streams)); }

  std::vector<std::uint64_t> counts_;  // by the streams' ids: how many of each stream's come before
};

}  // namespace sim
