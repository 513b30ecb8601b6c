// One product of matrices for each group (expert): y_g = x_g @ weight_g + bias_g.
#include "aclnn/operator.h"

using namespace sim;

enum GroupType : int64_t { not_split = -1, split_rows = 0, split_inner = 2 };
enum GroupListType : int64_t { cumulative = 0, counts = 1, indices_and_counts = 2 };

// Rows of x (or of the inner dim) that one group takes, and which weight.
struct Group {
  int64_t weight, begin, rows;
};

[[noreturn]] static void refuse(const std::string& what) {
  throw Failure(ACL_ERROR_API_NOT_SUPPORT, "grouped matmul: " + what + " is not simulated");
}

static void refuse_quantized(const OptionalTensors& tensors, const char* name) {
  if (!tensors) return;
  for (const Tensor& tensor : *tensors)
    if (tensor.numel() > 0) refuse(name);
}

static void check_types(const Tensors& x, const Tensors& weight) {
  for (const Tensors* tensors : {&x, &weight})
    for (const Tensor& tensor : *tensors)
      if (tensor.scalar_type() != at::kFloat && !at::isReducedFloatingType(tensor.scalar_type()))
        refuse(std::string("an operand of type ") + at::toString(tensor.scalar_type()));
}

// y = x @ weight + bias, summed in float32.
static void multiply(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor left = x.to(at::kFloat), right = weight.to(at::kFloat);
  const Tensor product = bias.defined() ? at::addmm(bias.to(at::kFloat), left, right) : at::mm(left, right);
  y.copy_(product);
}

// The groups that `list` says, which must fit into `total` rows.
static std::vector<Group> groups_of(const Ints& list, int64_t list_type, int64_t total) {
  std::vector<Group> groups;
  const size_t width = list_type == indices_and_counts ? 2 : 1;
  int64_t begin = 0;
  for (size_t i = 0; i + width <= list.size(); i += width) {
    const int64_t index = static_cast<int64_t>(i / width);
    const int64_t rows = list_type == cumulative ? list[i] - begin : list[i + width - 1];
    if (rows < 0 || begin + rows > total)
      throw Failure(ACL_ERROR_INVALID_PARAM, "group_list: group " + std::to_string(index) + " takes rows " +
                                                 std::to_string(begin) + " to " + std::to_string(begin + rows) + " of " +
                                                 std::to_string(total));
    groups.push_back({.weight = width == 2 ? list[i] : index, .begin = begin, .rows = rows});
    begin += rows;
  }
  return groups;
}

static std::vector<Group> groups_of(const Tensors& x) {
  std::vector<Group> groups;
  int64_t begin = 0;
  for (const Tensor& part : x) {
    groups.push_back({.weight = static_cast<int64_t>(groups.size()), .begin = begin, .rows = part.size(0)});
    begin += part.size(0);
  }
  return groups;
}

// One matrix for each group, from a list of them or from one tensor with a dim for the groups.
static Tensors each(const Tensors& list, int64_t dims) {
  return list.size() == 1 && list[0].dim() == dims + 1 ? list[0].unbind(0) : list;
}

static Tensor bias_of(const Tensors& biases, size_t group) { return biases.empty() ? Tensor() : biases.at(group); }

// Each x with its own weight; x may have more dims than two, all but the last of which are rows.
static void multiply_each(const Tensors& x, const Tensors& weight, const Tensors& bias, const Tensors& y) {
  if (x.size() != weight.size() || x.size() != y.size())
    throw Failure(ACL_ERROR_INVALID_PARAM, "grouped matmul: x, weight and y are lists of different lengths");
  for (size_t i = 0; i < x.size(); ++i) {
    if (y[i].numel() == 0) continue;
    const Tensor left = x[i].reshape({x[i].numel() / std::max<int64_t>(x[i].size(-1), 1), x[i].size(-1)});
    if (y[i].is_contiguous()) {
      multiply(left, weight[i], bias_of(bias, i), y[i].view({-1, y[i].size(-1)}));
    } else {
      Tensor room = at::empty({left.size(0), y[i].size(-1)}, y[i].options());
      multiply(left, weight[i], bias_of(bias, i), room);
      y[i].copy_(room.view(y[i].sizes()));
    }
  }
}

