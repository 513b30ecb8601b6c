// Choices of experts that are drawn, not computed: `ds_npu sim --routing`, and in each dry run, which knows no scores.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>

namespace sim {

// Of each row of `scores` along `dim`, `k` different columns: the same for the same seed, NPU and sizes, since a recomputation
// has to choose what was chosen before. Empty where choices are not drawn, or the scores are integers.
std::optional<at::Tensor> drawn_choices(const at::Tensor& scores, int64_t k, int64_t dim);

}  // namespace sim
