// `ds_npu sim --trace FOLDER`: what each stream did and when, in virtual time. Each process writes a file FOLDER/PID.json,
// a line for each task once it is done and for each wait of the host, in Chrome's trace format; docs/simulator.md says what
// is in a line. A profile of aclprof (acl/profiling.cpp) has the same lines, with the shapes of tensors.
#pragma once

#include <cstdint>
#include <string>

#include "host.h"
#include "virtual_time.h"
#include "work.h"

namespace sim {

bool tracing();

// A JSON string; quotes, backslashes and control characters (a communicator's name may have them) become underscores.
std::string quoted(const std::string& text);

constexpr int kHostTrack = 0;  // instead of a stream's id, which are positive

struct Span {
  int device;
  int stream;
  std::uint64_t place;        // among the tasks of this process, in the order in which the host put them on streams
  const char* name;
  const std::string& detail;  // which event, which message
  const Account& account;
  const std::string& stack;   // Python frames, or ""
  Dispatch dispatch;
  Nanoseconds begun;
  Nanoseconds ended;
  Nanoseconds ready = 0;      // when the stream came to it: a collective then waits for other ranks
};

// Only while `tracing()`. Throws Failure when the file cannot be written.
void trace(const Span& span);

// From now on, lines go to the file of a profile too; "": no more. Throws Failure when it cannot be opened.
void profile_to(const std::string& path);

}  // namespace sim
