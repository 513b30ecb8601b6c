// What a task on a stream costs and touches.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace sim {

// `count` products [rows, inner] @ [inner, columns] of operands of `itemsize` bytes.
struct Products {
  int64_t rows = 0, columns = 0, inner = 0, itemsize = 0, count = 0;
};

// The kind of an operator and what it does, apart from the bytes of its tensors: nothing of it depends on the machine.
struct Work {
  const char* kind;
  double flop = 0;            // of products of matrices: 2 for each multiplication and addition
  Products products{};
  int64_t keys = 0;           // of attention: those of its longest sequence
  int64_t moved = -1;         // bytes that it reads and writes; -1: those of its tensors
  int64_t host_bytes = 0;     // that it copies to or from the host
  double message_bytes = 0;   // that it sends meanwhile, to `message_peers` ranks of the node together
  int64_t message_peers = 0;
};

enum class Access { kRead, kWritten, kChanged };  // changed: read, and written in place

struct Touch {
  at::Tensor tensor;  // a view of what is touched
  Access access;
};

struct Account {
  Work work{.kind = "none"};
  std::vector<Touch> touches{};
  int64_t read_bytes = 0, written_bytes = 0;
  double seconds = 0;           // that the simulated machine takes
  std::string communication{};  // of the other ranks, for the trace: members of a JSON object
};

Touch touched(const void* address, std::size_t bytes, Access access);

// Counts the bytes of `touches`, each element of a broadcast tensor once.
Account account_of(const Work& work, std::vector<Touch> touches);
// The same for a task that takes `seconds`.
Account account_of(const Work& work, std::vector<Touch> touches, double seconds);
// A copy within device memory, or between it and the host.
Account copy_of(void* to, const void* from, std::size_t bytes, bool within_device);

// ---- the kinds of operators, as functions of their arguments ----

// Limited by memory: reads and writes each tensor once.
inline Work streaming() { return {.kind = "streaming"}; }
// Sorts in several passes, or finds the largest.
inline Work sorting() { return {.kind = "sorting"}; }
// Reads or writes the elements of another tensor that an index names: as many as `chosen` has.
Work indexing(const at::Tensor& chosen);
// out [..., M, N] = a [..., M, K] @ b; vectors as in torch.matmul.
Work product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out);
// `work` overlapped with a message of `bytes` bytes to `peers` ranks together, whichever takes longer.
Work overlapped_with_message(Work work, double bytes, int64_t peers);
Work products(int64_t rows, int64_t columns, int64_t inner, int64_t itemsize, int64_t count);

}  // namespace sim
