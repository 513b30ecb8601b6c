// The options of a communicator: HcclCommConfig, and environment variables for what it leaves unset.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "hccl/hccl_types.h"
#include "memory.h"

namespace sim::hccl {

struct Options {
  std::string name;  // "": one is made up
  std::uint64_t buffer_bytes;  // of each of the two
  std::string buffer_name;     // communicators with the same one share the buffers; "": they do not
  std::optional<std::chrono::seconds> execution_timeout;
  // As given: they have no effect here.
  std::uint32_t expansion_mode;
  std::uint32_t traffic_class;
  std::uint32_t service_level;

  // `config` may be null. Throws Failure HCCL_E_PARA.
  static Options from(const HcclCommConfig* config);
};

std::chrono::seconds connect_timeout();

// The two buffers of a communicator, counted against the device's capacity. They hold nothing: ranks read each other's
// device memory.
class BufferCharge {
 public:
  // Throws Failure HCCL_E_OOM.
  static std::shared_ptr<BufferCharge> of(Memory& memory, const Options& options);
  ~BufferCharge();
  BufferCharge(const BufferCharge&) = delete;

 private:
  BufferCharge(Memory& memory, std::uint64_t bytes) : memory_(memory), bytes_(bytes) {}
  Memory& memory_;
  const std::uint64_t bytes_;
};

}  // namespace sim::hccl
