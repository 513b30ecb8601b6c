// Lossless compression of floating-point numbers, whose highest bytes (sign and exponent) become fewer bits.
//
// How many bytes go where is CANN's: each vector core codes its share of the numbers into its own slot of `fixed`, in tiles
// of 64 rows of 64 numbers, and leaves what does not fit for `var`, a byte for each number. A row's bytes are replaced by
// their places among the values by frequency, in as many bits as the row's largest place needs. How the bits lie is our own:
// a slot holds the number of its coded rows, a byte for each row's width, and for each row a plane of 64 bits for each bit.
// `var` holds the rest of all cores, one behind the other.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "aclnn/operator.h"
#include "device.h"

using namespace sim;

namespace {

constexpr int64_t kRow = 64, kRowsOfTile = 64, kLeast = 32768, kHeader = 512, kTail = 8448, kBegin = 256;
using Values = std::array<uint8_t, 256>;

struct Parts {
  int64_t numel, bytes;  // of one number
  uint8_t *mantissa, *fixed, *var;
  int64_t room_of_fixed, room_of_var;

  int64_t cores() const { return std::clamp(numel / kLeast, int64_t{1}, vector_cores()); }
  int64_t slot() const { return (room_of_fixed - kHeader) / cores(); }
  uint8_t* slot_of(int64_t core) const { return fixed + kHeader + slot() * core; }
  // The last core takes the rows that are left.
  int64_t first_row(int64_t core) const { return core == cores() ? numel / kRow : numel / kRow / cores() * core; }
};

[[noreturn]] void refuse(const std::string& what) { throw Failure(ACL_ERROR_INVALID_PARAM, what); }

uint8_t* bytes_of(const Tensor& tensor, const char* name) {
  if (!tensor.is_contiguous()) throw Failure(ACL_ERROR_API_NOT_SUPPORT, std::string(name) + " is not contiguous");
  return static_cast<uint8_t*>(tensor.data_ptr());
}

Parts checked(const Tensor& numbers, const Tensor& pdf, bool reshuff, const Tensor& mantissa, const Tensor& fixed,
              const Tensor& var) {
  const ScalarType type = numbers.scalar_type();
  const Parts parts{numbers.numel(), static_cast<int64_t>(numbers.element_size()), bytes_of(mantissa, "mantissa"),
                    bytes_of(fixed, "fixed"), bytes_of(var, "var"), static_cast<int64_t>(fixed.nbytes()),
                    static_cast<int64_t>(var.nbytes())};
  if (reshuff) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "reshuff true");
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) refuse("numbers are float32, float16 or bfloat16");
  for (const Tensor& one : {mantissa, fixed, var})
    if (one.scalar_type() != type) refuse("mantissa, fixed and var have the type of the numbers");
  if (pdf.scalar_type() != at::kInt || pdf.numel() != 256 || !pdf.is_contiguous()) refuse("pdf is 256 contiguous int32");
  if (parts.numel % kRow != 0 || parts.numel < kLeast)
    refuse(std::to_string(parts.numel) + " numbers: a multiple of 64, and at least 32768");
  if (static_cast<int64_t>(mantissa.nbytes()) != parts.numel * (parts.bytes - 1))
    refuse("mantissa has a byte less for each number");
  if (parts.room_of_fixed < kHeader) refuse("fixed has at least 512 bytes");
  const int64_t least = parts.numel + parts.numel / kRow + kTail * parts.cores() + kHeader;
  if (parts.room_of_fixed + parts.room_of_var < least)
    refuse("fixed and var together have " + std::to_string(parts.room_of_fixed + parts.room_of_var) + " bytes, and " +
           std::to_string(least) + " may be needed");
  return parts;
}

// The values of a byte, the most frequent first.
Values by_frequency(const Tensor& pdf) {
  const auto* count = pdf.const_data_ptr<int32_t>();
  std::array<int, 256> order{};
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [=](int a, int b) { return count[a] > count[b]; });
  Values values{};
  std::ranges::copy(order, values.begin());
  return values;
}

int64_t width_of(const uint8_t* row) {
  return std::bit_width(static_cast<unsigned>(*std::max_element(row, row + kRow)));
}

// How many of the rows, whose places these are, CANN puts into a slot: whole tiles, each with two bytes a row besides.
int64_t rows_that_fit(const uint8_t* places, int64_t rows, int64_t slot) {
  int64_t used = kBegin;
  for (int64_t row = 0; row < rows; row += kRowsOfTile) {
    used += 2 * kRowsOfTile;
    for (int64_t i = row; i < std::min(row + kRowsOfTile, rows); ++i)
      used += std::max<int64_t>(width_of(places + i * kRow), 1) * (kRow / 8);
    if (used > slot - kTail) return row;
  }
  return rows;
}

