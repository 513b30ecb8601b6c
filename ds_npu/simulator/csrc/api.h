// How a C++ function becomes a symbol of CANN's C ABI.
//
// SIM_API(aclError, aclrtFree, (void* devPtr)) { ... } defines the symbol aclrtFree. Its body throws Failure where the
// vendor's returns an error code; Api<> turns that into the code and keeps the message for aclGetRecentErrMsg. The
// symbol is an ifunc that resolves to the instantiated Api<>::call, so the signature is written once, and the compiler
// compares it with the vendor's header where there is one.
#pragma once

#include <cstddef>
#include <exception>
#include <string_view>

#include "failure.h"
#include "fault.h"

namespace sim {

// Keeps the error of a call that failed as this thread's last one, and gives its code back. In the thread of torch_npu's
// task queue it also stops the device: torch_npu reports such an error once and silently drops all later work, so results on
// the device would be stale.
int failed_call(const char* name, int code, const char* message) noexcept;

// Runs `body`; its exceptions become an error code, with the message kept for aclGetRecentErrMsg.
template <class Body>
int reported(const char* name, int unknown_error, Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Failure& failure) {
    return failed_call(name, failure.code(), failure.what());
  } catch (const std::exception& error) {
    return failed_call(name, unknown_error, error.what());
  }
}

// The same for a call of the ABI, where a fault may have been planted.
template <class Body>
int guarded(const char* name, int unknown_error, Body&& body) noexcept {
  return reported(name, unknown_error, [&] {
    throw_planted_fault(name);
    body();
  });
}

template <std::size_t N>
struct Literal {
  char text[N]{};
  constexpr Literal(const char (&source)[N]) {
    for (std::size_t i = 0; i < N; ++i) text[i] = source[i];
  }
};

template <class Result, Literal name, auto body>
struct Api;

template <class Result, Literal name, class... Args, void (*body)(Args...)>
struct Api<Result, name, body> {
  static Result call(Args... args) {
    constexpr int internal_error = std::string_view(name.text).starts_with("Hccl") ? 4 : 500000;
    return static_cast<Result>(guarded(name.text, internal_error, [&] { body(args...); }));
  }
};

}  // namespace sim

#define SIM_EXPORT(NAME, FUNCTION)                                                                      \
  extern "C" {                                                                                          \
  static decltype(&FUNCTION) NAME##_resolve() { return &FUNCTION; }                                     \
  __attribute__((visibility("default"), ifunc(#NAME "_resolve"))) extern decltype(FUNCTION) NAME;       \
  }

#define SIM_API(RESULT, NAME, PARAMETERS)                                                               \
  static void NAME##_body PARAMETERS;                                                                   \
  using NAME##_api = sim::Api<RESULT, #NAME, NAME##_body>;                                              \
  SIM_EXPORT(NAME, NAME##_api::call)                                                                    \
  static void NAME##_body PARAMETERS

// For the few functions of the ABI that return something other than an error code.
#define SIM_PLAIN extern "C" __attribute__((visibility("default")))
