// Mixture of experts: tokens copied into the order of the experts, and brought back.
//
// positions[i] is the row among the permuted tokens of the i-th of (token, choice), in the order of tokens.
#include "aclnn/operator.h"

using namespace sim;

static void refuse_padding(bool padded_mode) {
  if (padded_mode) throw Failure(ACL_ERROR_API_NOT_SUPPORT, "paddedMode true: CANN supports only false here");
}

// The indices that sort `keys`; the sort is stable.
static Tensor stable_order(const Tensor& keys) { return std::get<1>(at::sort(keys, true, 0, false)); }

// [tokens, choices, hidden]: each token's rows of `permuted`; zeros for what was dropped: positions beyond the last row.
static Tensor gathered(const Tensor& permuted, const Tensor& positions, int64_t choices) {
  const int64_t rows = permuted.size(0), count = positions.numel(), hidden = permuted.size(1);
  if (rows == 0) return at::zeros({count / choices, choices, hidden}, permuted.options());
  const bool dropped = rows < count;
  Tensor result = permuted.index_select(0, dropped ? positions.clamp_max(rows - 1) : positions);
  if (dropped) result.masked_fill_(positions.ge(rows).unsqueeze(1), 0);
  return result.reshape({count / choices, choices, hidden});
}

// Each token's rows summed in float32.
static void sum_choices(const Tensor& out, const Tensor& rows) {
  Tensor target = out;
  if (rows.size(1) == 1) {
    target.copy_(rows.squeeze(1));
  } else if (rows.scalar_type() == target.scalar_type()) {
    at::sum_out(target, rows, {1});
  } else {
    target.copy_(rows.sum(1));
  }
}

// permuted[positions[i]] = source[i]; a dropped one is left out.
static void scatter_rows(const Tensor& permuted, const Tensor& positions, const Tensor& source) {
  Tensor target = permuted;
  if (permuted.size(0) == positions.numel()) {
    target.index_copy_(0, positions.to(at::kLong), source.to(permuted.scalar_type()));
    return;
  }
  const Tensor kept = positions.lt(permuted.size(0)).nonzero().squeeze(1);
  target.zero_();
  target.index_copy_(0, positions.index_select(0, kept).to(at::kLong),
                     source.index_select(0, kept).to(permuted.scalar_type()));
}

static int64_t choices_of(int64_t count, int64_t tokens) {
  if (tokens == 0) return 1;
  if (count % tokens != 0)
    throw Failure(ACL_ERROR_INVALID_PARAM,
                  std::to_string(count) + " permuted tokens are not the same number for each of " + std::to_string(tokens));
  return std::max<int64_t>(count / tokens, 1);
}

ACLNN(MoeTokenPermute, streaming(),
      (const Tensor& tokens, const Tensor& indices, int64_t, bool padded_mode, Tensor& permuted, Tensor& positions)) {
  refuse_padding(padded_mode);
  const Tensor order = stable_order(indices.reshape({indices.numel()}));
  Tensor inverse = at::empty_like(order);
  inverse.index_copy_(0, order, at::arange(order.numel(), order.options()));
  positions.copy_(inverse);
  const int64_t choices = choices_of(indices.numel(), tokens.size(0));
  at::index_select_out(permuted, tokens, 0, order.narrow(0, 0, permuted.size(0)).floor_divide(choices));
}

ACLNN(MoeTokenPermuteGrad, streaming(),
      (const Tensor& grad, const Tensor& positions, int64_t choices, bool padded_mode, Tensor& dtokens)) {
  refuse_padding(padded_mode);
  sum_choices(dtokens, gathered(grad, positions.reshape({positions.numel()}), choices));
}

ACLNN(MoeTokenUnpermute, streaming(),
      (const Tensor& permuted, const Tensor& positions, const OptionalTensor& probs, bool padded_mode, const OptionalInts&,
       Tensor& out)) {
  refuse_padding(padded_mode);
  const Tensor rows = gathered(permuted, positions, probs ? probs->size(1) : 1);
  sum_choices(out, probs ? rows * probs->to(at::kFloat).unsqueeze(2) : rows);
}

