// Matrix products fused with an all-gather of their operands or a reduce-scatter of their results.
#include "aclnn/communicator_argument.h"

using namespace sim;

namespace {

using Group = CommunicatorArgument;

void check_turn(int64_t comm_turn) {
  if (comm_turn != 0) not_supported("commTurn is " + std::to_string(comm_turn) + "; CANN supports 0 only");
}

void check_sum(const std::string& reduction) {
  if (reduction != "sum") not_supported("reduceOp is " + reduction + "; CANN supports sum only");
}

void check_no_bias(const OptionalTensor& bias) {
  if (bias && bias->count_nonzero().item<int64_t>() != 0) not_supported("CANN supports no bias but zeros here");
}

// Added up in float32 and rounded once.
void product(Tensor& out, const Tensor& x1, const Tensor& x2, const OptionalTensor& bias, const OptionalTensor& addend = {}) {
  Tensor sum = at::matmul(x1.to(at::kFloat), x2.to(at::kFloat));
  if (bias) sum.add_(*bias);
  if (addend) sum.add_(*addend);
  out.copy_(sum);
}

// Each rank's product is rounded to the output's type before the products are added.
void product_summed_over_ranks(const Tensor& x1, const Tensor& x2, const OptionalTensor& bias, const OptionalTensor& addend,
                               const Group& group, const std::string& reduction, int64_t comm_turn, Tensor& out) {
  check_halves(x1, x2);
  check_sum(reduction);
  check_turn(comm_turn);
  Scratch partial(group, out, out.sizes());
  product(partial.tensor(), x1, x2, bias, addend);
  void* data = partial.tensor().data_ptr();
  hccl::all_reduce(*group.communicator, group.sequence, data, data, static_cast<std::uint64_t>(out.numel()), hccl_type(out),
                   HCCL_REDUCE_SUM);
  out.copy_(partial.tensor());
}

// The product of the gathered rows, while each rank sends its own to the others.
Work with_gather(const Tensor& x1, const Tensor& x2, const Group& group) {
  const int64_t ranks = group.communicator->size();
  const Work work = products(ranks * x1.size(0), x2.size(1), x1.size(1), static_cast<int64_t>(x1.element_size()), 1);
  return overlapped_with_message(work, static_cast<double>(x1.nbytes()) * static_cast<double>(ranks - 1), ranks - 1);
}

// The product, while its rows go to the ranks that sum them, and once more to all ranks in a second phase.
Work with_reduction(const Tensor& x1, const Tensor& x2, const Group& group, int phases) {
  const int64_t ranks = group.communicator->size(), itemsize = static_cast<int64_t>(x1.element_size());
  const int64_t rows = x1.numel() / std::max<int64_t>(x1.size(-1), 1);
  const Work work = products(rows, x2.size(1), x1.size(-1), itemsize, 1);
  const auto sent = static_cast<double>(rows * x2.size(1) * itemsize * (ranks - 1)) / static_cast<double>(ranks);
  return overlapped_with_message(work, phases * sent, ranks - 1);
}

}  // namespace

ACLNN(AllGatherMatmul, with_gather(x1, x2, group),
      (const Tensor& x1, const Tensor& x2, const OptionalTensor& bias, const Group& group, int64_t gather_index,
       int64_t comm_turn, int64_t, Tensor& out, Written<OptionalTensor>& gathered)) {
  check_halves(x1, x2);
  check_turn(comm_turn);
  check_no_bias(bias);
  if (gather_index != 0) not_supported("gatherIndex is " + std::to_string(gather_index) + "; CANN supports 0 only");
  Scratch own(group, x1, x1.sizes());
  own.tensor().copy_(x1);
  Scratch all(group, x1, {x1.size(0) * static_cast<int64_t>(group.communicator->size()), x1.size(1)});
  hccl::all_gather(*group.communicator, group.sequence, own.tensor().data_ptr(), all.tensor().data_ptr(),
                   static_cast<std::uint64_t>(x1.numel()), hccl_type(x1));
  if (gathered && gathered->numel() != 0) gathered->copy_(all.tensor());
  product(out, all.tensor(), x2, {});
}

ACLNN(MatmulReduceScatter, with_reduction(x1, x2, group, 1),
      (const Tensor& x1, const Tensor& x2, const OptionalTensor& bias, const Group& group, const std::string& reduction,
       int64_t comm_turn, int64_t, Tensor& out)) {
  check_halves(x1, x2);
  check_sum(reduction);
  check_turn(comm_turn);
  check_no_bias(bias);
  Scratch partial(group, out, {x1.size(0), x2.size(1)});
  product(partial.tensor(), x1, x2, {});
  Scratch own(group, out, out.sizes());
  hccl::reduce_scatter(*group.communicator, group.sequence, partial.tensor().data_ptr(), own.tensor().data_ptr(),
                       static_cast<std::uint64_t>(out.numel()), hccl_type(out), HCCL_REDUCE_SUM);
  out.copy_(own.tensor());
}

ACLNN(MatmulAllReduce, with_reduction(x1, x2, group, 2),
      (const Tensor& x1, const Tensor& x2, const OptionalTensor& bias, const Group& group, const std::string& reduction,
       int64_t comm_turn, int64_t, Tensor& out)) {
  product_summed_over_ranks(x1, x2, bias, {}, group, reduction, comm_turn, out);
}

ACLNN(MatmulAllReduceV2, with_reduction(x1, x2, group, 2),
      (const Tensor& x1, const Tensor& x2, const OptionalTensor& bias, const Tensor& x3, const Group& group,
       const std::string& reduction, int64_t comm_turn, int64_t, Tensor& out)) {
  product_summed_over_ranks(x1, x2, bias, x3, group, reduction, comm_turn, out);
}
