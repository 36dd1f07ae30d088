// ReadAdapter on any adapter file, against the golden model. An input is either the bytes of a file, or text:
//
//   line 1      the header as JSON; the data behind it are made up
//   line 2      options, a letter each: see Choose
//   the rest    the adapter_config.json beside the file
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/check.h"
#include "server/format/adapter.h"
#include "server/format/adapter_shape.h"
#include "server/format/safetensors.h"
#include "tests/fuzz/golden_geometry.h"
#include "tests/fuzz/header_text.h"

namespace h3 {
namespace {

constexpr absl::string_view kLetters = "PGLMbaAsiguFRfr0NO";

struct Choice {
  bool pruned = false;
  IntakeOptions options;
  absl::string_view fill = {"\0\0\0\0", 4};  // What made-up data are made of.
};

Choice Choose(absl::string_view letters) {
  Choice choice;
  IntakeOptions& options = choice.options;
  options.grid_width = fuzz::kGridWidth;
  for (const char letter : letters) {
    switch (letter) {
      case 'P': choice.pruned = true; break;
      case 'G': options.base_has_grid = true; break;
      case 'L': options.leave_out = {"adaln"}; break;
      case 'M': options.materialized = true; break;
      case 'b': options.interleaved_base = true; break;
      case 'a': options.alpha = 3.5; break;
      case 'A': options.settings.alpha = 8; break;
      case 's': options.settings.qkv_layout = QkvLayout::kStacked; break;
      case 'i': options.settings.qkv_layout = QkvLayout::kInterleaved; break;
      case 'g': options.settings.fc1_gate_first = true; break;
      case 'u': options.settings.fc1_gate_first = false; break;
      case 'F': options.base_partition = Partition::kFl2va; break;
      case 'R': options.base_partition = Partition::kRef2va; break;
      case 'f': options.settings.partition = Partition::kFl2va; break;
      case 'r': options.settings.partition = Partition::kRef2va; break;
      case '0': options.alpha = 0; break;
      case 'N': choice.fill = "\xff\xff\xff\xff"; break;       // Not a number as a float, -1 as a signed one.
      case 'O': choice.fill = {"\x00\x3c\x80\x3f", 4}; break;  // 1.002 as float32, 1 as float16.
      default: break;
    }
  }
  return choice;
}

// A file has no room for options: each letter stands for a bit of a hash (FNV-1a) of its bytes.
std::string LettersOf(absl::string_view file) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : file) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  std::string letters;
  for (size_t i = 0; i < kLetters.size(); ++i) {
    if (hash >> (2 * i + 8) & 1) letters.push_back(kLetters[i]);
  }
  return letters;
}

void CheckTensor(const SafetensorsHeader& header, const TensorInfo& tensor, const std::vector<int64_t>& shape) {
  const TensorInfo* stored = header.Find(tensor.name);
  H3_CHECK(stored != nullptr && stored->offset == tensor.offset && stored->bytes == tensor.bytes);
  H3_CHECK(tensor.shape == shape);
}

// The shape of a Kronecker factor, whole or a product of two.
std::pair<int64_t, int64_t> FactorShape(const std::optional<TensorInfo>& whole, const std::optional<TensorInfo>& a,
                                        const std::optional<TensorInfo>& b) {
  H3_CHECK(whole.has_value() != a.has_value() && a.has_value() == b.has_value());
  const std::vector<int64_t>& rows = whole.has_value() ? whole->shape : a->shape;
  const std::vector<int64_t>& columns = whole.has_value() ? whole->shape : b->shape;
  H3_CHECK(rows.size() == 2 && columns.size() == 2 && (whole.has_value() || rows[1] == columns[0]));
  return {rows[0], columns[1]};
}

// What the worker relies on when it loads and applies a term.
void CheckTerm(const SafetensorsHeader& header, const AdapterManifest& manifest, const AdapterTerm& term, const Site& site,
               const Choice& choice) {
  H3_CHECK(term.rows.begin >= 0 && term.rows.count > 0 && term.rows.count <= site.out - term.rows.begin);
  H3_CHECK(std::isfinite(term.scale) && std::isfinite(term.alpha) && term.alpha >= 0 && term.rank >= 0);
  H3_CHECK(term.low_rank.has_value() + term.kronecker.has_value() + term.offset.has_value() + term.difference.has_value() == 1);
  H3_CHECK(term.row_map != RowMap::kSwapHalves || (site.kind == SiteKind::kFc1 && term.rows.count == site.out));
  H3_CHECK(term.row_map != RowMap::kDeinterleave || (site.kind == SiteKind::kQkv && term.rows.count == site.out));
  const int64_t in = term.features == AdalnFeatures::kGrid       ? fuzz::kGridWidth
                     : term.features == AdalnFeatures::kOwnTable ? manifest.own_table.value().shape.at(1)
                                                                 : site.in;
  if (term.features != AdalnFeatures::kBase) H3_CHECK(site.kind == SiteKind::kAdaln || site.kind == SiteKind::kFinalAdaln);
  if (term.low_rank.has_value()) {
    H3_CHECK(term.rank > 0);
    CheckTensor(header, term.low_rank->a, {term.rank, in});
    CheckTensor(header, term.low_rank->b, {term.rows.count, term.rank});
    const TensorInfo& magnitude = term.low_rank->magnitude;
    if (term.low_rank->magnitude_axis == MagnitudeAxis::kRows) {
      std::vector<int64_t> shape = {term.rows.count};
      if (magnitude.shape.size() == 2) shape.push_back(1);
      CheckTensor(header, magnitude, shape);
    } else if (term.low_rank->magnitude_axis == MagnitudeAxis::kColumns) {
      CheckTensor(header, magnitude, {1, in});
    }
  }
  if (term.kronecker.has_value()) {
    const Kronecker& k = *term.kronecker;
    const auto [rows1, columns1] = FactorShape(k.w1, k.w1_a, k.w1_b);
    const auto [rows2, columns2] = FactorShape(k.w2, k.w2_a, k.w2_b);
    H3_CHECK(static_cast<__int128>(rows1) * rows2 == term.rows.count && static_cast<__int128>(columns1) * columns2 == in);
  }
  if (term.offset.has_value()) CheckTensor(header, term.offset->offset, {term.rows.count});
  if (term.difference.has_value()) {
    H3_CHECK(choice.options.materialized);
    CheckTensor(header, term.difference->difference, {term.rows.count, in});
  }
}