void write_slot(uint8_t* slot, const uint8_t* places, int64_t rows) {
  std::memcpy(slot, &rows, sizeof rows);
  uint8_t* widths = slot + sizeof rows;
  uint8_t* planes = widths + rows;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* of_row = places + row * kRow;
    widths[row] = static_cast<uint8_t>(width_of(of_row));
    for (int bit = 0; bit < widths[row]; ++bit, planes += kRow / 8) {
      uint64_t plane = 0;
      for (int64_t i = 0; i < kRow; ++i) plane |= static_cast<uint64_t>(of_row[i] >> bit & 1) << i;
      std::memcpy(planes, &plane, sizeof plane);
    }
  }
}

// Writes the rows of a slot into `places` and returns how many there are, of `most`.
int64_t read_slot(const uint8_t* slot, int64_t most, uint8_t* places) {
  int64_t rows = 0;
  std::memcpy(&rows, slot, sizeof rows);
  if (rows < 0 || rows > most) refuse("fixed holds nothing that HansEncode has written");
  const uint8_t* widths = slot + sizeof rows;
  const uint8_t* planes = widths + rows;
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* of_row = places + row * kRow;
    std::fill_n(of_row, kRow, uint8_t{0});
    for (int bit = 0; bit < widths[row]; ++bit, planes += kRow / 8) {
      uint64_t plane = 0;
      std::memcpy(&plane, planes, sizeof plane);
      for (int64_t i = 0; i < kRow; ++i) of_row[i] |= static_cast<uint8_t>((plane >> i & 1) << bit);
    }
  }
  return rows;
}

}  // namespace

// No figure of its rate was found: as fast as memory.
static Work lossless_code() { return {.kind = "lossless_code"}; }

ACLNN(HansEncode, lossless_code(),
      (const Tensor& numbers, Changed<Tensor>& pdf, bool statistic, bool reshuff, Written<MappedTensor>& mantissa,
       Tensor& fixed, Written<MappedTensor>& var)) {
  const Parts parts = checked(numbers, pdf, reshuff, mantissa.value, fixed, var.value);
  const Tensor source = numbers.contiguous();
  const auto* number = static_cast<const uint8_t*>(source.const_data_ptr());
  std::vector<uint8_t> highest(parts.numel);
  uint8_t* rest = parts.mantissa;
  for (int64_t i = 0; i < parts.numel; ++i, number += parts.bytes) {
    rest = std::copy_n(number, parts.bytes - 1, rest);
    highest[i] = number[parts.bytes - 1];
  }
  if (statistic) {
    auto* count = pdf.data_ptr<int32_t>();
    std::fill_n(count, 256, 0);
    for (const uint8_t value : highest) ++count[value];
  }
  const Values values = by_frequency(pdf);
  Values place{};
  for (int i = 0; i < 256; ++i) place[values[i]] = static_cast<uint8_t>(i);
  std::vector<uint8_t> places(parts.numel);
  std::ranges::transform(highest, places.begin(), [&](uint8_t value) { return place[value]; });
  std::memset(parts.fixed, 0, kHeader);
  uint8_t* overflow = parts.var;
  for (int64_t core = 0; core < parts.cores(); ++core) {
    const int64_t first = parts.first_row(core), end = parts.first_row(core + 1);
    const int64_t rows = rows_that_fit(places.data() + first * kRow, end - first, parts.slot());
    if (overflow + (end - first - rows) * kRow > parts.var + parts.room_of_var) refuse("var is too small for these numbers");
    if (parts.slot() >= kTail) write_slot(parts.slot_of(core), places.data() + first * kRow, rows);
    overflow = std::copy(highest.begin() + (first + rows) * kRow, highest.begin() + end * kRow, overflow);
  }
}

ACLNN(HansDecode, lossless_code(),
      (const MappedTensor& mantissa, const Tensor& fixed, const MappedTensor& var, const Tensor& pdf, bool reshuff,
       Tensor& out)) {
  const Parts parts = checked(out, pdf, reshuff, mantissa.value, fixed, var.value);
  const Values values = by_frequency(pdf);
  std::vector<uint8_t> highest(parts.numel);
  const uint8_t* overflow = parts.var;
  for (int64_t core = 0; core < parts.cores(); ++core) {
    const int64_t first = parts.first_row(core) * kRow, end = parts.first_row(core + 1) * kRow;
    uint8_t* of_core = highest.data() + first;
    int64_t coded = 0;
    if (parts.slot() >= kTail) coded = read_slot(parts.slot_of(core), (end - first) / kRow, of_core) * kRow;
    std::transform(of_core, of_core + coded, of_core, [&](uint8_t place) { return values[place]; });
    std::copy_n(overflow, end - first - coded, of_core + coded);
    overflow += end - first - coded;
  }
  const Tensor target = at::empty(out.sizes(), out.options());
  auto* number = static_cast<uint8_t*>(target.data_ptr());
  const uint8_t* rest = parts.mantissa;
  for (int64_t i = 0; i < parts.numel; ++i, rest += parts.bytes - 1) {
    number = std::copy_n(rest, parts.bytes - 1, number);
    *number++ = highest[i];
  }
  out.copy_(target);
}
