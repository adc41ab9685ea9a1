// The settings of mlx_mittens.patch() that change results: exact=True and activations="int8".
#pragma once

#include <optional>
#include <string>

namespace mittens {

struct Numerics {
  bool exact;  // each of several rows gets bit for bit the result of a call of it alone
  bool int8;  // products with quantized weights may round activations to integers of 8 bits

  bool operator==(const Numerics&) const = default;
};

Numerics numerics();

inline bool is_exact() {
  return numerics().exact;
}

// While an instance exists, numerics() is this on its thread: a lazy call computes by the settings of when it was made,
// and a call's arguments come before them.
class WithNumerics {
 public:
  explicit WithNumerics(Numerics value);
  ~WithNumerics();
  WithNumerics(const WithNumerics&) = delete;
  WithNumerics& operator=(const WithNumerics&) = delete;

 private:
  std::optional<Numerics> before_;
};

// numerics() with an op's argument `activations`, if there is one.
Numerics with_activations(const char* op, const std::optional<std::string>& activations);

}  // namespace mittens
