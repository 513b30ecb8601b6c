#include "aclnn/operator.h"

namespace sim {

void missing_argument(const char* kind) {
  throw Failure(ACL_ERROR_INVALID_PARAM, std::string(kind) + " is a null pointer");
}

void check_unknown(const char* name, const DynamicTensor& result) {
  constexpr int64_t kPrinted = 1000;  // torch summarizes larger tensors
  if (name == std::string_view("aclnnMaskedSelect") && result.room.numel() <= kPrinted) return;
  throw Failure(ACL_ERROR_API_NOT_SUPPORT, "the size of its result depends on numbers that a dry run does not compute");
}

const Tensor& on_device(const aclTensor& handle) {
  if (handle.mapped)
    throw Failure(ACL_ERROR_INVALID_PARAM, "this operator takes no tensor in host memory that is mapped to the device");
  return handle.value;
}

Tensors tensors_of(const aclTensorList* list) {
  Tensors result;
  for (const aclTensor* tensor : list->tensors) result.push_back(tensor == nullptr ? Tensor() : on_device(*tensor));
  return result;
}

Scalars Argument<const Scalars&>::keep(const aclScalarList* list) {
  if (list == nullptr) missing_argument("a required list of scalars");
  Scalars result;
  for (const aclScalar* scalar : list->scalars) result.push_back(scalar->value);
  return result;
}

void DynamicTensor::assign(const Tensor& value) {
  room.flatten().narrow(0, 0, value.numel()).copy_(value.flatten());
  *shape = value.sizes().vec();
}

void touch(std::vector<Touch>& touches, const Tensor& tensor, Access access) {
  if (tensor.defined() && tensor.numel() > 0) touches.push_back({.tensor = tensor, .access = access});
}

int launch(const char* name, aclOpExecutor* executor, aclrtStream stream) {
  const std::unique_ptr<aclOpExecutor> owned(executor);
  return reported(name, ACL_ERROR_INTERNAL_ERROR, [&] {
    if (owned->launched) owned->account.communication = owned->launched();
    stream_of(stream).push({.name = owned->name,
                            .work = std::move(owned->work),
                            .account = std::move(owned->account),
                            .dispatch = owned->dispatch,
                            .computes = true,
                            .unknown = std::move(owned->unknown)});
  });
}

// Called for an operator that is not simulated: ds_npu/simulator/build.py writes one for each that torch_npu can call.
int not_simulated(const char* name) {
  return reported(name, ACL_ERROR_API_NOT_SUPPORT, [&] {
    throw Failure(ACL_ERROR_API_NOT_SUPPORT,
                  "this operator is not simulated. Add it under ds_npu/simulator/csrc/aclnn: operator.h says how");
  });
}

}  // namespace sim
