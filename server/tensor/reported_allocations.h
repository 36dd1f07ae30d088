// The ledger of an accelerator: LibTorch's caching allocators tell whoever listens on the thread of every block that is taken and
// given back, with its address and with what is allocated in total then. One listener attributes blocks to the OwnerScope of that
// moment; what is allocated in total and nobody's is unattributed.
#pragma once

#include <c10/core/Device.h>

#include "server/vram/ledger.h"

namespace h3 {

// Listens on this thread from now on, for good, and returns the ledger of the device, which lives for ever: the same one for every
// thread. For the thread that owns the device, and for every other one that lets go of its tensors: a block goes back to the owner
// that took it, on whatever listening thread. What is taken where nobody listens is unattributed from the next report on; what is given
// back there is noticed when its address is taken again. Counts blocks as the allocator rounds them.
VramLedger& ReportAllocations(c10::Device device);

}  // namespace h3
