// mlx_mittens.patch(exact=True): what is computed of several rows is bit for bit what is computed of each row alone.
#pragma once

namespace mittens {

bool is_exact();

// While an instance exists, is_exact() is this on its thread: for a call that was made earlier and computes now.
class Exactness {
 public:
  explicit Exactness(bool value);
  ~Exactness();
  Exactness(const Exactness&) = delete;
  Exactness& operator=(const Exactness&) = delete;

 private:
  int before_;
};

}  // namespace mittens
