// Ends C++ code at once because Python asks for it: at Ctrl-C, or if another signal handler raises.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <memory>

namespace mittens {

class Interrupted : public std::exception {
 public:
  explicit Interrupted(nanobind::python_error raised)
      : raised_(std::make_shared<nanobind::python_error>(std::move(raised))) {}

  const char* what() const noexcept override {
    return "interrupted";
  }
  void restore() const {
    raised_->restore();
  }

 private:
  std::shared_ptr<nanobind::python_error> raised_;  // which takes the GIL where it ends
};

// Runs the handlers of signals that have come, in the main thread; takes the GIL.
void throw_if_interrupted();

}  // namespace mittens