// Groups of rows: x is [M, K] or one [m, K] a group, y is [M, N] or one [m, N] a group.
static void multiply_rows(const Tensors& x, const Tensors& weights, const Tensors& biases, const std::vector<Group>& groups,
                          const Tensors& y) {
  const bool one_x = x.size() == 1, one_y = y.size() == 1;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto [index, begin, rows] = groups[i];
    const Tensor left = one_x ? x[0].narrow(0, begin, rows) : x.at(i);
    if (left.size(0) != rows)
      throw Failure(ACL_ERROR_INVALID_PARAM, "group_list: group " + std::to_string(i) + " has " + std::to_string(rows) +
                                                 " rows, its x " + std::to_string(left.size(0)));
    multiply(left, weights.at(index), bias_of(biases, index), one_y ? y[0].narrow(0, begin, rows) : y.at(i));
  }
}

// Groups of the inner dim: y_g = x[:, g] @ weight[g, :]; x is [M, K], weight [K, N].
static void multiply_inner(const Tensors& x, const Tensors& weight, const std::vector<Group>& groups, const Tensors& y) {
  if (x.size() != 1 || weight.size() != 1) refuse("group_type 2 with lists of x or weight");
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto [index, begin, rows] = groups[i];
    multiply(x[0].narrow(1, begin, rows), weight[0].narrow(0, begin, rows), Tensor(), y.at(index));
  }
}

