#include "backends/name.h"

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace mittens {

namespace {

const std::string* kept_by_process(std::string_view text) {
  static auto* mutex = new std::mutex();  // both outlive every thread
  static auto* names = new std::unordered_set<std::string>();
  std::lock_guard lock(*mutex);
  return &*names->emplace(text).first;
}

}  // namespace

const std::string* Name::kept(std::string_view text) {
  static thread_local std::unordered_map<std::string_view, const std::string*> known;
  if (const auto found = known.find(text); found != known.end()) {
    return found->second;
  }
  const std::string* name = kept_by_process(text);
  known.emplace(*name, name);
  return name;
}

}  // namespace mittens
