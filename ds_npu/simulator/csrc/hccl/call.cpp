#include "hccl/call.h"

#include "failure.h"

namespace sim::hccl {
namespace {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::all_reduce: return "all_reduce";
    case Operation::all_gather: return "all_gather";
    case Operation::all_gather_v: return "all_gather_v";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::reduce_scatter_v: return "reduce_scatter_v";
    case Operation::broadcast: return "broadcast";
    case Operation::reduce: return "reduce";
    case Operation::scatter: return "scatter";
    case Operation::all_to_all: return "all_to_all";
    case Operation::all_to_all_v: return "all_to_all_v";
    case Operation::all_to_all_vc: return "all_to_all_vc";
    case Operation::barrier: return "barrier";
  }
  return "unknown operation";
}

std::string name_of(HcclReduceOp reduction) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return "sum";
    case HCCL_REDUCE_PROD: return "prod";
    case HCCL_REDUCE_MAX: return "max";
    case HCCL_REDUCE_MIN: return "min";
    default: return "reduction " + std::to_string(reduction);
  }
}

bool has_counts_for_each_peer(Operation operation) {
  return operation == Operation::all_gather_v || operation == Operation::reduce_scatter_v ||
         operation == Operation::all_to_all_v || operation == Operation::all_to_all_vc;
}

}  // namespace

bool agree(const Call& one, const Call& other) {
  return one.operation == other.operation && one.type == other.type && one.reduction == other.reduction &&
         one.root == other.root && one.count == other.count;
}

std::string describe(const Call& call) {
  std::string text = std::string(name_of(call.operation)) + "(";
  if (call.operation == Operation::barrier) return text + ")";
  if (call.reduction != HCCL_REDUCE_RESERVED) text += name_of(call.reduction) + ", ";
  if (!has_counts_for_each_peer(call.operation)) text += std::to_string(call.count) + " x ";
  text += name_of(call.type);
  if (call.root != ~0u) text += ", root " + std::to_string(call.root);
  return text + ")";
}

std::string name_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return "int8";
    case HCCL_DATA_TYPE_INT16: return "int16";
    case HCCL_DATA_TYPE_INT32: return "int32";
    case HCCL_DATA_TYPE_INT64: return "int64";
    case HCCL_DATA_TYPE_UINT8: return "uint8";
    case HCCL_DATA_TYPE_UINT16: return "uint16";
    case HCCL_DATA_TYPE_UINT32: return "uint32";
    case HCCL_DATA_TYPE_UINT64: return "uint64";
    case HCCL_DATA_TYPE_FP16: return "fp16";
    case HCCL_DATA_TYPE_FP32: return "fp32";
    case HCCL_DATA_TYPE_FP64: return "fp64";
    case HCCL_DATA_TYPE_BFP16: return "bf16";
    case HCCL_DATA_TYPE_FP8E4M3: return "fp8e4m3";
    case HCCL_DATA_TYPE_FP8E5M2: return "fp8e5m2";
    default: return "data type " + std::to_string(type);
  }
}

std::uint64_t bytes_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    default: throw Failure(HCCL_E_NOT_SUPPORT, name_of(type) + " is not simulated");
  }
}

}  // namespace sim::hccl
