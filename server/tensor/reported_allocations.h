// The ledger of an accelerator: LibTorch's caching allocators tell whoever listens on the allocating thread of every block that is
// taken and given back, with its address. One listener attributes them to the OwnerScope of that moment.
#pragma once

#include <c10/core/Device.h>

#include "server/vram/ledger.h"

namespace h3 {

// Listens on this thread from now on, for good, and returns the ledger, which lives for ever. For the one thread that owns the
// device: what another thread allocates is not seen. Counts blocks as the allocator rounds them. The same device again: the same
// ledger.
VramLedger& ReportAllocations(c10::Device device);

}  // namespace h3
