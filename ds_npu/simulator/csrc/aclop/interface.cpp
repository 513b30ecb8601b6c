// The old road to an operator: aclop, described by its name, compiled as a graph. torch_npu takes it when an aclnn operator
// is missing, so what is not simulated must say which one it is, and never succeed.
#include <cstdint>
#include <cstring>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "aclnn/handles.h"
#include "aclop/operator.h"
#include "api.h"
#include "device.h"
#include "stream.h"

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
};

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

struct aclopAttr {
  std::map<std::string, at::Scalar> values;
};

namespace {

std::map<std::string, sim::GraphOperator>& operators() {
  static auto* all = new std::map<std::string, sim::GraphOperator>;
  return *all;
}

// A view of device memory, or a copy of host memory, which is the caller's again when the call returns.
at::Tensor tensor_of(const aclTensorDesc* desc, const aclDataBuffer* buffer) {
  if (desc->type == ACL_DT_UNDEFINED || buffer->data == nullptr) return {};
  const at::Tensor view = at::from_blob(buffer->data, desc->dims, at::TensorOptions(sim::scalar_type(desc->type)));
  return sim::device_of(buffer->data) == nullptr ? view.clone() : view;
}

std::vector<at::Tensor> tensors_of(int count, const aclTensorDesc* const descs[], const aclDataBuffer* const buffers[]) {
  std::vector<at::Tensor> result;
  for (int i = 0; i < count; ++i) result.push_back(tensor_of(descs[i], buffers[i]));
  return result;
}

void run(const char* type, sim::GraphCall call, aclrtStream stream) {
  const auto found = operators().find(type);
  if (found == operators().end())
    throw sim::Failure(ACL_ERROR_OP_NOT_FOUND,
                       std::string("the operator ") + type + " is not simulated: torch_npu asks for it by the old aclop "
                       "interface, so the aclnn operator it prefers is missing, or there is none. Add the one under "
                       "ds_npu/simulator/csrc/aclnn, the other under csrc/aclop");
  std::vector<sim::Touch> touches;
  const auto touch = [&](const std::vector<at::Tensor>& tensors, sim::Access access) {
    for (const at::Tensor& one : tensors)
      if (one.defined() && sim::device_of(one.data_ptr()) != nullptr) touches.push_back({.tensor = one, .access = access});
  };
  touch(call.inputs, sim::Access::kRead);
  touch(call.outputs, sim::Access::kWritten);
  sim::stream_of(stream).push({.name = found->first.c_str(),
                               .work = [body = found->second, call = std::move(call)] { body(call); },
                               .account = sim::account_of(sim::streaming(), std::move(touches)),
                               .dispatch = sim::Dispatch::kFused,
                               .computes = true});
}

}  // namespace

sim::GraphRegistration::GraphRegistration(const char* type, GraphOperator body) { operators()[type] = body; }

SIM_PLAIN aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, format, {dims, dims + count}};
}
SIM_PLAIN void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
SIM_PLAIN aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
SIM_PLAIN aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
SIM_PLAIN size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
SIM_PLAIN void aclSetTensorDescName(aclTensorDesc*, const char*) {}
SIM_PLAIN aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) {
  return new aclDataBuffer{.data = data, .bytes = bytes};
}
SIM_PLAIN aclopAttr* aclopCreateAttr() { return new aclopAttr; }
SIM_PLAIN void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }

SIM_API(aclError, aclGetTensorDescDimV2, (const aclTensorDesc* desc, size_t index, int64_t* size)) {
  if (index >= desc->dims.size()) throw sim::Failure(ACL_ERROR_INVALID_PARAM, "the tensor has fewer dimensions");
  *size = desc->dims[index];
}
SIM_API(aclError, aclDestroyDataBuffer, (const aclDataBuffer* buffer)) { delete buffer; }
SIM_API(aclError, aclSetTensorFormat, (aclTensorDesc*, aclFormat)) {}
SIM_API(aclError, aclSetTensorShape, (aclTensorDesc*, int, const int64_t*)) {}
SIM_API(aclError, aclSetTensorPlaceMent, (aclTensorDesc*, aclMemType)) {}
SIM_API(aclError, aclopSetAttrBool, (aclopAttr * attr, const char* name, uint8_t value)) { attr->values[name] = value != 0; }
SIM_API(aclError, aclopSetAttrInt, (aclopAttr * attr, const char* name, int64_t value)) { attr->values[name] = value; }
SIM_API(aclError, aclopSetAttrFloat, (aclopAttr * attr, const char* name, float value)) { attr->values[name] = value; }
// No operator here has one of these.
SIM_API(aclError, aclopSetAttrString, (aclopAttr*, const char*, const char*)) {}
SIM_API(aclError, aclopSetAttrDataType, (aclopAttr*, const char*, aclDataType)) {}
SIM_API(aclError, aclopSetAttrListBool, (aclopAttr*, const char*, int, const uint8_t*)) {}
SIM_API(aclError, aclopSetAttrListInt, (aclopAttr*, const char*, int, const int64_t*)) {}
SIM_API(aclError, aclopSetAttrListFloat, (aclopAttr*, const char*, int, const float*)) {}
SIM_API(aclError, aclopSetAttrListListInt, (aclopAttr*, const char*, int, const int*, const int64_t* const[])) {}

SIM_API(aclError, aclopCompileAndExecute,
        (const char* type, int input_count, const aclTensorDesc* const input_descs[], const aclDataBuffer* const inputs[],
         int output_count, const aclTensorDesc* const output_descs[], aclDataBuffer* const outputs[], const aclopAttr* attr,
         aclopEngineType, aclopCompileType, const char*, aclrtStream stream)) {
  auto given = tensors_of(input_count, input_descs, inputs);
  run(type, {std::move(given), tensors_of(output_count, output_descs, outputs), attr->values}, stream);
}

SIM_API(aclError, aclopCompileAndExecuteV2,
        (const char* type, int input_count, aclTensorDesc* input_descs[], aclDataBuffer* inputs[], int output_count,
         aclTensorDesc* output_descs[], aclDataBuffer* outputs[], aclopAttr* attr, aclopEngineType, aclopCompileType,
         const char*, aclrtStream stream)) {
  auto given = tensors_of(input_count, input_descs, inputs);
  run(type, {std::move(given), tensors_of(output_count, output_descs, outputs), attr->values}, stream);
}
