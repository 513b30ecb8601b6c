// The Python frames of the calling thread, for `ds_npu sim --races`: where a task was put on its stream.
#pragma once

#include <string>

namespace sim {

// As "in step at train.py:12; in <module> at train.py:40", the innermost frame first; "" where the thread runs no Python.
// A thread of autograd's engine has frames only inside of Python functions.
std::string python_stack();

}  // namespace sim
