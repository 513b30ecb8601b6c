// What every part of the simulator throws, and the thread's last error. It includes nothing of ours.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace sim {

// An error code of ACL or HCCL with its message.
class Failure : public std::exception {
 public:
  Failure(int code, std::string message) : code_(code), message_(std::move(message)) {}
  int code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int code_;
  std::string message_;
};

// Keeps `message` as this thread's last error, as aclGetRecentErrMsg gives it.
void set_recent_error(std::string message);

// This thread's last error, which is then forgotten; "" if there is none.
std::string take_recent_error();

}  // namespace sim
