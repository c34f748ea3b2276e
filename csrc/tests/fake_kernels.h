// Runs kernels that the fake driver (fake_cuda.cpp) has launched.
#pragma once

#include <set>
#include <string>

namespace fake {

const std::set<std::string>& kernel_names();
void run_kernel(const std::string& name, unsigned grid, unsigned block, void** arguments);

}  // namespace fake
