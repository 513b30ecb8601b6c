#include "hccl/reduction.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "failure.h"
#include "hccl/call.h"
#include "known_bytes.h"

namespace sim::hccl {
namespace {

constexpr std::uint64_t kPieceBytes = 256 << 10;  // all sources' pieces of this size fit in a core's cache

// ATen does not compare these types; their sums and products are those of the signed ones.
bool is_wide_unsigned(HcclDataType type) {
  return type == HCCL_DATA_TYPE_UINT16 || type == HCCL_DATA_TYPE_UINT32 || type == HCCL_DATA_TYPE_UINT64;
}

at::ScalarType arithmetic_type(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return at::kChar;
    case HCCL_DATA_TYPE_UINT8: return at::kByte;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16: return at::kShort;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32: return at::kInt;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64: return at::kLong;
    case HCCL_DATA_TYPE_FP16: return at::kHalf;
    case HCCL_DATA_TYPE_BFP16: return at::kBFloat16;
    case HCCL_DATA_TYPE_FP32: return at::kFloat;
    case HCCL_DATA_TYPE_FP64: return at::kDouble;
    default: throw Failure(HCCL_E_NOT_SUPPORT, "a reduction of " + name_of(type) + " is not simulated");
  }
}

template <class T>
void extremes(bool maximum, const char* one, const char* other, std::uint64_t count, char* result) {
  const T* a = reinterpret_cast<const T*>(one);
  const T* b = reinterpret_cast<const T*>(other);
  T* out = reinterpret_cast<T*>(result);
  for (std::uint64_t i = 0; i < count; ++i) out[i] = maximum ? std::max(a[i], b[i]) : std::min(a[i], b[i]);
}

void unsigned_extremes(HcclReduceOp reduction, HcclDataType type, const char* a, const char* b, std::uint64_t count,
                       char* out) {
  const bool maximum = reduction == HCCL_REDUCE_MAX;
  if (type == HCCL_DATA_TYPE_UINT16) return extremes<std::uint16_t>(maximum, a, b, count, out);
  if (type == HCCL_DATA_TYPE_UINT32) return extremes<std::uint32_t>(maximum, a, b, count, out);
  extremes<std::uint64_t>(maximum, a, b, count, out);
}

// out = a (reduction) b; `out` may be `a` or `b`.
void combine(HcclReduceOp reduction, HcclDataType type, const char* a, const char* b, std::uint64_t count, char* out) {
  const bool sums = reduction == HCCL_REDUCE_SUM || reduction == HCCL_REDUCE_PROD;
  if (is_wide_unsigned(type) && !sums) return unsigned_extremes(reduction, type, a, b, count, out);
  const auto view = [&](const char* data) {
    return at::from_blob(const_cast<char*>(data), {static_cast<std::int64_t>(count)}, at::TensorOptions(arithmetic_type(type)));
  };
  at::Tensor result = view(out);
  switch (reduction) {
    case HCCL_REDUCE_SUM: at::add_out(result, view(a), view(b)); return;
    case HCCL_REDUCE_PROD: at::mul_out(result, view(a), view(b)); return;
    case HCCL_REDUCE_MAX: at::maximum_out(result, view(a), view(b)); return;
    default: at::minimum_out(result, view(a), view(b)); return;
  }
}

void reduce_piece(HcclReduceOp reduction, HcclDataType type, const std::vector<const char*>& sources, std::uint64_t count,
                  char* result) {
  const std::uint64_t bytes = count * bytes_of(type);
  if (sources.size() == 1) {
    std::memmove(result, sources[0], bytes);
    return;
  }
  if (sources.size() == 2) return combine(reduction, type, sources[0], sources[1], count, result);
  // The result may be the same memory as a later source.
  static thread_local std::vector<char> scratch(kPieceBytes);
  combine(reduction, type, sources[0], sources[1], count, scratch.data());
  for (std::size_t i = 2; i + 1 < sources.size(); ++i)
    combine(reduction, type, scratch.data(), sources[i], count, scratch.data());
  combine(reduction, type, scratch.data(), sources.back(), count, result);
}

}  // namespace

void check_reducible(HcclDataType type, HcclReduceOp reduction) {
  arithmetic_type(type);
  if (reduction < HCCL_REDUCE_SUM || reduction > HCCL_REDUCE_MIN)
    throw Failure(HCCL_E_PARA, "there is no reduction " + std::to_string(reduction));
}

void reduce(HcclReduceOp reduction, HcclDataType type, const std::vector<const char*>& sources, std::uint64_t count,
            char* result) {
  const std::uint64_t size = bytes_of(type);
  const std::uint64_t most = kPieceBytes / size;
  std::vector<const char*> pieces(sources.size());
  for (std::uint64_t first = 0; first < count; first += most) {
    std::ranges::transform(sources, pieces.begin(), [&](const char* source) { return source + first * size; });
    reduce_piece(reduction, type, pieces, std::min(most, count - first), result + first * size);
  }
}

void arrived(const void* buffer, std::uint64_t bytes, HcclDataType type, bool known) {
  if (!dry_run() || bytes == 0) return;  // nothing, as in a barrier, has no type
  const bool is_byte = type == HCCL_DATA_TYPE_FP8E4M3 || type == HCCL_DATA_TYPE_FP8E5M2;
  const at::ScalarType numbers = is_byte ? at::kByte : arithmetic_type(type);
  if (known) return known_bytes().set_known(buffer, bytes, at::isFloatingType(numbers));
  known_bytes().set_unknown(buffer, bytes, numbers);
}

}  // namespace sim::hccl
