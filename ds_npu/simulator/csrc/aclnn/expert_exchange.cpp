// Products of groups of rows (experts), fused with the exchange of these rows between ranks. Of an A3 only.
#include <numeric>

#include "aclnn/communicator_argument.h"
#include "settings.h"

using namespace sim;

namespace {

using Group = CommunicatorArgument;

constexpr int64_t kMostExperts = 32, kMostCounts = 256;
constexpr int64_t kLeastBytes = int64_t{2} << 20, kMostBytes = int64_t{100} << 20;

int64_t sum(const Ints& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// Rows of each rank and expert: counts[rank * experts + expert].
struct Rows {
  int64_t ranks, experts;
  Ints counts;

  int64_t of_rank(int64_t rank) const {
    return std::accumulate(counts.begin() + rank * experts, counts.begin() + (rank + 1) * experts, int64_t{0});
  }
  int64_t of_expert(int64_t expert) const {
    int64_t rows = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) rows += counts[static_cast<size_t>(rank * experts + expert)];
    return rows;
  }
  // Which of the rows by rank each of the rows by expert is.
  Tensor by_expert() const {
    std::vector<Tensor> parts;
    std::vector<int64_t> begins{0};
    for (const int64_t count : counts) begins.push_back(begins.back() + count);
    for (int64_t expert = 0; expert < experts; ++expert)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto index = static_cast<size_t>(rank * experts + expert);
        parts.push_back(at::arange(begins[index], begins[index + 1]));
      }
    return at::cat(parts);
  }
};

void check(const Group& group, const Tensor& x, const Tensor& weight, int64_t ranks, const Ints& sent, const Ints& received,
           int64_t bytes, bool others) {
  if (settings().soc.rfind("Ascend910_93", 0) != 0) not_supported("only an A3 has this operator, not " + settings().soc);
  check_halves(x, weight);
  if (others) not_supported("shared experts, and counts in tensors, are not simulated here");
  if (ranks != 8 && ranks != 16 && ranks != 32 && ranks != 64)
    not_supported("epWorldSize is " + std::to_string(ranks) + "; CANN supports 8, 16, 32 and 64");
  if (ranks != static_cast<int64_t>(group.communicator->size()))
    throw Failure(ACL_ERROR_INVALID_PARAM, "epWorldSize is " + std::to_string(ranks) + ", and the communicator has " +
                                               std::to_string(group.communicator->size()) + " ranks");
  const int64_t experts = weight.size(0), counts = experts * ranks;
  if (experts > kMostExperts || counts > kMostCounts)
    not_supported(std::to_string(experts) + " experts on each of " + std::to_string(ranks) + " ranks; CANN supports " +
                  std::to_string(kMostExperts) + ", and " + std::to_string(kMostCounts) + " in all");
  for (const Ints* list : {&sent, &received})
    if (static_cast<int64_t>(list->size()) != counts)
      throw Failure(ACL_ERROR_INVALID_PARAM, "sendCounts and recvCounts have a number for each expert of each rank: " +
                                                 std::to_string(counts) + ", not " + std::to_string(list->size()));
  if (bytes < kLeastBytes || bytes > kMostBytes)
    not_supported("a rank's " + std::to_string(bytes) + " bytes are exchanged; CANN supports 2 MiB to 100 MiB");
}

// Rows of `x` to other ranks, one rank's behind the other's.
void exchange(const Group& group, Tensor& x, const Rows& sent, Tensor& out, const Rows& received) {
  hccl::Parts parts;
  std::uint64_t begin_sent = 0, begin_received = 0;
  const auto width = static_cast<std::uint64_t>(x.size(1));
  for (int64_t rank = 0; rank < sent.ranks; ++rank) {
    parts.send_counts.push_back(static_cast<std::uint64_t>(sent.of_rank(rank)) * width);
    parts.receive_counts.push_back(static_cast<std::uint64_t>(received.of_rank(rank)) * width);
    parts.send_displacements.push_back(std::exchange(begin_sent, begin_sent + parts.send_counts.back()));
    parts.receive_displacements.push_back(std::exchange(begin_received, begin_received + parts.receive_counts.back()));
  }
  hccl::exchange(*group.communicator, group.sequence, hccl::Operation::all_to_all_v, x.data_ptr(), out.data_ptr(), hccl_type(x),
                 parts);
}

