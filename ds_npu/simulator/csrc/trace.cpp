#include "trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "acl/acl_base.h"
#include "failure.h"
#include "settings.h"

namespace sim {
namespace {

// A JSON string; quotes, backslashes and control characters (a communicator's name may have them) become underscores.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ' ? '_' : c;
  return result + '"';
}

[[noreturn]] void cannot(const char* what, const std::string& path) {
  throw Failure(ACL_ERROR_INTERNAL_ERROR,
                "ds_npu sim --trace: cannot " + std::string(what) + " " + path + ": " + std::strerror(errno));
}

class File {
 public:
  File() : path_(settings().trace + "/" + std::to_string(getpid()) + ".json") {
    file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0) cannot("open", path_);
    write("[\n");
  }
  ~File() { close(file_); }
  File(const File&) = delete;

  // One unbuffered write per line: the process may end at any time, and several streams write.
  void write(const std::string& line) const {
    if (::write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) cannot("write to", path_);
  }

 private:
  const std::string path_;
  int file_;
};

std::string microseconds(Clock::duration time) {
  const std::int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03" PRId64, ns / 1000, ns % 1000);
  return text;
}

// What the simulated machine does for the task, of one that costs something.
std::string cost(const Account& account) {
  if (account.seconds == 0) return "";
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, ",\"flop\":%.17g,\"read\":%" PRId64 ",\"written\":%" PRId64 ",\"seconds\":%.17g",
                account.work.flop, account.read_bytes, account.written_bytes, account.seconds);
  return ",\"kind\":" + quoted(account.work.kind) + numbers;
}

}  // namespace

bool tracing() { return !settings().trace.empty(); }

void trace(const Span& span) {
  static const auto* file = new File;
  file->write("{\"ph\":\"X\",\"pid\":" + std::to_string(span.device) + ",\"tid\":" + std::to_string(span.stream) +
              ",\"ts\":" + microseconds(span.begun.time_since_epoch()) + ",\"dur\":" + microseconds(span.ended - span.begun) +
              ",\"name\":" + quoted(span.name) + ",\"args\":{\"place\":" + std::to_string(span.place) +
              ",\"detail\":" + quoted(span.detail) + cost(span.account) + "}},\n");
}

}  // namespace sim