ACLNN(MoeTokenUnpermuteGrad, streaming(),
      (const OptionalTensor& permuted, const Tensor& grad, const Tensor& positions, const OptionalTensor& probs,
       bool padded_mode, const OptionalInts&, Tensor& dpermuted, Written<OptionalTensor>& dprobs)) {
  refuse_padding(padded_mode);
  if (!probs) return scatter_rows(dpermuted, positions, grad);
  if (!permuted || !dprobs) throw Failure(ACL_ERROR_INVALID_PARAM, "the gradient of probs needs permutedTokens");
  const Tensor wide = grad.to(at::kFloat).unsqueeze(1);
  const Tensor weighted = wide * probs->to(at::kFloat).unsqueeze(2);
  scatter_rows(dpermuted, positions, weighted.reshape({positions.numel(), grad.size(1)}));
  dprobs->copy_((gathered(*permuted, positions, probs->size(1)) * wide).sum(2));
}

// --- with a map of booleans, [tokens, experts]

static Tensor experts_first(const Tensor& map) { return map.to(at::kBool).t().contiguous(); }

// Without padding every token must have the same number of experts, as CANN documents.
static void check_map(const Tensor& map, int64_t rows) {
  const Tensor chosen = map.to(at::kBool).sum(1);
  const int64_t choices = choices_of(rows, map.size(0));
  if (map.size(0) > 0 && !chosen.eq(choices).all().item<bool>())
    throw Failure(ACL_ERROR_INVALID_PARAM, "routing map: not every token has " + std::to_string(choices) +
                                               " experts, which is numOutTokens by the number of tokens");
}

// [experts * capacity]: for each expert, the flat indices of its tokens in a matrix [experts, tokens].
static Tensor padded_places(const Tensor& token_of_row, int64_t experts, int64_t tokens) {
  const Tensor row = token_of_row.to(at::kLong).reshape({experts, -1});
  return (at::arange(experts, row.options()).unsqueeze(1) * tokens + row).view({-1});
}

ACLNN(MoeTokenPermuteWithRoutingMap, streaming(),
      (const Tensor& tokens, const Tensor& map, const OptionalTensor& probs, int64_t, bool drop_and_pad, Tensor& permuted,
       Written<OptionalTensor>& permuted_probs, Tensor& sorted_indices)) {
  const int64_t count = map.size(0), experts = map.size(1);
  const Tensor chosen = experts_first(map);
  Tensor token_of_row;
  if (drop_and_pad) {
    const int64_t capacity = permuted.size(0) / experts;
    const Tensor first_chosen = std::get<1>(at::sort(chosen.to(at::kChar), true, 1, true));
    token_of_row = first_chosen.narrow(1, 0, capacity).reshape({experts * capacity});
    sorted_indices.copy_(token_of_row);
    if (probs && permuted_probs) {
      const Tensor flat = probs->t().reshape({experts * count});
      permuted_probs->copy_(flat.index_select(0, padded_places(token_of_row, experts, count)));
    }
  } else {
    check_map(map, permuted.size(0));
    token_of_row = chosen.nonzero().select(1, 1).contiguous();
    sorted_indices.copy_(stable_order(token_of_row));
    if (probs && permuted_probs) permuted_probs->copy_(probs->t().masked_select(chosen));
  }
  at::index_select_out(permuted, tokens, 0, token_of_row);
}

ACLNN(MoeTokenPermuteWithRoutingMapGrad, streaming(),
      (const Tensor& grad, const OptionalTensor& grad_probs, const Tensor& sorted_indices, const OptionalTensor& map,
       int64_t experts, int64_t tokens, bool drop_and_pad, Tensor& dtokens, Written<OptionalTensor>& dprobs)) {
  if (drop_and_pad) {
    const Tensor wide = at::zeros(dtokens.sizes(), dtokens.options().dtype(at::kFloat));
    dtokens.copy_(at::index_add(wide, 0, sorted_indices, grad.to(at::kFloat)));
  } else {
    sum_choices(dtokens, gathered(grad, sorted_indices, choices_of(grad.size(0), tokens)));
  }
  if (!grad_probs || !dprobs) return;
  Tensor by_expert = at::zeros({experts, tokens}, dprobs->options());
  const Tensor source = grad_probs->to(by_expert.scalar_type());
  if (drop_and_pad) {
    by_expert.view({-1}).index_copy_(0, padded_places(sorted_indices, experts, tokens), source);
  } else {
    if (!map) throw Failure(ACL_ERROR_INVALID_PARAM, "the gradient of probs needs routingMap");
    // CANN's formula scatters by the map as it is; the forward took probs by experts first, so its gradient goes there too.
    by_expert.masked_scatter_(experts_first(*map), source);
  }
  dprobs->copy_(by_expert.t());
}