// Rows in the order of their experts times the expert's matrix, added up in float32 and rounded once.
Tensor products(const Tensor& x, const Tensor& weight, bool transposed, const Rows& rows) {
  const Tensor matrices = transposed ? weight.transpose(1, 2) : weight;
  Tensor out = at::empty({x.size(0), matrices.size(2)}, x.options());
  int64_t begin = 0;
  for (int64_t expert = 0; expert < rows.experts; ++expert) {
    const int64_t count = rows.of_expert(expert);
    Tensor mine = out.narrow(0, begin, count);
    mine.copy_(at::matmul(x.narrow(0, begin, count).to(at::kFloat), matrices[expert].to(at::kFloat)));
    begin += count;
  }
  return out;
}

// The products of a rank's experts, of `rows` rows in all, while it sends `exchanged` to the ranks of their experts.
Work with_exchange(const Tensor& x, const Tensor& weight, bool transposed, const Ints& rows, const Tensor& exchanged,
                   const Group& group) {
  const int64_t experts = std::max<int64_t>(weight.size(0), 1), ranks = group.communicator->size();
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const int64_t columns = weight.size(transposed ? 1 : 2), inner = weight.size(transposed ? 2 : 1);
  const Work work =
      sim::products((all + experts - 1) / experts, columns, inner, static_cast<int64_t>(x.element_size()), experts);
  const auto sent = static_cast<double>(exchanged.nbytes()) * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  return overlapped_with_message(work, sent, ranks - 1);
}

}  // namespace

ACLNN(AlltoAllvGroupedMatMul, with_exchange(x, weight, transposed, received, x, group),
      (const Tensor& x, const Tensor& weight, const OptionalTensor& send_counts, const OptionalTensor& recv_counts,
       const OptionalTensor& mm_x, const OptionalTensor& mm_weight, const Group& group, int64_t ranks, const Ints& sent,
       const Ints& received, bool transposed, bool, bool permuted_out, Tensor& y, const OptionalTensor&,
       Written<OptionalTensor>& permuted))
       {
  check(group, x, weight, ranks, sent, received, x.numel() * x.element_size(), send_counts || recv_counts || mm_x || mm_weight);
  const Rows from{ranks, weight.size(0), sent}, to{ranks, weight.size(0), received};
  Scratch own(group, x, x.sizes()), all(group, x, {sum(received), x.size(1)});
  own.tensor().copy_(x);
  exchange(group, own.tensor(), from, all.tensor(), to);
  const Tensor rows = all.tensor().index_select(0, to.by_expert());
  if (permuted_out && permuted) permuted->copy_(rows);
  y.copy_(products(rows, weight, transposed, to));
}

ACLNN(GroupedMatMulAlltoAllv, with_exchange(x, weight, transposed, sent, y, group),
      (const Tensor& x, const Tensor& weight, const OptionalTensor& send_counts, const OptionalTensor& recv_counts,
       const OptionalTensor& mm_x, const OptionalTensor& mm_weight, const Group& group, int64_t ranks, const Ints& sent,
       const Ints& received, bool transposed, bool, Tensor& y, const OptionalTensor&)) {
  check(group, x, weight, ranks, sent, received, y.numel() * y.element_size(), send_counts || recv_counts || mm_x || mm_weight);
  const Rows from{ranks, weight.size(0), sent}, to{ranks, weight.size(0), received};
  const Tensor rows = products(x, weight, transposed, from);
  Scratch by_rank(group, y, rows.sizes()), all(group, y, y.sizes());
  by_rank.tensor().index_copy_(0, from.by_expert(), rows);
  exchange(group, by_rank.tensor(), from, all.tensor(), to);
  y.copy_(all.tensor());
}
