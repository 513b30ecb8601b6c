// Creates and destroys the objects through which aclnn operators get their arguments.
#include "aclnn/handles.h"

#include <algorithm>
#include <cstring>

#include "api.h"
#include "device.h"

namespace sim {

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    default: throw Failure(ACL_ERROR_UNSUPPORTED_DATA_TYPE, "the data type " + std::to_string(type) + " is not simulated");
  }
}

namespace {

// Whether it is host memory that is mapped to the device. Other host memory in place of device memory is a fault on an NPU;
// without this check it would work here.
bool lies_in_mapped_memory(const void* data, size_t bytes) {
  if (bytes == 0 || device_of(data) != nullptr) return false;
  if (is_mapped(data, bytes)) return true;
  throw Failure(ACL_ERROR_INVALID_PARAM, "a tensor given to an operator does not lie in device memory");
}

template <class T>
at::Scalar read(const void* value) {
  T result;
  std::memcpy(&result, value, sizeof result);
  return at::Scalar(result);
}

at::Scalar read_scalar(const void* value, aclDataType type) {
  switch (scalar_type(type)) {
    case at::kFloat: return read<float>(value);
    case at::kDouble: return read<double>(value);
    case at::kHalf: return read<at::Half>(value);
    case at::kBFloat16: return read<at::BFloat16>(value);
    case at::kBool: return read<bool>(value);
    case at::kChar: return read<int8_t>(value);
    case at::kShort: return read<int16_t>(value);
    case at::kInt: return read<int32_t>(value);
    case at::kByte: return read<uint8_t>(value);
    case at::kLong: return read<int64_t>(value);
    default: throw Failure(ACL_ERROR_UNSUPPORTED_DATA_TYPE, "a scalar of type " + std::to_string(type) + " is not simulated");
  }
}

}  // namespace
}  // namespace sim

SIM_PLAIN aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, aclDataType type, const int64_t* strides,
                                     int64_t offset, aclFormat, const int64_t* storage_dims, uint64_t storage_rank,
                                     void* data) {
  try {
    const auto dtype = sim::scalar_type(type);
    const at::IntArrayRef sizes(dims, rank);
    int64_t storage = 1;
    for (uint64_t i = 0; i < storage_rank; ++i) storage *= storage_dims[i];
    const size_t bytes = data == nullptr ? 0 : static_cast<size_t>(storage) * c10::elementSize(dtype);
    const bool mapped = sim::lies_in_mapped_memory(data, bytes);
    auto* first = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(dtype));
    at::Tensor value = at::from_blob(first, sizes, at::IntArrayRef(strides, rank), at::TensorOptions(dtype));
    return new aclTensor{std::move(value), std::make_shared<std::vector<int64_t>>(sizes.vec()), mapped};
  } catch (const std::exception& error) {
    sim::set_recent_error(std::string("aclCreateTensor: ") + error.what());
    return nullptr;
  }
}

SIM_PLAIN aclScalar* aclCreateScalar(void* value, aclDataType type) {
  try {
    return new aclScalar{sim::read_scalar(value, type)};
  } catch (const std::exception& error) {
    sim::set_recent_error(std::string("aclCreateScalar: ") + error.what());
    return nullptr;
  }
}

SIM_PLAIN aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
SIM_PLAIN aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
SIM_PLAIN aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
SIM_PLAIN aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  return new aclTensorList{{tensors, tensors + count}};
}
SIM_PLAIN aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t count) {
  return new aclScalarList{{scalars, scalars + count}};
}

SIM_API(int, aclDestroyTensor, (const aclTensor* tensor)) { delete tensor; }
SIM_API(int, aclDestroyScalar, (const aclScalar* scalar)) { delete scalar; }
SIM_API(int, aclDestroyIntArray, (const aclIntArray* array)) { delete array; }
SIM_API(int, aclDestroyBoolArray, (const aclBoolArray* array)) { delete array; }
SIM_API(int, aclDestroyFloatArray, (const aclFloatArray* array)) { delete array; }

// A list owns its members.
SIM_API(int, aclDestroyTensorList, (const aclTensorList* list)) {
  for (const aclTensor* tensor : list->tensors) delete tensor;
  delete list;
}
SIM_API(int, aclDestroyScalarList, (const aclScalarList* list)) {
  for (const aclScalar* scalar : list->scalars) delete scalar;
  delete list;
}

// The caller owns the dimensions and frees them with delete[].
SIM_API(int, aclGetViewShape, (const aclTensor* tensor, int64_t** dims, uint64_t* rank)) {
  *rank = tensor->shape->size();
  *dims = new int64_t[tensor->shape->size()];
  std::ranges::copy(*tensor->shape, *dims);
}
