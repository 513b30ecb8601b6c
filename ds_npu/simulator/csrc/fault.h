// The calls that `ds_npu sim --fault` makes fail.
#pragma once

namespace sim {

// Throws the Failure that is planted in this call of the function `name`, if there is one; may end the process.
void throw_planted_fault(const char* name);

}  // namespace sim
