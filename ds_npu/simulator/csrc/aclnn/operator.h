// An aclnn operator from a C++ function over ATen tensors.
//
//   ACLNN(Add, streaming(), (const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out)) {
//     at::add_out(out, self, other, alpha);
//   }
//
// defines aclnnAddGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclScalar*, aclTensor*, uint64_t*,
// aclOpExecutor**) and aclnnAdd(void*, uint64_t, aclOpExecutor*, aclrtStream): the first takes the arguments, the second puts
// the function on the stream. The parameters' types give the C types, by Argument<> below; they must be those that CANN's
// documentation of the operator has, in its order. They also say what the operator touches: it reads a const parameter,
// overwrites a Tensor& or Written<...>&, and changes a Changed<...>& in place. The second argument says what it costs (work.h),
// as an expression of the parameters. The body runs on the stream's thread, on CPU tensors that are views of
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
#include "host.h"
#include "known_bytes.h"
#include "stream.h"
#include "work.h"

struct aclOpExecutor {
  const char* name;
  std::function<void()> work;
  sim::Account account;
  std::function<void()> unknown;          // in place of the work, in a dry run that does not know an input; may be empty
  std::function<std::string()> launched;  // on the host, right before the work is put on the stream; may be empty
  sim::Dispatch dispatch;
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

// Parameters that are results: overwritten, or read and written in place.
template <class Value>
struct Written : Value {
  Written(Value value) : Value(std::move(value)) {}
};
// A result that a dry run draws where it does not know the scores: choices of experts.
struct Chosen : Tensor {
  Chosen(Tensor value) : Tensor(std::move(value)) {}
};
template <class Value>
struct Changed : Value {
  Changed(Value value) : Value(std::move(value)) {}
};

// How one parameter of an operator is passed through the C ABI: its C type, and what is stored until the operator runs.
template <class Parameter>
struct Argument;

[[noreturn]] void missing_argument(const char* kind);
// For a result whose size a dry run does not know: throws, but where torch prints a small tensor all elements are chosen.
void check_unknown(const char* name, const DynamicTensor& result);
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

template <class Value>
struct Argument<Written<Value>&> : Argument<const Value&> {
  using Kept = Written<Value>;
};
template <>
struct Argument<Chosen&> : Argument<Tensor&> {
  using Kept = Chosen;
};
template <class Value>
struct Argument<Changed<Value>&> : Argument<const Value&> {
  using Kept = Changed<Value>;
};

template <class Parameter> constexpr Access kAccess = Access::kRead;
template <> constexpr Access kAccess<Tensor&> = Access::kWritten;
template <> constexpr Access kAccess<DynamicTensor&> = Access::kWritten;
template <> constexpr Access kAccess<Chosen&> = Access::kWritten;
template <class Value> constexpr Access kAccess<Written<Value>&> = Access::kWritten;
template <class Value> constexpr Access kAccess<Changed<Value>&> = Access::kChanged;

void touch(std::vector<Touch>& touches, const Tensor& tensor, Access access);

template <class Kept>
void touch_all(std::vector<Touch>& touches, const Kept& kept, Access access) {
  const auto all = [&](const Tensors& tensors) {
    for (const Tensor& tensor : tensors) touch(touches, tensor, access);
  };
  if constexpr (std::is_base_of_v<Tensor, Kept>) touch(touches, kept, access);
  if constexpr (std::is_base_of_v<MappedTensor, Kept>) touch(touches, kept.value, access);
  if constexpr (std::is_base_of_v<DynamicTensor, Kept>) touch(touches, kept.room, access);
  if constexpr (std::is_base_of_v<OptionalTensor, Kept>) touch(touches, kept.value_or(Tensor()), access);
  if constexpr (std::is_base_of_v<Tensors, Kept>) all(kept);
  if constexpr (std::is_base_of_v<OptionalTensors, Kept>) all(kept.value_or(Tensors()));
}

// torch_npu prepares an operator when Python calls it and launches it later, from its queue of calls, in order with all else.
// A stored argument that depends on its place in that order (a communicator's) has a function launched(), which returns what
// the trace says of the other ranks.
template <class Kept>
constexpr bool kKnowsLaunch = requires(Kept& kept) { kept.launched(); };

template <class... Kept>
std::function<std::string()> on_launch(const std::shared_ptr<std::tuple<Kept...>>& kept) {
  if constexpr (!(kKnowsLaunch<Kept> || ...)) return nullptr;
  const auto told = [](auto& one) -> std::string {
    if constexpr (kKnowsLaunch<std::remove_reference_t<decltype(one)>>) return one.launched();
    return "";
  };
  return [=] { return std::apply([=](auto&... all) { return (told(all) + ...); }, *kept); };
}

// Calls check_unknown for the results of unknown size.
template <class Kept>
void check_kept(const char* name, const Kept& kept) {
  if constexpr (std::is_same_v<DynamicTensor, Kept>) check_unknown(name, kept);
}

// In a dry run without its inputs an operator that communicates meets the other ranks, and one whose result's size depends
// on data has none. One that chooses experts does so all the same.
template <class... Kept>
std::function<void()> when_unknown(const char* name, const std::shared_ptr<std::tuple<Kept...>>& kept,
                                   const std::function<void()>& work) {
  if constexpr ((std::is_same_v<Chosen, Kept> || ...))
    return [=] {
      work();
      mark_known(std::get<Chosen>(*kept));
    };
  if constexpr ((std::is_same_v<DynamicTensor, Kept> || ...))
    return [=] { std::apply([=](const auto&... all) { (check_kept(name, all), ...); }, *kept); };
  if constexpr ((kKnowsLaunch<Kept> || ...)) {
    const auto meet = [](auto& one) {
      if constexpr (kKnowsLaunch<std::remove_reference_t<decltype(one)>>) one.meet();
    };
    return [=] { std::apply([=](auto&... all) { (meet(all), ...); }, *kept); };
  }
  return nullptr;
}

template <Literal name, auto body, auto work>
struct Operator;

template <Literal name, class... Parameters, void (*body)(Parameters...), Work (*work)(Parameters...)>
struct Operator<name, body, work> {
  static int prepare(typename Argument<Parameters>::C... arguments, uint64_t* workspace_bytes, aclOpExecutor** executor) {
    return guarded(name.text, ACL_ERROR_INVALID_PARAM, [&] {
      using Kept = std::tuple<typename Argument<Parameters>::Kept...>;
      auto kept = std::make_shared<Kept>(Argument<Parameters>::keep(arguments)...);
      std::vector<Touch> touches;
      std::apply([&](const auto&... each) { (touch_all(touches, each, kAccess<Parameters>), ...); }, *kept);
      *workspace_bytes = 0;
      static const bool fused = is_fused(name.text);
      const std::function<void()> run = [kept] { std::apply(body, *kept); };
      *executor = new aclOpExecutor{name.text, run,
                                    account_of(std::apply(work, *kept), std::move(touches)), when_unknown(name.text, kept, run),
                                    on_launch(kept),
                                    dispatch_of(fused)};
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

#define ACLNN(NAME, WORK, PARAMETERS)                                             \
  static void NAME##_body PARAMETERS;                                             \
  _Pragma("GCC diagnostic push")                                                  \
  _Pragma("GCC diagnostic ignored \"-Wunused-parameter\"")                        \
  static sim::Work NAME##_work PARAMETERS { return WORK; }                        \
  _Pragma("GCC diagnostic pop")                                                   \
  using NAME##_operator = sim::Operator<"aclnn" #NAME, NAME##_body, NAME##_work>; \
  using NAME##_launch = sim::Launch<"aclnn" #NAME>;                               \
  SIM_EXPORT(aclnn##NAME##GetWorkspaceSize, NAME##_operator::prepare)             \
  SIM_EXPORT(aclnn##NAME, NAME##_launch::call)                                    \
  static void NAME##_body PARAMETERS
