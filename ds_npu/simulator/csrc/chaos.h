// `ds_npu sim --chaos SEED`: holds single tasks back, chosen by the seed, until the other streams have had their say.
#pragma once

#include <cstdint>

namespace sim {

class Stream;

// The delays of one stream. Which of its tasks are held depends on the seed, the stream's number and the task's number
// alone, so a seed holds the same tasks in every run of a program that does the same.
class Chaos {
 public:
  explicit Chaos(int stream);

  // Before a task: returns at once, or after no other stream of the device has finished a task for a while.
  void maybe_hold(Stream& stream);

 private:
  bool chosen();
  std::uint64_t state_;
  const bool active_;
};

}  // namespace sim
