#include "trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "acl/acl_base.h"
#include "failure.h"
#include "settings.h"

namespace sim {
namespace {

[[noreturn]] void cannot(const char* what, const std::string& path) {
  throw Failure(ACL_ERROR_INTERNAL_ERROR,
                "a record of what streams do: cannot " + std::string(what) + " " + path + ": " + std::strerror(errno));
}

class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {
    file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0) cannot("open", path_);
  }
  ~File() { close(file_); }
  File(const File&) = delete;

  // One unbuffered write per line: the process may end at any time, and several streams write.
  void write(const std::string& line) const {
    if (!has_written(line)) cannot("write to", path_);
  }
  bool has_written(const std::string& line) const {
    return ::write(file_, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  }

 private:
  const std::string path_;
  int file_;
};

std::string microseconds(Nanoseconds ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03" PRId64, ns / 1000, ns % 1000);
  return text;
}

template <class... Values>
std::string formatted(const char* format, Values... values) {
  char text[240];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// What the simulated machine does for the task, of one that costs something: all from which its seconds are computed.
std::string cost(const Account& account) {
  if (account.seconds == 0) return "";
  const Work& work = account.work;
  const auto& [rows, columns, inner, itemsize, count] = work.products;
  std::string text = ",\"kind\":" + quoted(work.kind) +
                     formatted(",\"flop\":%.17g,\"read\":%" PRId64 ",\"written\":%" PRId64 ",\"seconds\":%.17g", work.flop,
                               account.read_bytes, account.written_bytes, account.seconds);
  if (count > 0)
    text += formatted(",\"products\":[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]", rows, columns, inner,
                      itemsize, count);
  if (work.keys > 0) text += formatted(",\"keys\":%" PRId64, work.keys);
  if (work.moved >= 0) text += formatted(",\"moved\":%" PRId64, work.moved);
  if (work.host_bytes > 0) text += formatted(",\"host\":%" PRId64, work.host_bytes);
  if (work.message_peers > 0) text += formatted(",\"sent\":[%.17g,%" PRId64 "]", work.message_bytes, work.message_peers);
  return text + account.communication;
}

// Bytes by `[access, address, item size, sizes, strides]`; dims that add no address are left out.
std::string touches(const Account& account) {
  std::string all;
  for (const auto& [tensor, access] : account.touches) {
    if (tensor.numel() == 0) continue;
    std::string sizes, strides;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) == 1 || tensor.stride(dim) == 0) continue;
      sizes += (sizes.empty() ? "" : ",") + std::to_string(tensor.size(dim));
      strides += (strides.empty() ? "" : ",") + std::to_string(tensor.stride(dim));
    }
    all += (all.empty() ? "[" : ",[") + std::to_string(static_cast<int>(access)) + "," +
           std::to_string(reinterpret_cast<std::uintptr_t>(tensor.data_ptr())) + "," + std::to_string(tensor.element_size()) +
           ",[" + sizes + "],[" + strides + "]]";
  }
  return all.empty() ? "" : ",\"touches\":[" + all + "]";
}

// The tensors of a task as `[access, type, sizes]`.
std::string shapes(const Account& account) {
  std::string all;
  for (const auto& [tensor, access] : account.touches) {
    std::string sizes;
    for (const std::int64_t size : tensor.sizes()) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    all += (all.empty() ? "[" : ",[") + std::to_string(static_cast<int>(access)) + ",\"" +
           c10::toString(tensor.scalar_type()) + "\",[" + sizes + "]]";
  }
  return ",\"shapes\":[" + all + "]";
}

std::atomic<bool> recording{true};

std::atomic<const File*> profile{nullptr};

bool traces() { return !settings().trace.empty() && recording.load(std::memory_order_relaxed); }

}  // namespace

bool tracing() { return traces() || profile.load(std::memory_order_acquire) != nullptr; }

// The file of an earlier profile stays open: a stream may still write its last line.
void profile_to(const std::string& path) { profile.store(path.empty() ? nullptr : new File(path), std::memory_order_release); }

// Whether tasks are written that the host puts on streams from now on. To be called while no stream has any.
extern "C" __attribute__((visibility("default"))) void ds_npu_sim_record(int on) { recording = on != 0; }

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ' ? '_' : c;
  return result + '"';
}

void trace(const Span& span) {
  const std::string told = ",\"dispatch\":\"" + std::string(name_of(span.dispatch)) + "\",\"detail\":" + quoted(span.detail);
  const std::string line =
      "{\"ph\":\"X\",\"pid\":" + std::to_string(span.device) + ",\"tid\":" + std::to_string(span.stream) +
      ",\"ts\":" + microseconds(span.begun) + ",\"dur\":" + microseconds(span.ended - span.begun) +
      ",\"name\":" + quoted(span.name) + ",\"args\":{\"place\":" + std::to_string(span.place) + told + cost(span.account);
  if (traces()) {
    static const auto* file = [] {
      const auto* made = new File(settings().trace + "/" + std::to_string(getpid()) + ".json");
      made->write("[\n");
      return made;
    }();
    const std::string raced = settings().races ? touches(span.account) + ",\"stack\":" + quoted(span.stack) : "";
    file->write(line + raced + "}},\n");
  }
  if (const File* file = profile.load(std::memory_order_acquire)) 
    // Assumed of CANN: where the disk is full the profile ends, and the program goes on.
    if (!file->has_written(line + ",\"ready\":" + microseconds(span.ready) + shapes(span.account) + "}},\n")) profile_to("");
}

}  // namespace sim
