// From addresses in a compiled library back to lines of the .metal files, by the compiler's line table in it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mittens::simulator {

class Lines {
 public:
  // Reads DWARF 4 from an ELF file; from any other it knows no lines.
  explicit Lines(const std::string& path);

  // "norm/softmax.metal:42", or an empty string.
  std::string at(uint64_t address) const;
  // The same in two; an empty string and 0 for code that belongs to no line.
  std::pair<std::string, unsigned> place(uint64_t address) const;

 private:
  struct Row {
    uint64_t address;
    uint32_t file;
    uint32_t line;  // 0 for code that belongs to no line
    bool end;  // past the last instruction of a run of code
  };

  void read_unit(const char* begin, const char* end);

  std::vector<std::string> files_;
  std::vector<Row> rows_;
};

}  // namespace mittens::simulator
