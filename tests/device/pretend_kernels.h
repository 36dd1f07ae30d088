// The operators of the pretend device.
#pragma once

namespace h3::testing {

// Registers with LibTorch's dispatcher, for good.
void RegisterPretendKernels();

}  // namespace h3::testing
