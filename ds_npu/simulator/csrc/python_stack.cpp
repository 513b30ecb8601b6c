#include "python_stack.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <sstream>
#include <string_view>

namespace sim {
namespace {

constexpr int kMostFrames = 12;

// CPython's own, which faulthandler uses: they need no lock of the interpreter for the calling thread.
using GetState = void* (*)();
using Dump = void (*)(int file, void* state);

// A line of the dump, `  File "train.py", line 12 in step`, as "in step at train.py:12".
std::string frame_of(std::string_view line) {
  const auto file = line.find('"'), end = line.rfind("\", line ");
  if (file == std::string_view::npos || end == std::string_view::npos || end <= file) return "";
  const auto rest = line.substr(end + 8);
  const auto in = rest.find(" in ");
  if (in == std::string_view::npos) return "";
  return "in " + std::string(rest.substr(in + 4)) + " at " + std::string(line.substr(file + 1, end - file - 1)) + ":" +
         std::string(rest.substr(0, in));
}

}  // namespace

std::string python_stack() {
  static const auto get_state = reinterpret_cast<GetState>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  static const auto dump = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
  void* state = get_state == nullptr || dump == nullptr ? nullptr : get_state();
  if (state == nullptr) return "";
  thread_local const int file = memfd_create("ds_npu_stack", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, 0) != 0 || lseek(file, 0, SEEK_SET) != 0) return "";
  dump(file, state);
  std::array<char, 8192> text;
  const ssize_t size = pread(file, text.data(), text.size(), 0);
  std::istringstream lines(std::string(text.data(), size < 0 ? 0 : static_cast<std::size_t>(size)));
  std::string found;
  int frames = 0;
  for (std::string line; frames < kMostFrames && std::getline(lines, line);) {
    const std::string frame = frame_of(line);
    if (frame.empty()) continue;
    found += (found.empty() ? "" : "; ") + frame;
    ++frames;
  }
  return found;
}

}  // namespace sim
