// What can be told of an adapter from its header alone.
#pragma once

#include <map>
#include <string>

#include "server/format/adapter.h"
#include "server/format/geometry.h"
#include "server/format/safetensors.h"

namespace h3 {

// Who wrote the file, as its metadata say; empty where they do not.
std::string ProducerOf(const SafetensorsHeader& header);

// Metadata that speak of sampling: steps, shifts, sigmas, guidance. As they stand there, at most 256 characters each.
std::map<std::string, std::string> ScheduleHintsOf(const SafetensorsHeader& header);

// Multiplications that the adapter adds to a packed row, in % of those of the blocks' own linear layers. Modulation is computed once
// a timestep and costs next to nothing: not counted.
double ArithmeticPercent(const AdapterManifest& manifest, const Geometry& geometry);

}  // namespace h3
