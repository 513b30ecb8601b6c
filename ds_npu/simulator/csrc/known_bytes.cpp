#include "known_bytes.h"

#include <cstring>
#include <functional>

#include "device.h"
#include "settings.h"

namespace sim {
namespace {

constexpr int64_t kMostRuns = 1 << 16;    // of a strided tensor; one with more counts with all bytes between them
constexpr std::size_t kLarge = 1 << 20;   // bytes from which on a copy leaves the host's memory as it is

// Calls `visit(begin, bytes)` for each contiguous run of bytes of a tensor, until it returns false.
void each_run(const at::Tensor& tensor, const std::function<bool(const char*, std::size_t)>& visit) {
  if (tensor.numel() == 0) return;
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  const std::size_t size = tensor.element_size();
  // Merge dims from the last one on, as long as they are contiguous.
  int64_t run = 1, dim = tensor.dim() - 1;
  for (; dim >= 0 && (tensor.size(dim) == 1 || tensor.stride(dim) == run); --dim) run *= tensor.size(dim);
  int64_t runs = 1, extent = run;
  for (int64_t outer = 0; outer <= dim; ++outer) {
    if (tensor.stride(outer) != 0) runs *= tensor.size(outer);
    extent += (tensor.size(outer) - 1) * tensor.stride(outer);
  }
  // Dims in another order leave no gaps.
  if (extent == run * runs || runs > kMostRuns) {
    visit(begin, static_cast<std::size_t>(extent) * size);
    return;
  }
  const std::function<bool(int64_t, const char*)> walk = [&](int64_t outer, const char* at) {
    if (outer > dim) return visit(at, static_cast<std::size_t>(run) * size);
    const int64_t count = tensor.stride(outer) == 0 ? 1 : tensor.size(outer);
    for (int64_t i = 0; i < count; ++i)
      if (!walk(outer + 1, at + i * tensor.stride(outer) * static_cast<int64_t>(size))) return false;
    return true;
  };
  walk(0, begin);
}

// Whether a tensor is known; `computed`: and is not given by the host, where it is of a floating-point type.
bool knows(const at::Tensor& tensor, bool computed) {
  const bool any = !computed || at::isIntegralType(tensor.scalar_type(), true);
  bool all = true;
  each_run(tensor, [&](const char* begin, std::size_t bytes) {
    return all = any ? known_bytes().knows(begin, bytes) : known_bytes().has_computed(begin, bytes);
  });
  return all;
}

// Unknown numbers as the host reads them: 1 of a floating-point type, else 0.
void write_numbers(void* to, const void* from, std::size_t bytes) {
  std::memset(to, 0, bytes);
  const auto type = known_bytes().type_at(from);
  if (!type || !at::isFloatingType(*type)) return;
  const at::TensorOptions options(*type);
  at::from_blob(to, {static_cast<int64_t>(bytes / at::elementSize(*type))}, options).fill_(1);
}

}  // namespace

KnownBytes& known_bytes() {
  static auto* one = new KnownBytes;
  return *one;
}

bool dry_run() { return settings().dry; }

void KnownBytes::cut(Address begin, Address end) {
  auto at = ranges_.upper_bound(begin);
  if (at != ranges_.begin()) --at;
  while (at != ranges_.end() && at->first < end) {
    const auto [first, range] = *at;
    if (range.end <= begin) {
      ++at;
      continue;
    }
    at = ranges_.erase(at);
    if (first < begin) ranges_[first] = {begin, range.state};
    if (range.end > end) ranges_[end] = {range.end, range.state};
  }
}

void KnownBytes::set(const void* begin, std::size_t bytes, int state) {
  if (bytes == 0) return;
  auto first = reinterpret_cast<Address>(begin), end = first + bytes;
  const std::scoped_lock lock(mutex_);
  cut(first, end);
  if (const auto next = ranges_.find(end); next != ranges_.end() && next->second.state == state) {
    end = next->second.end;
    ranges_.erase(next);
  }
  if (auto before = ranges_.lower_bound(first); before != ranges_.begin()) {
    --before;
    if (before->second.end == first && before->second.state == state) {
      before->second.end = end;
      return;
    }
  }
  ranges_[first] = {end, state};
}

void KnownBytes::set_unknown(const void* begin, std::size_t bytes, at::ScalarType type) {
  set(begin, bytes, static_cast<int>(type));
}

void KnownBytes::forget(const void* begin, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  cut(reinterpret_cast<Address>(begin), reinterpret_cast<Address>(begin) + bytes);
}

bool KnownBytes::knows(const void* begin, std::size_t bytes) { return all_of(begin, bytes, kGiven); }

bool KnownBytes::has_computed(const void* begin, std::size_t bytes) { return all_of(begin, bytes, kComputed); }

// Whether the state of all bytes is from `least` to kComputed.
bool KnownBytes::all_of(const void* begin, std::size_t bytes, int least) {
  auto first = reinterpret_cast<Address>(begin);
  const Address end = first + bytes;
  const std::scoped_lock lock(mutex_);
  auto at = ranges_.upper_bound(first);
  if (at != ranges_.begin()) --at;
  for (; first < end; ++at) {
    if (at == ranges_.end() || at->first > first || at->second.end <= first) return false;
    if (at->second.state > kComputed || at->second.state < least) return false;
    first = at->second.end;
  }
  return true;
}

std::optional<at::ScalarType> KnownBytes::type_at(const void* address) {
  const auto first = reinterpret_cast<Address>(address);
  const std::scoped_lock lock(mutex_);
  auto at = ranges_.upper_bound(first);
  if (at == ranges_.begin()) return {};
  --at;
  if (at->second.state <= kComputed || at->second.end <= first) return {};
  return static_cast<at::ScalarType>(at->second.state);
}

bool computes(const Account& account) {
  bool has_inputs = false, writes_numbers = false;
  for (const auto& [tensor, access] : account.touches) {
    has_inputs = has_inputs || access != Access::kWritten;
    writes_numbers = writes_numbers || (access != Access::kRead && !at::isIntegralType(tensor.scalar_type(), true));
  }
  if (writes_numbers && !has_inputs) return false;
  for (const auto& [tensor, access] : account.touches)
    if (access != Access::kWritten && !knows(tensor, writes_numbers)) return false;
  return true;
}

void conclude(const Account& account, bool computed) {
  for (const auto& [tensor, access] : account.touches) {
    if (access == Access::kRead) continue;
    each_run(tensor, [&](const char* begin, std::size_t bytes) {
      if (computed) {
        known_bytes().set_known(begin, bytes, false);
      } else {
        known_bytes().set_unknown(begin, bytes, tensor.scalar_type());
      }
      return true;
    });
  }
}

void mark_known(const at::Tensor& tensor) {
  each_run(tensor, [](const char* begin, std::size_t bytes) {
    known_bytes().set_known(begin, bytes, false);
    return true;
  });
}

void copy_known(void* to, const void* from, std::size_t bytes, bool from_device, bool to_device) {
  // The host has written what it gives, but for large copies of unknown bytes, which are marked.
  const bool unknown = from_device || bytes >= kLarge ? !known_bytes().knows(from, bytes) : false;
  const auto type = known_bytes().type_at(from);
  if (!unknown || (!from_device && !type)) {
    std::memmove(to, from, bytes);
    if (to_device) known_bytes().set_known(to, bytes, !from_device || !known_bytes().has_computed(from, bytes));
    if (!to_device) known_bytes().forget(to, bytes);
    return;
  }
  if (!to_device && bytes < kLarge) {
    write_numbers(to, from, bytes);
    known_bytes().forget(to, bytes);
    return;
  }
  known_bytes().set_unknown(to, bytes, type.value_or(at::kByte));
}

}  // namespace sim
