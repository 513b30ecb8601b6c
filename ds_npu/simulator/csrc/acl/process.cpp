// Start and end of ACL, its error messages and logs.
#include <cstring>
#include <string>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "api.h"
#include "device.h"
#include "host.h"

namespace sim {

int failed_call(const char* name, int code, const char* message) noexcept {
  const std::string error = std::string(name) + ": " + message;
  set_recent_error(error);
  if (launches_for_others()) device_or_first().fail(code, error);
  return code;
}

}  // namespace sim

SIM_API(aclError, aclInit, (const char*)) {}
SIM_API(aclError, aclFinalize, ()) {}
SIM_API(aclError, aclmdlInitDump, ()) {}
SIM_API(aclError, aclmdlSetDump, (const char*)) {}
SIM_API(aclError, aclmdlFinalizeDump, ()) {}

SIM_PLAIN const char* aclGetRecentErrMsg() {
  static thread_local std::string given;  // the pointer stays good until the thread's next call
  given = sim::take_recent_error();
  return given.empty() ? nullptr : given.c_str();
}

SIM_PLAIN void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// Compile options. torch_npu reads one: operators are not compiled just in time (aclnn, not aclop).
SIM_API(aclError, aclSetCompileopt, (aclCompileOpt, const char*)) {}

SIM_PLAIN size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }

SIM_API(aclError, aclGetCompileopt, (aclCompileOpt, char* value, size_t length)) {
  if (length < sizeof "disable") throw sim::Failure(ACL_ERROR_INVALID_PARAM, "the buffer for the option's value is too short");
  std::memcpy(value, "disable", sizeof "disable");
}

// The release that torch_npu 2.12 and 2.13 are listed with (COMPATIBILITY.en.md of Ascend/pytorch): it decides which of
// several versions of an operator torch_npu calls.
static constexpr char kCann[] = "9.1.0";

SIM_API(aclError, aclsysGetCANNVersion, (aclCANNPackageName, aclCANNPackageVersion* version)) {
  *version = {};
  std::memcpy(version->version, kCann, sizeof kCann);
}

SIM_API(aclError, aclsysGetVersionStr, (char*, char* version)) { std::memcpy(version, kCann, sizeof kCann); }
