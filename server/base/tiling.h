// The sizes of the pieces in which work on a device is done: functions of shapes and configuration only, shared by the forward,
// which works in them, and the planner, which adds up what they take. Too little memory refuses a request; it never changes them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace h3 {

// Sizes of a transformer that a tile depends on.
struct TileShape {
  int64_t hidden = 0;
  int64_t inner = 0;
  int64_t ffn = 0;
  int64_t element_bytes = 0;  // Of the residual stream.
};

// Rows of one tile of a sequence of `rows` rows, so that its temporaries take about `workspace_bytes`.
inline int64_t RowTile(const TileShape& shape, int64_t workspace_bytes, int64_t rows) {
  // The largest set of temporaries that a row needs at once: float32 q and k while they are normed and rotated, or the MLP's
  // [gate; up] with the normed row and the gathered modulation.
  const int64_t attention = 3 * 4 * shape.inner + 3 * 4 * shape.hidden;
  const int64_t mlp = 2 * shape.element_bytes * shape.ffn + 3 * 4 * shape.hidden + shape.element_bytes * shape.hidden;
  const int64_t fits = workspace_bytes / std::max(attention, mlp);
  // Below 128 rows a product takes another path in the BLAS and its bits change.
  return std::min(rows, std::max<int64_t>(128, fits / 128 * 128));
}

// Heads that attend together, so that their output takes at most `workspace_bytes`; at least one.
inline int64_t HeadGroup(int64_t workspace_bytes, int64_t rows, int64_t head_dim, int64_t element_bytes, int64_t heads) {
  return std::clamp<int64_t>(workspace_bytes / std::max<int64_t>(1, rows * head_dim * element_bytes), 1, heads);
}

// Rows of a weight [out, in] that are widened to float32, or streamed from the host, at a time: about 16 MiB, whatever its size.
inline int64_t WidenedRows(int64_t in) { return std::max<int64_t>(1, (int64_t{16} << 20) / (4 * in)); }

// Products over timesteps are made in batches of exactly this many rows (padded with zeros), so that a timestep's modulation has
// the same bits whichever others are computed with it.
inline constexpr int64_t kTimestepBatch = 8;

// A run's modulations are computed together up to this many bytes, then in groups of evaluations.
inline constexpr int64_t kModulationGroupBytes = int64_t{512} << 20;

// One line of a modulation, float32: six vectors for each block and two at the end.
inline int64_t ModulationLineBytes(int64_t blocks, int64_t hidden) { return (blocks * 6 + 2) * hidden * 4; }

}  // namespace h3
