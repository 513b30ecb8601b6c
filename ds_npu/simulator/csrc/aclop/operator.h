// An operator of the old interface, aclop, from a C++ function over ATen tensors.
//
//   GRAPH_OPERATOR(Name) { call.outputs[0].copy_(call.inputs[0] * call.attributes.at("scale")); }
//
// torch_npu names such an operator with a string, and gives contiguous tensors in the order of CANN's definition of it.
// torch_npu takes this road only where there is no aclnn operator for the device.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

namespace sim {

struct GraphCall {
  std::vector<at::Tensor> inputs;  // undefined where an optional one was left out
  std::vector<at::Tensor> outputs;
  std::map<std::string, at::Scalar> attributes;
};

using GraphOperator = void (*)(const GraphCall&);

struct GraphRegistration {
  GraphRegistration(const char* type, GraphOperator body);
};

}  // namespace sim

// The body is a visible function, so that the list of what is simulated finds it.
#define GRAPH_OPERATOR(TYPE)                                                                              \
  extern "C" __attribute__((visibility("default"))) void aclop##TYPE(const sim::GraphCall& call);         \
  static const sim::GraphRegistration TYPE##_registration(#TYPE, aclop##TYPE);                            \
  void aclop##TYPE(const sim::GraphCall& call)
