#include "hccl/options.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "failure.h"
#include "hccl/hccl.h"

namespace sim::hccl {
namespace {

// A whole number in the environment; throws for anything else.
std::uint64_t number_in(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const auto value = std::strtoull(text, &end, 10);
  if (*end != '\0' || *text == '-')
    throw Failure(HCCL_E_PARA, std::string(variable) + "=" + text + "; a whole number is needed");
  return value;
}

// Callers built against another release pass a longer or shorter struct, whose first field is its length.
HcclCommConfig complete(const HcclCommConfig* given) {
  HcclCommConfig config;
  HcclCommConfigInit(&config);
  if (given == nullptr) return config;
  struct {
    std::size_t bytes;
    std::uint32_t magic;
  } head;
  std::memcpy(&head, given, sizeof head);
  if (head.magic != HCCL_COMM_CONFIG_MAGIC_WORD)
    throw Failure(HCCL_E_PARA, "this configuration was not initialised with HcclCommConfigInit");
  std::memcpy(&config, given, std::min(head.bytes, sizeof config));
  return config;
}

template <std::size_t N>
std::string text_of(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

}  // namespace

Options Options::from(const HcclCommConfig* given) {
  const HcclCommConfig config = complete(given);
  const bool buffer_set = config.hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET;
  const std::uint64_t mebibytes =
      buffer_set ? config.hcclBufferSize : number_in("HCCL_BUFFSIZE", HCCL_COMM_DEFAULT_BUFFSIZE);
  const bool timeout_set = config.hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET;
  const std::uint64_t seconds =
      timeout_set ? static_cast<std::uint64_t>(config.hcclExecTimeOut) : number_in("HCCL_EXEC_TIMEOUT", 1836);
  Options options;
  options.name = text_of(config.hcclCommName);
  options.buffer_bytes = mebibytes << 20;
  options.buffer_name = text_of(config.hcclBufferName);
  options.expansion_mode = config.hcclOpExpansionMode;
  options.traffic_class = config.hcclRdmaTrafficClass;
  options.service_level = config.hcclRdmaServiceLevel;
  if (seconds != 0) options.execution_timeout = std::chrono::seconds(seconds);  // 0: for ever
  return options;
}

std::chrono::seconds connect_timeout() { return std::chrono::seconds(number_in("HCCL_CONNECT_TIMEOUT", 120)); }

std::shared_ptr<BufferCharge> BufferCharge::of(Memory& memory, const Options& options) {
  static std::mutex mutex;
  static auto* shared = new std::map<std::pair<Memory*, std::string>, std::weak_ptr<BufferCharge>>;
  const std::scoped_lock lock(mutex);
  if (!options.buffer_name.empty())
    if (auto kept = (*shared)[{&memory, options.buffer_name}].lock()) return kept;
  const std::uint64_t bytes = 2 * options.buffer_bytes;
  try {
    memory.charge(bytes, "the buffers of a communicator");
  } catch (const Failure& failure) {
    // torch_npu takes an error with these first words for torch.OutOfMemoryError.
    throw Failure(HCCL_E_OOM, "Failed to allocate two buffers of " + std::to_string(options.buffer_bytes >> 20) +
                                  " MiB (HCCL_BUFFSIZE) for a communicator: " + failure.what());
  }
  const std::shared_ptr<BufferCharge> made(new BufferCharge(memory, bytes));
  if (!options.buffer_name.empty()) (*shared)[{&memory, options.buffer_name}] = made;
  return made;
}

BufferCharge::~BufferCharge() { memory_.release(bytes_); }

}  // namespace sim::hccl
