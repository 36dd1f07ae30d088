#include "server/format/adapter.h"
namespace h3 { absl::StatusOr<AdapterManifest> ReadAdapter(const SafetensorsHeader&, const TensorReader&, const Geometry&, const IntakeOptions&) { return absl::UnimplementedError("x"); } }
