#include "work.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "acl/acl_base.h"
#include "failure.h"
#include "known_bytes.h"
#include "machine.h"

namespace sim {
namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) != 0) elements *= tensor.size(dim);
  return tensor.numel() == 0 ? 0 : elements * static_cast<int64_t>(tensor.element_size());
}

// Seconds of what an operator does while it reads and writes its tensors.
double beside_memory(const Work& work) {
  const auto& [rows, columns, inner, itemsize, count] = work.products;
  double seconds = machine().product_seconds(rows, columns, inner, itemsize, count);
  if (work.keys > 0) seconds = machine().attention_seconds(work.flop, static_cast<double>(work.keys));
  if (work.message_peers > 0)
    seconds = std::max(seconds, machine().message + machine().sending_seconds(work.message_bytes, work.message_peers, 0));
  return std::max(seconds, static_cast<double>(work.host_bytes) / machine().host);
}

}  // namespace

Account account_of(const Work& work, std::vector<Touch> touches, double seconds) {
  Account account{.work = work, .touches = std::move(touches), .seconds = seconds};
  for (const auto& [tensor, access] : account.touches) {
    if (access != Access::kWritten) account.read_bytes += bytes_of(tensor);
    if (access != Access::kRead) account.written_bytes += bytes_of(tensor);
  }
  return account;
}

Account account_of(const Work& work, std::vector<Touch> touches) {
  Account account = account_of(work, std::move(touches), 0);
  const int64_t moved = work.moved < 0 ? account.read_bytes + account.written_bytes : work.moved;
  const double passes = work.kind == std::string_view("sorting") ? machine().sorting_passes : 1;
  account.seconds = machine().operator_seconds(beside_memory(work), passes * static_cast<double>(moved));
  return account;
}

Touch touched(const void* address, std::size_t bytes, Access access) {
  const auto size = static_cast<int64_t>(bytes);
  return {.tensor = at::from_blob(const_cast<void*>(address), {size}, at::kByte), .access = access};
}

Account copy_of(void* to, const void* from, std::size_t bytes, bool within_device) {
  const Work work{.kind = "copy", .host_bytes = within_device ? 0 : static_cast<int64_t>(bytes)};
  return account_of(work, {touched(from, bytes, Access::kRead), touched(to, bytes, Access::kWritten)});
}

Work indexing(const at::Tensor& chosen) { return {.kind = "indexing", .moved = 2 * static_cast<int64_t>(chosen.nbytes())}; }

Work products(int64_t rows, int64_t columns, int64_t inner, int64_t itemsize, int64_t count) {
  const auto flop = 2 * static_cast<double>(count) * static_cast<double>(rows * columns) * static_cast<double>(inner);
  return {.kind = "cube", .flop = flop, .products = {rows, columns, inner, itemsize, count}};
}

Work overlapped_with_message(Work work, double bytes, int64_t peers) {
  work.kind = "cube_collective";
  work.message_bytes = bytes;
  work.message_peers = peers;
  return work;
}

Work product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  const bool row = a.dim() == 1, column = b.dim() == 1;
  // A dry run does not compute the product, which would find this.
  if (dry_run() && a.size(-1) != b.size(column ? 0 : -2))
    throw Failure(ACL_ERROR_INVALID_PARAM, "matrices of " + std::to_string(a.size(-1)) + " columns and " +
                                               std::to_string(b.size(column ? 0 : -2)) + " rows have no product");
  const int64_t columns = column ? 1 : b.size(-1), inner = a.size(-1);
  int64_t rows = row ? 1 : a.size(-2), count = rows * columns == 0 ? 0 : out.numel() / (rows * columns);
  // One matrix on the right: all rows of the left are those of one product.
  if (b.dim() <= 2) rows *= std::exchange(count, 1);
  return products(rows, columns, inner, static_cast<int64_t>(a.element_size()), count);
}

}  // namespace sim
