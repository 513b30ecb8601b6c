// The objects through which aclnn operators get their arguments: aclTensor, aclScalar and lists of them. Each holds
// its ATen counterpart, so that an operator's arithmetic can be written in ATen.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "acl/acl_base.h"

// The result of aclGetViewShape; an operator whose output size depends on its input's values writes it while it runs.
using ViewShape = std::shared_ptr<std::vector<int64_t>>;

struct aclTensor {
  at::Tensor value;  // a view of device memory
  ViewShape shape;
  bool mapped;  // it lies in host memory that is mapped to the device, which few operators take
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};

namespace sim {

// Throws Failure for a type that ATen does not have.
at::ScalarType scalar_type(aclDataType type);

}  // namespace sim
