// The stack of one request: its adapters, pinned, and the programs that the forward runs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/cancellation.h"
#include "server/format/plan.h"
#include "server/format/request.h"
#include "server/lora/adapter_store.h"
#include "server/model/resident_model.h"
#include "server/model/stack_program.h"

namespace h3 {

// What takes the place of every alpha of the file: the request's, or what is kept of the adapter.
std::optional<double> AlphaOf(const StackEntry& entry);

// The scale of a term with that alpha in place of the file's.
double ScaleOf(const ResidentTerm& term, const std::optional<double>& alpha);

// What an entry turned out to be on this base, as answers tell it. Without auto-strength ratios.
ResolvedAdapter Resolve(const ResidentModel& model, const ResidentAdapter& adapter, const StackEntry& entry);

// On the device thread. Borrows the model; holds (pins) the adapters as long as it lives.
class Stack {
 public:
  // Refuses as CheckStack and AdapterStore::Read do; the message names the entry. `admit` (null: not asked) is called once the
  // adapters are pinned and before anything is computed with them; what it refuses is refused.
  using Admit = std::function<absl::Status(const Stack&)>;
  static absl::StatusOr<std::unique_ptr<Stack>> Build(const ResidentModel& model, AdapterStore& store,
                                                      absl::Span<const StackEntry> entries, const Admit& admit = nullptr);

  ~Stack();

  // Makes the merged copies of apply=materialized, once: before the first Program. CANCELLED between weights; what was made then
  // stays for the next try.
  absl::Status Prepare(const CancellationToken& cancel);

  // In request order.
  const std::vector<ResolvedAdapter>& resolved() const { return resolved_; }
  // For the planner. Borrows from the stack.
  std::vector<PlannedEntry> planned() const;
  // Bytes of its adapters, each once.
  ByteCount AdapterBytes() const;
  // Where the slowest of its adapters came from.
  AdapterSource slowest_source() const { return slowest_source_; }

  // BAD_STRENGTH where `factors` (one an entry) ask for what a merged copy cannot do.
  absl::Status CheckFactors(absl::Span<const double> factors) const;

  // The program of one evaluation. `factors`: one an entry, in place of its per-evaluation factors; or empty. The same factors
  // give the same program (by address), and programs live as long as the stack.
  const StackProgram& Program(int64_t evaluation, absl::Span<const double> factors = {});

  // Equal for programs that do the same to the text stream, so that it is computed once for all of them.
  using TextKey = std::vector<double>;
  TextKey TextKeyOf(int64_t evaluation, absl::Span<const double> factors = {}) const;

  // Bytes of the weights that a merging runtime would hold a second time and this stack does not: each target once, in the base's
  // type.
  ByteCount MergedBytes() const;

 private:
  // One term of one member.
  struct TermId {
    size_t member = 0;
    size_t term = 0;
    auto operator<=>(const TermId&) const = default;
  };
  struct Member {
    StackEntry entry;
    std::shared_ptr<const ResidentAdapter> adapter;
    std::vector<double> scales;      // Of each term: alpha / rank as overridden, times the auto-strength ratio.
    bool touches_text = false;       // condition_proj or the refiner.
  };

  Stack(const ResidentModel& model, AdapterStore& store) : model_(model), store_(store) {}
  // The adapter of an entry: that of an earlier one of the same, or the store's.
  absl::StatusOr<std::shared_ptr<const ResidentAdapter>> Read(const StackEntry& entry);
  // Scales of each member's terms, and what the answer tells of it.
  void Resolve(Member& member);
  // Which terms go into merged copies. BAD_STRENGTH where the order of the stack does not allow it.
  absl::Status PlanMerges();
  bool MergedAt(int site, const TermId& id) const;
  const ResidentTerm& term(const TermId& id) const { return members_[id.member].adapter->terms[id.term]; }
  // The operation of a term after `before`; nullopt: it does nothing at this strength.
  std::optional<SiteOp> MakeOp(const TermId& id, double factor, absl::Span<const SiteOp> before, const BaseLinear& base, NormCache* norms) const;
  std::string MergeKey(int site, const std::vector<TermId>& terms) const;
  std::vector<double> EvaluationFactors(int64_t evaluation, absl::Span<const double> factors) const;
  std::unique_ptr<StackProgram> MakeProgram(const std::vector<double>& factors) const;

  const ResidentModel& model_;
  AdapterStore& store_;
  std::vector<Member> members_;
  std::map<int, std::vector<TermId>> merges_;  // By site, in stack order.
  std::map<int, std::shared_ptr<const BaseLinear>> merged_;
  AdapterSource slowest_source_ = AdapterSource::kDevice;
  bool preparing_ = false;  // Merged copies are being made, or could not be.
  std::vector<ResolvedAdapter> resolved_;
  std::map<std::vector<double>, std::unique_ptr<StackProgram>> programs_;
};

}  // namespace h3