// out_index and token_of_row are for the gradient with padding; without, they stay as they are and torch_npu does not use them.
ACLNN(MoeTokenUnpermuteWithRoutingMap, streaming(),
      (const Tensor& permuted, const Tensor& sorted_indices, const OptionalTensor& map, const OptionalTensor& probs,
       bool drop_and_pad, const OptionalInts&, Tensor& out, Tensor& out_index, Tensor& token_of_row,
       Written<OptionalTensor>& permuted_probs)) {
  Tensor weights;
  if (probs && drop_and_pad) {
    const Tensor flat = probs->t().reshape({probs->numel()});
    weights = flat.index_select(0, padded_places(sorted_indices, probs->size(1), probs->size(0)));
  } else if (probs) {
    if (!map) throw Failure(ACL_ERROR_INVALID_PARAM, "unpermute with probs needs routingMap");
    check_map(*map, permuted.size(0));
    weights = probs->t().masked_select(experts_first(*map));
  }
  if (weights.defined() && permuted_probs) permuted_probs->copy_(weights);
  const Tensor rows = weights.defined() ? permuted * weights.to(at::kFloat).unsqueeze(1) : permuted;
  if (!drop_and_pad) return sum_choices(out, gathered(rows, sorted_indices, choices_of(permuted.size(0), out.size(0))));
  const auto [token, order] = at::sort(sorted_indices, true, 0, false);
  token_of_row.copy_(token);
  out_index.copy_(order);
  const Tensor zeros = at::zeros(out.sizes(), out.options().dtype(at::kFloat));
  out.copy_(at::index_add(zeros, 0, sorted_indices, rows.to(at::kFloat)));
}

ACLNN(MoeTokenUnpermuteWithRoutingMapGrad, streaming(),
      (const Tensor& grad, const Tensor& out_index, const Tensor& token_of_row, const OptionalTensor& map,
       const OptionalTensor& permuted, const OptionalTensor& probs, bool drop_and_pad, const OptionalInts&, Tensor& dpermuted,
       Written<OptionalTensor>& dprobs)) {
  const int64_t rows = out_index.numel(), tokens = grad.size(0);
  const Tensor place = out_index.to(at::kLong);
  // token[i] is whose gradient the permuted row place[i] gets.
  const Tensor token = drop_and_pad ? token_of_row.to(at::kLong)
                                    : at::arange(rows, place.options()).floor_divide_(choices_of(rows, tokens));
  const Tensor spread = at::empty({rows, grad.size(1)}, grad.options()).index_copy_(0, place, grad.index_select(0, token));
  if (!probs) {
    dpermuted.copy_(spread);
    return;
  }
  if (!permuted || !dprobs || (!drop_and_pad && !map))
    throw Failure(ACL_ERROR_INVALID_PARAM, "the gradient of probs needs permutedTokens, and routingMap without padding");
  const Tensor wide = spread.to(at::kFloat);
  const Tensor dweights = (wide * *permuted).sum(1).to(dprobs->scalar_type());
  Tensor by_expert = at::zeros({probs->size(1), probs->size(0)}, dprobs->options()), weights;
  if (drop_and_pad) {
    const Tensor sorted_indices = at::empty_like(place).index_copy_(0, place, token);
    const Tensor places = padded_places(sorted_indices, probs->size(1), probs->size(0));
    weights = probs->t().reshape({probs->numel()}).index_select(0, places);
    by_expert.view({-1}).index_copy_(0, places, dweights);
  } else {
    const Tensor chosen = experts_first(*map);
    weights = probs->t().masked_select(chosen);
    by_expert.masked_scatter_(chosen, dweights);
  }
  dpermuted.copy_(wide * weights.to(at::kFloat).unsqueeze(1));
  dprobs->copy_(by_expert.t());
}
