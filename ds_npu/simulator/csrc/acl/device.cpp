// Devices, contexts, and the capabilities of a SoC.
#include "device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"
#include "api.h"
#include "settings.h"

using sim::Failure;

namespace {

struct Soc {
  const char* name;
  int64_t cube_cores;
  int64_t vector_cores;
};

constexpr int64_t kL2Bytes = 192ll << 20;
constexpr std::array kSocs{
    Soc{"Ascend910B1", 24, 48},    Soc{"Ascend910B2", 24, 48},    Soc{"Ascend910B2C", 24, 48},   Soc{"Ascend910B3", 20, 40},
    Soc{"Ascend910B4", 20, 40},    Soc{"Ascend910B4-1", 20, 40},  Soc{"Ascend910_9391", 24, 48}, Soc{"Ascend910_9392", 24, 48},
    Soc{"Ascend910_9381", 24, 48}, Soc{"Ascend910_9382", 24, 48}, Soc{"Ascend910_9372", 20, 40}, Soc{"Ascend910_9362", 20, 40},
};

const Soc& soc() {
  const auto found = std::ranges::find_if(kSocs, [](const Soc& one) { return sim::settings().soc == one.name; });
  if (found == kSocs.end()) throw Failure(ACL_ERROR_INVALID_PARAM, "no SoC named " + sim::settings().soc + " is simulated");
  return *found;
}

}  // namespace

int64_t sim::vector_cores() { return soc().vector_cores; }

SIM_PLAIN const char* aclrtGetSocName() { return sim::settings().soc.c_str(); }

SIM_API(aclError, aclrtGetDeviceCount, (uint32_t* count)) { *count = static_cast<uint32_t>(sim::settings().devices.size()); }

SIM_API(aclError, aclrtSetDevice, (int32_t index)) { sim::set_current_device(index); }

SIM_API(aclError, aclrtGetDevice, (int32_t* index)) { *index = sim::current_device().index(); }

SIM_API(aclError, aclrtResetDevice, (int32_t index)) { sim::device(index); }

SIM_API(aclError, aclrtSynchronizeDevice, ()) { sim::current_device().synchronize(); }

SIM_API(aclError, aclrtSynchronizeDeviceWithTimeout, (int32_t timeout_ms)) {
  sim::current_device().synchronize(timeout_ms < 0 ? sim::Timeout{} : std::chrono::milliseconds(timeout_ms));
}

// A context is its device: there is one for each.
SIM_API(aclError, aclrtGetCurrentContext, (aclrtContext * context)) { *context = &sim::current_device(); }

SIM_API(aclError, aclrtSetCurrentContext, (aclrtContext context)) {
  sim::set_current_device(static_cast<sim::Device*>(context)->index());
}

SIM_API(aclError, aclrtGetPrimaryCtxState, (int32_t index, uint32_t* flags, int32_t* active)) {
  if (flags != nullptr) *flags = 0;
  *active = sim::device(index).in_use() ? 1 : 0;
}

SIM_API(aclError, aclrtGetDeviceInfo, (uint32_t index, aclrtDevAttr attribute, int64_t* value)) {
  const int64_t memory = static_cast<int64_t>(sim::device(static_cast<int>(index)).memory().capacity());
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = soc().cube_cores; return;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = soc().vector_cores; return;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = memory; return;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = kL2Bytes; return;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = index; return;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; return;
    default: throw Failure(ACL_ERROR_API_NOT_SUPPORT, "device attribute " + std::to_string(attribute) + " is not simulated");
  }
}

SIM_API(aclError, aclGetDeviceCapability, (uint32_t index, aclDeviceInfo info, int64_t* value)) {
  sim::device(static_cast<int>(index));
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = soc().cube_cores; return;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = soc().vector_cores; return;
    case ACL_DEVICE_INFO_L2_SIZE: *value = kL2Bytes; return;
    default: throw Failure(ACL_ERROR_INVALID_PARAM, "device capability " + std::to_string(info) + " is not simulated");
  }
}

SIM_API(aclError, aclGetCannAttributeList, (const aclCannAttr** list, size_t* count)) {
  static const std::array attributes{ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *list = attributes.data();
  *count = attributes.size();
}

SIM_API(aclError, aclGetCannAttribute, (aclCannAttr attribute, int32_t* value)) {
  *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16;
}

SIM_API(aclError, aclrtGetDeviceUtilizationRate, (int32_t index, aclrtUtilizationInfo* info)) {
  const auto& memory = sim::device(index).memory();
  *info = {};
  info->memoryUtilization = static_cast<int32_t>(memory.used() * 100 / std::max<size_t>(memory.capacity(), 1));
}

SIM_API(aclError, aclrtDeviceGetUuid, (int32_t index, aclrtUuid* uuid)) {
  sim::device(index);
  *uuid = {};
  std::snprintf(uuid->bytes, sizeof uuid->bytes, "ds_npu-sim-%d", index);
}

SIM_API(aclError, aclrtDeviceCanAccessPeer, (int32_t * can, int32_t, int32_t)) { *can = 1; }
SIM_API(aclError, aclrtDeviceEnablePeerAccess, (int32_t, uint32_t)) {}

// Options that change a device's speed or its ways of failing, not its results.
SIM_API(aclError, aclrtSetOpWaitTimeout, (uint32_t)) {}
SIM_API(aclError, aclrtSetOpExecuteTimeOut, (uint32_t)) {}
SIM_API(aclError, aclrtSetOpExecuteTimeOutV2, (uint64_t timeout, uint64_t* actual)) { *actual = timeout; }
SIM_API(aclError, aclrtSetDeviceSatMode, (aclrtFloatOverflowMode)) {}
SIM_API(aclError, aclrtCtxSetSysParamOpt, (aclSysParamOpt, int64_t)) {}

// Of the process. Results are deterministic whatever it says; torch_npu sets it for use_deterministic_algorithms.
static std::atomic<int64_t> deterministic{0};

SIM_API(aclError, aclrtSetSysParamOpt, (aclSysParamOpt, int64_t value)) { deterministic = value; }
SIM_API(aclError, aclrtGetSysParamOpt, (aclSysParamOpt, int64_t* value)) { *value = deterministic; }
