// An upper bound of what a request takes on a device, from shapes alone: what admission reserves and what `h3ctl plan` prints.
// It follows the forward (model/forward.cc, model/block.cc, model/modulation.cc, nn/site.cc, worker/prepared.cc) allocation by
// allocation; tests/integration/plan_test.py holds it against measured peaks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/base/bytes.h"
#include "server/format/adapter_shape.h"
#include "server/format/checkpoint.h"
#include "server/format/layout.h"
#include "server/format/request.h"

namespace h3 {

// What of a resident base decides how much a request takes.
struct PlanBase {
  BaseForm form;
  std::vector<int64_t> site_bytes;  // Bytes of an element of each site's weight, by index into Sites(geometry).
  bool adaln_on_host = false;       // --adaln-residency host.
};

struct PlanOptions {
  ByteCount workspace = MiB(256);  // That a row tile's temporaries may take (--workspace).
  int64_t threads = 0;             // Of the CPU's kernels, each with scratch of its own; 0: an accelerator.
  bool packs_attention = false;    // The CPU's attention packs k and v (machines with AMX).
};

// One adapter of the stack to be planned.
struct PlannedEntry {
  const AdapterShape* shape = nullptr;  // The same pointer: the same adapter.
  const StackEntry* entry = nullptr;
};

// What is held while the largest phase runs, by owner.
struct PhaseUse {
  std::string name;  // "start", "text stream", "modulation", "qkv", "attention", "attention output", "mlp", "head", "sampler", "result".
  ByteCount activations;
  ByteCount workspace;  // Staging included.
  ByteCount total() const { return activations + workspace; }
};

struct RequestPlan {
  int64_t rows = 0;       // Of the packed sequence.
  int64_t row_tile = 0;
  int64_t modulation_points = 0;  // (timestep, modality) pairs at most, whose base modulations may be cached.
  ByteCount held;         // Of a session between its evaluations: conditions, text streams, modulations, programs.
  std::vector<PhaseUse> phases;
  ByteCount caches;       // Norms that DoRA leaves behind, as long as its adapters stay.
  ByteCount materialized; // Merged copies of apply=materialized.
  ByteCount adapters;     // Each once.

  const PhaseUse& largest() const;
  // Without the adapters: what the request itself takes at most.
  ByteCount peak() const { return largest().total() + caches + materialized; }
};

// `evaluations`: of the run; 0: a session, planned for evaluations that use one set of factors at a time. Requires CheckLayout to
// have passed; text rows are taken to be of both tags.
RequestPlan PlanRequest(const PlanBase& base, const PlanOptions& options, const Layout& layout, int64_t evaluations,
                        const std::vector<PlannedEntry>& stack);

// The base of a checkpoint as it would be loaded. `dtype`: of the block stack; nullopt keeps every tensor's own.
PlanBase PlanBaseOf(const Checkpoint& checkpoint, std::optional<DType> dtype, bool adaln_on_host);

// Bytes that the checkpoint's tensors take on the device, and those that stay in host memory.
struct BaseBytes {
  ByteCount device;
  ByteCount host;
};
BaseBytes BaseBytesOf(const Checkpoint& checkpoint, std::optional<DType> dtype, bool adaln_on_host);

// What of an accelerator's memory is kept free: its allocator takes whole blocks, whose rests no plan knows, and the kernels'
// libraries take scratch of their own.
inline ByteCount AcceleratorMargin(ByteCount total) { return ByteCount(total.value() / 50); }

// The type in which a tensor is held: `wanted` for the block stack; patch projections, time embedder, output heads and a pruned
// model's modulation stay float32; nullopt keeps the stored one.
DType HeldType(absl::string_view name, const CheckpointTensor& tensor, const Geometry& geometry, std::optional<DType> wanted);

// The weight of an AdaLN projection: what --adaln-residency host leaves in host memory.
bool IsAdalnWeight(absl::string_view name);

}  // namespace h3
