// A call of attention as independent sequences: what the layouts, sparse modes and masks mean.
#include <cstring>

#include "aclnn/attention.h"
#include "machine.h"

namespace sim {

namespace {

enum SparseMode : int64_t {
  kDefaultMask, kAllMask, kLeftUpCausal, kRightDownCausal, kBand, kPrefix, kPrefixCompressed, kRightDownCausalBand,
  kBandLeftUpCausal
};

constexpr int64_t kUnlimited = int64_t{1} << 40;
constexpr int64_t kCompressed = 2048;

[[noreturn]] void refuse(const std::string& what) { throw Failure(ACL_ERROR_API_NOT_SUPPORT, "attention: " + what); }
[[noreturn]] void reject(const std::string& what) { throw Failure(ACL_ERROR_INVALID_PARAM, "attention: " + what); }

bool has_compressed_mask(int64_t mode) { return mode >= kLeftUpCausal && mode != kPrefix; }

// Views [batch, heads, rows, size], whatever the layout.
Tensor by_head(const Tensor& tensor, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return tensor;
  if (layout == "BSND") return tensor.transpose(1, 2);
  if (layout == "BSH") return tensor.unflatten(-1, {heads, -1}).transpose(1, 2);
  if (layout == "SBH") return tensor.unflatten(-1, {heads, -1}).permute({1, 2, 0, 3});
  refuse("input_layout " + layout);
}

VisibleKeys all_of(int64_t keys) { return {.keys = keys, .lower = -kUnlimited, .upper = kUnlimited}; }

// A band that starts at the last row and key: CANN counts its tokens from the lower right corner.
VisibleKeys band(const AttentionCall& call, int64_t rows, int64_t keys, int64_t corner) {
  const int64_t before = std::clamp(call.pre_tokens, -kUnlimited, kUnlimited);
  const int64_t after = std::clamp(call.next_tokens, -kUnlimited, kUnlimited);
  if (before + after < 0) reject("pre_tokens and next_tokens have no key between them");
  if (call.sparse_mode == kDefaultMask && before >= rows - 1 && after >= keys - 1) return all_of(keys);
  return {.keys = keys, .lower = corner - before, .upper = corner + after};
}

// The band of keys that the rows of sequence `index` see; `first` and `last` are the first and last sequences with rows.
VisibleKeys visible_keys(const AttentionCall& call, int64_t rows, int64_t keys, int64_t index, int64_t first, int64_t last) {
  const int64_t corner = keys - rows;
  const VisibleKeys right_down{.keys = keys, .lower = -kUnlimited, .upper = corner};
  const VisibleKeys left_up{.keys = keys, .lower = -kUnlimited, .upper = 0};
  if (!call.mask) return all_of(keys);
  switch (call.sparse_mode) {
    case kDefaultMask: return band(call, rows, keys, 0);
    case kAllMask: return all_of(keys);
    case kLeftUpCausal: return left_up;
    case kRightDownCausal: return right_down;
    case kBand: return band(call, rows, keys, corner);
    case kRightDownCausalBand: return index == last ? band(call, rows, keys, corner) : right_down;
    case kBandLeftUpCausal: return index == first ? band(call, rows, keys, corner) : left_up;
    case kPrefix:
    case kPrefixCompressed: {
      if (!call.prefix || static_cast<int64_t>(call.prefix->size()) <= index) reject("prefix has too few numbers");
      const int64_t prefix = (*call.prefix)[index];
      if (prefix < std::max<int64_t>(corner, 0) || prefix > keys) reject("prefix " + std::to_string(prefix) + " out of range");
      return {.keys = keys, .lower = -kUnlimited, .upper = corner, .prefix = prefix};
    }
    default: refuse("sparse_mode " + std::to_string(call.sparse_mode));
  }
}

// Checks a few rows of the compressed mask: an inverted or empty one would hide the wrong keys on the device.
void check_compressed(const Tensor& mask, int64_t mode) {
  const int64_t rows = mode == kPrefixCompressed ? kCompressed + 1024 : kCompressed;
  if (mask.dim() < 2 || mask.size(-2) != rows || mask.size(-1) != kCompressed) {
    reject("sparse_mode " + std::to_string(mode) + " takes an atten_mask of [" + std::to_string(rows) + ", 2048]");
  }
  const Tensor square = mask.flatten(0, -3 + (mask.dim() == 2)).reshape({-1, rows, kCompressed})[0];
  for (const int64_t row : {int64_t{0}, int64_t{1}, kCompressed / 2, kCompressed - 1}) {
    const Tensor shown = square[row].narrow(0, 0, row + 1), hidden = square[row].narrow(0, row + 1, kCompressed - row - 1);
    if (shown.any().item<bool>() || !hidden.all().item<bool>()) {
      reject("with sparse_mode " + std::to_string(mode) + " atten_mask is true above the diagonal, and only there");
    }
  }
}

// The mask of sequence `index` as [heads or 1, rows, keys].
Tensor mask_of(const Tensor& mask, int64_t index, int64_t heads, int64_t rows, int64_t keys, bool packed) {
  if (mask.dim() == 2 && (packed || mask.sizes() == IntArrayRef{rows, keys})) {
    return mask.narrow(0, 0, rows).narrow(1, 0, keys).unsqueeze(0);
  }
  if (mask.dim() == 4 && mask.size(2) == rows && mask.size(3) == keys && (mask.size(1) == heads || mask.size(1) == 1)) {
    return mask.select(0, mask.size(0) == 1 ? 0 : index);
  }
  std::ostringstream sizes;
  sizes << mask.sizes();
  reject("atten_mask of " + sizes.str() + " fits neither [rows, keys] nor [batch, heads, rows, keys]");
}

// CANN computes whole tiles: whether it uses a score that the mask tensor shows but the window excludes depends on its
// tiling. Its documentation asks that mask and window agree.
void check_window(const Tensor& mask, const VisibleKeys& visible) {
  const Tensor rows = mask.contiguous();
  const bool* row = rows.const_data_ptr<bool>();
  const int64_t height = rows.size(1), width = rows.size(2);
  for (int64_t i = 0; i < rows.size(0) * height; ++i, row += width) {
    const int64_t begin = visible.begin(i % height), end = std::max(begin, visible.end(i % height));
    if (std::memchr(row, 0, begin) || std::memchr(row + end, 0, width - end)) {
      reject("atten_mask shows keys to row " + std::to_string(i % height) +
             " that pre_tokens, next_tokens and sparse_mode leave out: they must agree");
    }
  }
}

Tensor pse_of(const Tensor& pse, int64_t index, int64_t rows, int64_t keys) {
  if (pse.dim() != 4 || (pse.size(2) != rows && pse.size(2) != 1) || pse.size(3) != keys) {
    refuse("pse that is not [batch or 1, heads, rows or 1, keys], such as the compressed one of 1024 rows");
  }
  return pse.select(0, pse.size(0) == 1 ? 0 : index);
}

void check(const AttentionCall& call) {
  if (!is_packed(call) && call.query_ends && !call.query_ends->empty()) refuse("lengths with layout " + call.layout);
  if (key_heads(call) == 0 || call.heads % key_heads(call) != 0) {
    reject(std::to_string(call.heads) + " heads share " + std::to_string(key_heads(call)) + " of the key");
  }
  if (call.padding_mask && call.padding_mask->numel() > 0) refuse("padding_mask");
  if (call.pse && call.pse_type != 0 && call.pse_type != 1) refuse("pse_type " + std::to_string(call.pse_type));
  if (call.pse && is_packed(call)) refuse("pse with layout TND");
  if (call.inner_precise < 0 || call.inner_precise > 2) reject("inner_precise " + std::to_string(call.inner_precise));
  if (!call.softmax_layout.empty() && call.softmax_layout != "same_as_input") refuse("softmax_layout " + call.softmax_layout);
  if (call.keep_probability < 1 && !call.drop_mask) refuse("keep_prob below 1 without a mask");
  if (call.mask && has_compressed_mask(call.sparse_mode)) check_compressed(*call.mask, call.sparse_mode);
  const bool only_packed = call.sparse_mode == kRightDownCausalBand || call.sparse_mode == kBandLeftUpCausal;
  if (call.mask && (is_packed(call) ? call.sparse_mode == kPrefix : only_packed)) {
    reject("sparse_mode " + std::to_string(call.sparse_mode) + " with layout " + call.layout);
  }
}

}  // namespace

bool is_packed(const AttentionCall& call) { return call.layout == "TND"; }

int64_t key_heads(const AttentionCall& call) {
  if (call.layout == "TND") return call.key.size(1);
  if (call.layout == "BNSD") return call.key.size(1);
  if (call.layout == "BSND") return call.key.size(2);
  return call.key.size(2) / std::max<int64_t>(call.query.size(2) / call.heads, 1);
}

// [begin, end) in the tensor, of each sequence.
static std::vector<std::pair<int64_t, int64_t>> bounds(const Ints& ends, int64_t total) {
  std::vector<std::pair<int64_t, int64_t>> result;
  int64_t begin = 0;
  for (const int64_t end : ends) {  // zeros after the last sequence stand for ones that take no part
    if (end > total || (end < begin && end != 0)) reject("a sequence ends at " + std::to_string(end));
    result.emplace_back(begin, std::max(begin, end));
    begin = std::max(begin, end);
  }
  return result;
}

Tensors split_sequences(const Tensor& tensor, const AttentionCall& call, int64_t heads, const OptionalInts& ends) {
  if (!is_packed(call)) return by_head(tensor, call.layout, heads).unbind(0);
  Tensors result;
  for (const auto& [begin, end] : bounds(ends.value(), tensor.size(0))) {
    result.push_back(tensor.narrow(0, begin, end - begin).transpose(0, 1));
  }
  return result;
}

Tensors split_statistics(const Tensor& statistics, const AttentionCall& call) {
  if (!is_packed(call)) return statistics.unbind(0);
  Tensors result;
  for (const auto& [begin, end] : bounds(*call.query_ends, statistics.size(0))) {
    const Tensor part = statistics.narrow(0, begin, end - begin);
    // The older layout stores each sequence [heads, rows], although the tensor's shape is [rows, heads].
    const bool by_row = call.softmax_layout == "same_as_input";
    result.push_back(by_row ? part.transpose(0, 1) : part.view({part.size(1), part.size(0), part.size(2)}));
  }
  return result;
}

std::vector<AttentionSequence> sequences_of(const AttentionCall& call) {
  check(call);
  const Tensors queries = split_sequences(call.query, call, call.heads, call.query_ends);
  const Tensors keys = split_sequences(call.key, call, key_heads(call), call.key_ends);
  const Tensors values = split_sequences(call.value, call, key_heads(call), call.key_ends);
  if (queries.size() != keys.size() || keys.size() != values.size()) {
    reject("query, key and value have different numbers of sequences");
  }
  int64_t first = -1, last = -1, bit = 0;
  for (size_t i = 0; i < queries.size(); ++i) {
    if (queries[i].size(1) == 0) continue;
    last = static_cast<int64_t>(i);
    if (first < 0) first = last;
  }
  const bool tensor_mask = call.mask && !has_compressed_mask(call.sparse_mode);
  const Tensor mask = tensor_mask ? (call.mask->scalar_type() == at::kBool ? *call.mask : call.mask->ne(0)) : Tensor();
  const HiddenRow hidden =
      is_packed(call) ? HiddenRow::kRefused : call.inner_precise == 2 ? HiddenRow::kZero : HiddenRow::kEqualWeights;
  std::vector<AttentionSequence> result;
  for (size_t i = 0; i < queries.size(); ++i) {
    const int64_t rows = queries[i].size(1), width = keys[i].size(1), index = static_cast<int64_t>(i);
    if (rows == 0) {
      result.push_back({.query = queries[i],
                        .key = keys[i],
                        .value = values[i],
                        .visible = {.keys = width, .lower = 0, .upper = 0},
                        .hidden_row = hidden,
                        .first_bit = bit});
      continue;
    }
    const VisibleKeys visible = visible_keys(call, rows, width, index, first, last);
    const bool right_down = call.sparse_mode == kRightDownCausal || call.sparse_mode == kRightDownCausalBand;
    if (is_packed(call) && call.mask && right_down && rows > width) {
      reject("in TND with sparse_mode " + std::to_string(call.sparse_mode) + " no sequence has more rows than keys");
    }
    const Tensor shown = tensor_mask ? mask_of(mask, index, call.heads, rows, width, is_packed(call)) : Tensor();
    if (tensor_mask && !visible.all(rows)) check_window(shown, visible);
    const Tensor pse = call.pse ? pse_of(*call.pse, index, rows, width) : Tensor();
    result.push_back({.query = queries[i],
                      .key = keys[i],
                      .value = values[i],
                      .pse = pse,
                      .mask = shown,
                      .visible = visible,
                      .hidden_row = hidden,
                      .first_bit = bit});
    bit += call.heads * rows * width;
  }
  if (call.keep_probability < 1 && call.drop_mask->numel() * 8 < bit) reject("the dropout mask has too few bits");
  return result;
}

// Scores that are computed, of one head.
static double visible_scores(const AttentionCall& call, const Tensors& queries, const Tensors& keys) {
  const auto has_rows = [](const Tensor& query) { return query.size(1) > 0; };
  const auto first = std::find_if(queries.begin(), queries.end(), has_rows) - queries.begin();
  const auto last = queries.rend() - std::find_if(queries.rbegin(), queries.rend(), has_rows) - 1;
  int64_t scores = 0;
  for (size_t i = 0; i < queries.size(); ++i) {
    const int64_t rows = queries[i].size(1);
    if (rows == 0) continue;
    const VisibleKeys visible = visible_keys(call, rows, keys.at(i).size(1), static_cast<int64_t>(i), first, last);
    for (int64_t row = 0; row < rows; ++row) scores += std::max<int64_t>(visible.end(row) - visible.begin(row), 0);
  }
  return static_cast<double>(scores);
}

Work attention(bool backward, const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
               const OptionalInts& prefix, int64_t pre_tokens, int64_t next_tokens, int64_t heads, const std::string& layout,
               int64_t sparse_mode, const OptionalInts& query_ends, const OptionalInts& key_ends,
               const OptionalTensor& query_rope) {
  const AttentionCall call{.query = query, .key = key, .value = value, .pse = {}, .drop_mask = {}, .padding_mask = {},
                           .mask = mask, .prefix = prefix, .scale = 1, .keep_probability = 1, .pre_tokens = pre_tokens,
                           .next_tokens = next_tokens, .heads = heads, .layout = layout, .inner_precise = 0,
                           .sparse_mode = sparse_mode, .query_ends = query_ends, .key_ends = key_ends};
  Work work{.kind = "attention"};
  try {
    const Tensors queries = split_sequences(query, call, heads, query_ends);
    const Tensors keys = split_sequences(key, call, key_heads(call), key_ends);
    const Tensors values = split_sequences(value, call, key_heads(call), key_ends);
    int64_t longest = 0;
    for (const Tensor& one : keys) longest = std::max(longest, one.size(1));
    // Forward: scores and sums. Backward: the scores again, and the gradients of weights, value, query and key.
    const int64_t width = keys.at(0).size(2) + (query_rope ? query_rope->size(-1) : 0), value_width = values.at(0).size(2);
    const int64_t products = backward ? 3 * width + 2 * value_width : width + value_width;
    work.flop = 2 * visible_scores(call, queries, keys) * static_cast<double>(heads * products);
    work.keys = longest;
  } catch (const std::exception&) {
  }
  return work;
}

}  // namespace sim