static Ints host_list(const Tensor& list) {
  const Tensor values = list.to(at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

static void grouped_matmul(const Tensors& x, const Tensors& weight, const OptionalTensors& bias,
                           const OptionalTensor& group_list, int64_t group_type, int64_t list_type, int64_t activation,
                           const Tensors& y) {
  check_types(x, weight);
  if (activation != 0) refuse("act_type " + std::to_string(activation));
  if (list_type < cumulative || list_type > indices_and_counts) refuse("group_list_type " + std::to_string(list_type));
  const Tensors biases = bias ? each(*bias, 1) : Tensors();
  if (group_type == not_split) return multiply_each(x, weight, biases, y);
  if (group_type != split_rows && group_type != split_inner) refuse("group_type " + std::to_string(group_type));
  if (!group_list && group_type == split_inner)
    throw Failure(ACL_ERROR_INVALID_PARAM, "grouped matmul: group_type 2 needs group_list");
  if (group_type == split_inner) {
    if (!biases.empty()) refuse("a bias with group_type 2");
    return multiply_inner(x, weight, groups_of(host_list(*group_list), list_type, weight.at(0).size(0)), each(y, 2));
  }
  int64_t total = 0;
  for (const Tensor& part : x) total += part.size(0);
  const auto groups = group_list ? groups_of(host_list(*group_list), list_type, total) : groups_of(x);
  multiply_rows(x, each(weight, 2), biases, groups, y);
}

// The groups are taken to be of one size: which they have is known on the device only.
static Work groups(const Tensors& x, const Tensors& weight, const Tensors& y, bool inner) {
  const auto itemsize = static_cast<int64_t>(x.at(0).element_size());
  const int64_t columns = weight.at(0).size(-1), width = x[0].size(-1);
  const auto share = [](int64_t all, int64_t count) { return count == 0 ? 0 : (all + count - 1) / count; };
  if (inner) {
    int64_t results = 0;
    for (const Tensor& one : y) results += one.numel();
    const int64_t rows = x[0].size(0), count = rows * columns == 0 ? 0 : results / (rows * columns);
    return products(rows, columns, share(width, count), itemsize, count);
  }
  int64_t rows = 0;
  for (const Tensor& one : x) rows += width == 0 ? 0 : one.numel() / width;
  const int64_t count = weight.size() == 1 && weight[0].dim() == 3 ? weight[0].size(0) : static_cast<int64_t>(weight.size());
  return products(share(rows, count), columns, width, itemsize, count);
}

// With a list on the host: rows are split where there is one, or where several x go to one y.
ACLNN(GroupedMatmul, groups(x, weight, y, false),
      (const Tensors& x, const Tensors& weight, const OptionalTensors& bias, const OptionalTensors& scale,
       const OptionalTensors& offset, const OptionalTensors& antiquant_scale, const OptionalTensors& antiquant_offset,
       const OptionalInts& group_list, int64_t, Written<Tensors>& y)) {
  refuse_quantized(scale, "scale");
  refuse_quantized(offset, "offset");
  refuse_quantized(antiquant_scale, "antiquant_scale");
  refuse_quantized(antiquant_offset, "antiquant_offset");
  const bool has_list = group_list && !group_list->empty();
  const bool split = has_list || (x.size() > 1 && y.size() == 1);
  const OptionalTensor list = has_list ? OptionalTensor(at::tensor(*group_list, at::kLong)) : OptionalTensor();
  grouped_matmul(x, weight, bias, list, split ? split_rows : not_split, cumulative, 0, y);
}

ACLNN(GroupedMatmulV4, groups(x, weight, y, group_type == split_inner),
      (const Tensors& x, const Tensors& weight, const OptionalTensors& bias, const OptionalTensors& scale,
       const OptionalTensors& offset, const OptionalTensors& antiquant_scale, const OptionalTensors& antiquant_offset,
       const OptionalTensors& per_token_scale, const OptionalTensor& group_list, const OptionalTensors& activation_input,
       const OptionalTensors& activation_quant_scale, const OptionalTensors& activation_quant_offset, int64_t,
       int64_t group_type, int64_t list_type, int64_t activation, Written<Tensors>& y, const OptionalTensors&,
       const OptionalTensors&)) {
  refuse_quantized(scale, "scale");
  refuse_quantized(offset, "offset");
  refuse_quantized(antiquant_scale, "antiquant_scale");
  refuse_quantized(antiquant_offset, "antiquant_offset");
  refuse_quantized(per_token_scale, "per_token_scale");
  refuse_quantized(activation_input, "activation_input");
  refuse_quantized(activation_quant_scale, "activation_quant_scale");
  refuse_quantized(activation_quant_offset, "activation_quant_offset");
  grouped_matmul(x, weight, bias, group_list, group_type, list_type, activation, y);
}

// As V4, with a hint for tuning.
ACLNN(GroupedMatmulV5, groups(x, weight, y, group_type == split_inner),
      (const Tensors& x, const Tensors& weight, const OptionalTensors& bias, const OptionalTensors& scale,
       const OptionalTensors& offset, const OptionalTensors& antiquant_scale, const OptionalTensors& antiquant_offset,
       const OptionalTensors& per_token_scale, const OptionalTensor& group_list, const OptionalTensors& activation_input,
       const OptionalTensors& activation_quant_scale, const OptionalTensors& activation_quant_offset, int64_t split_item,
       int64_t group_type, int64_t list_type, int64_t activation, const OptionalInts&, Written<Tensors>& y,
       const OptionalTensors& activation_out, const OptionalTensors& quant_scale_out)) {
  GroupedMatmulV4_body(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, group_list,
                       activation_input, activation_quant_scale, activation_quant_offset, split_item, group_type, list_type,
                       activation, y, activation_out, quant_scale_out);
}

// y_g += x_g^T @ weight_g into float32: the gradient of the experts' weights, added to what is there.
ACLNN(GroupedMatmulAdd, groups({x.t()}, {weight}, {y}, true),
      (const Tensor& x, const Tensor& weight, const Tensor& group_list, Changed<Tensor>& y, bool transpose_x,
       bool transpose_weight, int64_t group_type)) {
  if (!transpose_x || transpose_weight) refuse("grouped matmul add with x not transposed, or weight transposed,");
  if (group_type != split_inner) refuse("grouped matmul add with group_type " + std::to_string(group_type));
  check_types({x}, {weight});
  const Ints list = host_list(group_list);
  const Tensors sums = (y.dim() == 3 ? y : y.unflatten(0, {static_cast<int64_t>(list.size()), x.size(1)})).unbind(0);
  const Tensor left = x.to(at::kFloat).t(), right = weight.to(at::kFloat);
  for (const auto& [index, begin, rows] : groups_of(list, cumulative, x.size(0)))
    sums.at(index).addmm_(left.narrow(1, begin, rows), right.narrow(0, begin, rows));
}
