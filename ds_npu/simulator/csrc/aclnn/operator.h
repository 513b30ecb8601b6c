// An aclnn operator from a C++ function over ATen tensors.
//
//   ACLNN(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
//     at::add_out(out, self, other, alpha);
//   }
//
// defines aclnnAddGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclScalar*, aclTensor*, uint64_t*,
// aclOpExecutor**) and aclnnAdd(void*, uint64_t, aclOpExecutor*, aclrtStream): the first takes the arguments, the second puts
// the function on the stream. The parameters' types give the C types, by Argument<> below; they must be those that CANN's
// documentation of the operator has, in its order. The body runs on the stream's thread, on CPU tensors that are views of
// device memory, with autograd off: what it throws stops the simulated device with that message.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "aclnn/handles.h"
#include "api.h"
#include "stream.h"

struct aclOpExecutor {
  const char* name;
  std::function<void()> work;
  std::function<void()> launched;  // on the host, right before the work is put on the stream; may be empty
};

namespace sim {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Scalars = std::vector<Scalar>;
using Ints = std::vector<int64_t>;
using Bools = std::vector<bool>;
using Floats = std::vector<float>;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = std::optional<Tensors>;
using OptionalInts = std::optional<Ints>;

// A tensor that may also lie in host memory that is mapped to the device (torch_npu.empty_with_swapped_memory).
struct MappedTensor {
  Tensor value;
};

// A result whose number of elements is known only when the operator has run: the tensor has room for the largest.
struct DynamicTensor {
  Tensor room;
  ViewShape shape;
  // Copies `value` into the front of the room and lets aclGetViewShape tell its sizes.
  void assign(const Tensor& value);
};

// How one parameter of an operator is passed through the C ABI: its C type, and what is stored until the operator runs.
template <class Parameter>
struct Argument;

[[noreturn]] void missing_argument(const char* kind);
// The tensor of a parameter that takes device memory only.
const Tensor& on_device(const aclTensor& handle);
Tensors tensors_of(const aclTensorList* list);

template <class Parameter>
struct ByValue {
  using C = Parameter;
  using Kept = Parameter;
  static Kept keep(C value) { return value; }
};
template <> struct Argument<bool> : ByValue<bool> {};
template <> struct Argument<int8_t> : ByValue<int8_t> {};
template <> struct Argument<int32_t> : ByValue<int32_t> {};
template <> struct Argument<uint32_t> : ByValue<uint32_t> {};
template <> struct Argument<int64_t> : ByValue<int64_t> {};
template <> struct Argument<uint64_t> : ByValue<uint64_t> {};
template <> struct Argument<float> : ByValue<float> {};
template <> struct Argument<double> : ByValue<double> {};

template <>
struct Argument<ScalarType> {
  using C = aclDataType;
  using Kept = ScalarType;
  static Kept keep(C type) { return scalar_type(type); }
};

template <>
struct Argument<const std::string&> {
  using C = const char*;
  using Kept = std::string;
  static Kept keep(C text) { return text == nullptr ? "" : text; }
};

template <class Handle, class Value>
struct Required {
  using C = const Handle*;
  using Kept = Value;
  static Kept keep(C handle) {
    if (handle == nullptr) missing_argument("a required argument");
    if constexpr (requires { handle->mapped; }) {
      return on_device(*handle);
    } else if constexpr (requires { handle->value; }) {
      return handle->value;
    } else {
      return handle->values;
    }
  }
};
template <> struct Argument<const Tensor&> : Required<aclTensor, Tensor> {};
template <> struct Argument<Tensor&> : Required<aclTensor, Tensor> {};
template <> struct Argument<const Scalar&> : Required<aclScalar, Scalar> {};
template <> struct Argument<const Ints&> : Required<aclIntArray, Ints> {};
template <> struct Argument<const Bools&> : Required<aclBoolArray, Bools> {};
template <> struct Argument<const Floats&> : Required<aclFloatArray, Floats> {};

template <class Handle, class Value>
struct Optional {
  using C = const Handle*;
  using Kept = std::optional<Value>;
  static Kept keep(C handle) {
    if (handle == nullptr) return {};
    return Required<Handle, Value>::keep(handle);
  }
};
template <> struct Argument<const OptionalTensor&> : Optional<aclTensor, Tensor> {};
template <> struct Argument<const std::optional<Scalar>&> : Optional<aclScalar, Scalar> {};
template <> struct Argument<const OptionalInts&> : Optional<aclIntArray, Ints> {};

template <>
struct Argument<const Tensors&> {
  using C = const aclTensorList*;
  using Kept = Tensors;
  static Kept keep(C list) {
    if (list == nullptr) missing_argument("a required list of tensors");
    return tensors_of(list);
  }
};

template <>
struct Argument<const OptionalTensors&> {
  using C = const aclTensorList*;
  using Kept = OptionalTensors;
  static Kept keep(C list) { return list == nullptr ? Kept{} : tensors_of(list); }
};

template <>
struct Argument<const Scalars&> {
  using C = const aclScalarList*;
  using Kept = Scalars;
  static Kept keep(C list);
};

template <>
struct Argument<const MappedTensor&> {
  using C = const aclTensor*;
  using Kept = MappedTensor;
  static Kept keep(C handle) {
    if (handle == nullptr) missing_argument("a required argument");
    return {handle->value};
  }
};

template <>
struct Argument<DynamicTensor&> {
  using C = const aclTensor*;
  using Kept = DynamicTensor;
  static Kept keep(C handle) {
    if (handle == nullptr) missing_argument("a required argument");
    return {on_device(*handle), handle->shape};
  }
};

// torch_npu prepares an operator when Python calls it and launches it later, from its queue of calls, in order with all else.
// A stored argument that depends on its place in that order (a communicator's) has a function launched().
template <class Kept>
constexpr bool kKnowsLaunch = requires(Kept& kept) { kept.launched(); };

template <class... Kept>
std::function<void()> on_launch(const std::shared_ptr<std::tuple<Kept...>>& kept) {
  if constexpr (!(kKnowsLaunch<Kept> || ...)) return nullptr;
  const auto tell = [](auto& one) {
    if constexpr (kKnowsLaunch<std::remove_reference_t<decltype(one)>>) one.launched();
  };
  return [=] { std::apply([=](auto&... all) { (tell(all), ...); }, *kept); };
}

template <Literal name, auto body>
struct Operator;

template <Literal name, class... Parameters, void (*body)(Parameters...)>
struct Operator<name, body> {
  static int prepare(typename Argument<Parameters>::C... arguments, uint64_t* workspace_bytes, aclOpExecutor** executor) {
    return guarded(name.text, ACL_ERROR_INVALID_PARAM, [&] {
      using Kept = std::tuple<typename Argument<Parameters>::Kept...>;
      auto kept = std::make_shared<Kept>(Argument<Parameters>::keep(arguments)...);
      *workspace_bytes = 0;
      *executor = new aclOpExecutor{name.text, [kept] { std::apply(body, *kept); }, on_launch(kept)};
    });
  }
};

// Second half of every operator; `executor` ends here.
int launch(const char* name, aclOpExecutor* executor, aclrtStream stream);

template <Literal name>
struct Launch {
  static int call(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) { return launch(name.text, executor, stream); }
};

}  // namespace sim

#define ACLNN(NAME, PARAMETERS)                                                 \
  static void NAME##_body PARAMETERS;                                           \
  using NAME##_operator = sim::Operator<"aclnn" #NAME, NAME##_body>;            \
  using NAME##_launch = sim::Launch<"aclnn" #NAME>;                             \
  SIM_EXPORT(aclnn##NAME##GetWorkspaceSize, NAME##_operator::prepare)           \
  SIM_EXPORT(aclnn##NAME, NAME##_launch::call)                                  \
  static void NAME##_body PARAMETERS