void CheckManifest(const SafetensorsHeader& header, const AdapterManifest& manifest, const Geometry& geometry,
                   const Choice& choice) {
  H3_CHECK(!manifest.terms.empty() || !manifest.norm_offsets.empty() || manifest.curve.has_value());
  H3_CHECK(ShapeOf(manifest, {.geometry = geometry}).bytes >= ByteCount(0));
  H3_CHECK(manifest.left_out.empty() || !choice.options.leave_out.empty());
  const std::vector<Site> sites = Sites(geometry);
  int previous = 0;
  bool own_table = false;
  for (const AdapterTerm& term : manifest.terms) {
    H3_CHECK(term.site >= previous && static_cast<size_t>(term.site) < sites.size());
    previous = term.site;
    own_table |= term.features == AdalnFeatures::kOwnTable;
    CheckTerm(header, manifest, term, sites[static_cast<size_t>(term.site)], choice);
  }
  H3_CHECK(own_table == manifest.own_table.has_value());
  const std::vector<TensorShape> weights = ExpectedTensors(geometry);
  for (const NormOffset& norm : manifest.norm_offsets) {
    const auto found =
        std::find_if(weights.begin(), weights.end(), [&](const TensorShape& w) { return w.name == norm.tensor; });
    H3_CHECK(found != weights.end());
    CheckTensor(header, norm.offset, found->shape);
  }
  if (manifest.curve.has_value()) {
    const Curve& curve = *manifest.curve;
    const auto projections = static_cast<size_t>(geometry.blocks + 1);
    H3_CHECK(curve.weights.size() == projections && curve.biases.size() == projections);
    H3_CHECK(curve.table.shape.size() == 2 && curve.table.shape[0] >= 2);
    for (size_t i = 0; i < projections; ++i) {
      const int64_t out = (i + 1 < projections ? 18 : 2) * geometry.hidden;
      CheckTensor(header, curve.weights[i], {out, curve.table.shape[1]});
      CheckTensor(header, curve.biases[i], {out});
    }
  }
  int64_t modules = 0;
  for (const EffectiveScale& scale : SummariseScales(manifest, geometry)) modules += scale.modules;
  H3_CHECK(modules == static_cast<int64_t>(manifest.terms.size()));
}

void Read(absl::string_view begin, int64_t file_bytes, bool made_up, const Choice& choice) {
  const auto header = ParseSafetensorsHeader(begin, file_bytes);
  if (!header.ok()) return;
  const TensorReader read = [&](const TensorInfo& info) -> absl::StatusOr<std::string> {
    // Alphas are all that is read: a number each.
    H3_CHECK(info.bytes <= 64);
    if (!made_up) return std::string(begin.substr(static_cast<size_t>(info.offset), static_cast<size_t>(info.bytes)));
    std::string data;
    while (static_cast<int64_t>(data.size()) < info.bytes) data.append(choice.fill.data(), choice.fill.size());
    data.resize(static_cast<size_t>(info.bytes));
    return data;
  };
  static const auto* const full = new Geometry(fuzz::GoldenGeometry(false));
  static const auto* const pruned = new Geometry(fuzz::GoldenGeometry(true));
  const Geometry& geometry = choice.pruned ? *pruned : *full;
  const auto manifest = ReadAdapter(*header, read, geometry, choice.options);
  if (manifest.ok()) CheckManifest(*header, *manifest, geometry, choice);
}

// The text up to the next line break, which is dropped from `rest` with it.
absl::string_view TakeLine(absl::string_view& rest) {
  const absl::string_view line = rest.substr(0, rest.find('\n'));
  rest.remove_prefix(std::min(rest.size(), line.size() + 1));
  return line;
}

}  // namespace
}  // namespace h3

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::string_view input(reinterpret_cast<const char*>(data), size);
  if (h3::fuzz::BeginsAsFile(input)) {
    h3::Read(input, static_cast<int64_t>(size), /*made_up=*/false, h3::Choose(h3::LettersOf(input)));
    return 0;
  }
  const absl::string_view json = h3::TakeLine(input);
  const auto file = h3::fuzz::FileOfHeader(json);
  if (!file.has_value()) return 0;
  h3::Choice choice = h3::Choose(h3::TakeLine(input));
  choice.options.settings.peft_config = std::string(input);
  h3::Read(file->begin, file->file_bytes, /*made_up=*/true, choice);
  return 0;
}
