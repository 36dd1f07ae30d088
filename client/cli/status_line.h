// A line of a terminal that is drawn over and over.
#pragma once

#include <ostream>
#include <string>

namespace h3::ctl {

// Thread-compatible. Erase it before anything else is written to `out`.
class StatusLine {
 public:
  explicit StatusLine(std::ostream& out) : out_(out) {}

  void Draw(const std::string& line) {
    if (line == drawn_) return;  // Progress may come a thousand times a second.
    out_ << "\r\x1b[K" << line << std::flush;
    drawn_ = line;
  }
  void Erase() {
    if (!drawn_.empty()) out_ << "\r\x1b[K" << std::flush;
    drawn_.clear();
  }

 private:
  std::ostream& out_;
  std::string drawn_;
};

}  // namespace h3::ctl
