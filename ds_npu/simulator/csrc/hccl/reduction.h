// Sums, products, maxima and minima over the ranks' buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "hccl/hccl_types.h"

namespace sim::hccl {

// Throws Failure HCCL_E_NOT_SUPPORT.
void check_reducible(HcclDataType type, HcclReduceOp reduction);

// Combines `count` elements of each of `sources`, in their order, into `result`, which may be one of them. fp16 and bf16
// are rounded after each step, as where a device adds to what lies in its memory already (in-line reduction).
void reduce(HcclReduceOp reduction, HcclDataType type, const std::vector<const char*>& sources, std::uint64_t count,
            char* result);

// In a dry run: what a rank has received is known, or unknown numbers of a type.
void arrived(const void* buffer, std::uint64_t bytes, HcclDataType type, bool known);

}  // namespace sim::hccl
