// The old road to an operator (aclop: described by name, compiled as a graph). Nothing on it is simulated: torch_npu takes
// it when an aclnn operator is missing, so it must say which one, and never succeed.
#include <cstdint>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "api.h"

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
};

struct aclDataBuffer {
  void* data;
  size_t bytes;
};

struct aclopAttr {};

namespace {

[[noreturn]] void refuse(const char* type) {
  throw sim::Failure(ACL_ERROR_OP_NOT_FOUND,
                     std::string("the operator ") + type + " is not simulated: torch_npu asks for it by the old aclop interface, "
                     "which means that the aclnn operator it prefers is missing. Add that one under ds_npu/simulator/csrc/aclnn");
}

}  // namespace

SIM_PLAIN aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, format, {dims, dims + count}};
}
SIM_PLAIN void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
SIM_PLAIN aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
SIM_PLAIN aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
SIM_PLAIN size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
SIM_PLAIN void aclSetTensorDescName(aclTensorDesc*, const char*) {}
SIM_PLAIN aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
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
SIM_API(aclError, aclopSetAttrBool, (aclopAttr*, const char*, uint8_t)) {}
SIM_API(aclError, aclopSetAttrInt, (aclopAttr*, const char*, int64_t)) {}
SIM_API(aclError, aclopSetAttrFloat, (aclopAttr*, const char*, float)) {}
SIM_API(aclError, aclopSetAttrString, (aclopAttr*, const char*, const char*)) {}
SIM_API(aclError, aclopSetAttrDataType, (aclopAttr*, const char*, aclDataType)) {}
SIM_API(aclError, aclopSetAttrListBool, (aclopAttr*, const char*, int, const uint8_t*)) {}
SIM_API(aclError, aclopSetAttrListInt, (aclopAttr*, const char*, int, const int64_t*)) {}
SIM_API(aclError, aclopSetAttrListFloat, (aclopAttr*, const char*, int, const float*)) {}
SIM_API(aclError, aclopSetAttrListListInt, (aclopAttr*, const char*, int, const int*, const int64_t* const[])) {}

SIM_API(aclError, aclopCompileAndExecute,
        (const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int, const aclTensorDesc* const[],
         aclDataBuffer* const[], const aclopAttr*, aclopEngineType, aclopCompileType, const char*, aclrtStream)) {
  refuse(type);
}

SIM_API(aclError, aclopCompileAndExecuteV2,
        (const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[], aclDataBuffer*[], aclopAttr*,
         aclopEngineType, aclopCompileType, const char*, aclrtStream)) {
  refuse(type);
}
