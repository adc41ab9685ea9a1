#include "simulator/lines.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

namespace mittens::simulator {

namespace {

class Reader {
 public:
  Reader(const char* begin, const char* end) : at_(begin), end_(end) {}

  template <typename T>
  T number() {
    T value{};
    if (static_cast<size_t>(end_ - at_) < sizeof(T)) {
      at_ = end_;
      return value;
    }
    std::memcpy(&value, at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  uint64_t variable() {
    uint64_t value = 0;
    for (unsigned shift = 0; at_ < end_; shift += 7) {
      const auto byte = static_cast<uint8_t>(*at_++);
      value |= uint64_t{byte & 0x7fu} << (shift & 63);
      if (!(byte & 0x80)) {
        break;
      }
    }
    return value;
  }
  int64_t signed_variable() {
    uint64_t value = 0;
    unsigned shift = 0;
    uint8_t byte = 0x80;
    while ((byte & 0x80) && at_ < end_) {
      byte = static_cast<uint8_t>(*at_++);
      value |= uint64_t{byte & 0x7fu} << (shift & 63);
      shift += 7;
    }
    if (shift < 64 && (byte & 0x40)) {
      value |= ~uint64_t{0} << shift;
    }
    return static_cast<int64_t>(value);
  }
  std::string text() {
    const char* end = std::find(at_, end_, '\0');
    std::string result(at_, end);
    at_ = end < end_ ? end + 1 : end;
    return result;
  }
  void skip(size_t bytes) {
    at_ += std::min<size_t>(bytes, static_cast<size_t>(end_ - at_));
  }
  const char* at() const {
    return at_;
  }
  bool done() const {
    return at_ >= end_;
  }

 private:
  const char* at_;
  const char* end_;
};

// The opcodes of a line number program (DWARF 4, section 6.2.5).
enum Standard : uint8_t {
  kExtended = 0,
  kCopy = 1,
  kAdvanceAddress = 2,
  kAdvanceLine = 3,
  kSetFile = 4,
  kSetColumn = 5,
  kNegateStatement = 6,
  kBasicBlock = 7,
  kConstAddAddress = 8,
  kFixedAdvance = 9,
  kPrologueEnd = 10,
  kEpilogueBegin = 11,
  kSetIsa = 12,
};
enum Extended : uint8_t { kEndSequence = 1, kSetAddress = 2 };

}  // namespace

Lines::Lines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> image{std::istreambuf_iterator<char>(file), {}};
  const auto field = [&](auto value, size_t offset) {
    if (offset + sizeof(value) <= image.size()) {
      std::memcpy(&value, image.data() + offset, sizeof(value));
    }
    return value;
  };
  if (image.size() < 64 || std::memcmp(image.data(), "\177ELF\2", 5) != 0) {
    return;
  }
  // The section headers of a 64-bit ELF file; the last one named holds their names.
  const uint64_t table = field(uint64_t{}, 0x28);
  const uint16_t size = field(uint16_t{}, 0x3a);
  const uint16_t count = field(uint16_t{}, 0x3c);
  const uint64_t names = field(uint64_t{}, table + uint64_t{size} * field(uint16_t{}, 0x3e) + 0x18);
  for (uint16_t i = 0; i < count; ++i) {
    const uint64_t header = table + uint64_t{size} * i;
    const uint64_t name = names + field(uint32_t{}, header);
    const uint64_t begin = field(uint64_t{}, header + 0x18);
    const uint64_t bytes = field(uint64_t{}, header + 0x20);
    if (name + 12 <= image.size() && begin + bytes <= image.size() &&
        std::memcmp(image.data() + name, ".debug_line", 12) == 0) {
      Reader units(image.data() + begin, image.data() + begin + bytes);
      while (!units.done()) {
        const uint32_t length = units.number<uint32_t>();
        const char* unit = units.at();
        units.skip(length);
        read_unit(unit, units.at());
      }
    }
  }
  // Where one function ends another may begin: the end first.
  std::stable_sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) {
    return a.address != b.address ? a.address < b.address : a.end && !b.end;
  });
}

void Lines::read_unit(const char* begin, const char* end) {
  Reader reader(begin, end);
  if (reader.number<uint16_t>() != 4) {
    return;
  }
  const uint32_t header_length = reader.number<uint32_t>();
  const char* program = reader.at() + header_length;
  const uint64_t instruction_bytes = reader.number<uint8_t>();
  reader.skip(2);  // operations per instruction; whether rows are statements
  const int line_base = reader.number<int8_t>();
  const unsigned line_range = reader.number<uint8_t>();
  const unsigned first_special = reader.number<uint8_t>();
  std::vector<uint8_t> operands(first_special);
  for (unsigned i = 1; i < first_special; ++i) {
    operands[i] = reader.number<uint8_t>();
  }
  std::vector<std::string> folders{""};  // the first is the compiler's own
  for (std::string folder = reader.text(); !folder.empty(); folder = reader.text()) {
    folders.push_back(folder.front() == '/' ? "" : folder + "/");  // a machine's paths say nothing to people
  }
  const size_t first_file = files_.size();
  for (std::string name = reader.text(); !name.empty(); name = reader.text()) {
    const uint64_t folder = reader.variable();
    reader.variable();  // time
    reader.variable();  // size
    name = (folder < folders.size() ? folders[folder] : "") + name;
    files_.push_back(name.rfind("./", 0) == 0 ? name.substr(2) : name);
  }
  if (program >= end || line_range == 0) {
    return;
  }

  Reader code(program, end);
  Row row{0, 1, 1, false};
  const auto emit = [&] {
    rows_.push_back({row.address, static_cast<uint32_t>(first_file + row.file - 1), row.line, false});
  };
  while (!code.done()) {
    const unsigned opcode = code.number<uint8_t>();
    if (opcode >= first_special) {
      const unsigned adjusted = opcode - first_special;
      row.address += adjusted / line_range * instruction_bytes;
      row.line += static_cast<uint32_t>(line_base + static_cast<int>(adjusted % line_range));
      emit();
      continue;
    }
    switch (opcode) {
      case kExtended: {
        const uint64_t length = code.variable();
        const char* next = code.at() + length;
        const uint8_t extended = code.number<uint8_t>();
        if (extended == kSetAddress) {
          row.address = code.number<uint64_t>();
        } else if (extended == kEndSequence) {
          rows_.push_back({row.address, 0, 0, true});
          row = {0, 1, 1, false};
        }
        code.skip(static_cast<size_t>(next - code.at()));
        break;
      }
      case kCopy:
        emit();
        break;
      case kAdvanceAddress:
        row.address += code.variable() * instruction_bytes;
        break;
      case kAdvanceLine:
        row.line += static_cast<uint32_t>(code.signed_variable());
        break;
      case kSetFile:
        row.file = static_cast<uint32_t>(code.variable());
        break;
      case kConstAddAddress:
        row.address += (255 - first_special) / line_range * instruction_bytes;
        break;
      case kFixedAdvance:
        row.address += code.number<uint16_t>();
        break;
      default:
        for (unsigned i = 0; i < operands[opcode]; ++i) {
          code.variable();
        }
    }
  }
}

std::string Lines::at(uint64_t address) const {
  const auto [file, line] = place(address);
  return line == 0 ? "" : file + ":" + std::to_string(line);
}

std::pair<std::string, unsigned> Lines::place(uint64_t address) const {
  auto row = std::upper_bound(rows_.begin(), rows_.end(), address,
                              [](uint64_t address, const Row& row) { return address < row.address; });
  while (row != rows_.begin()) {
    --row;
    if (row->end) {
      break;
    }
    if (row->line != 0 && row->file < files_.size()) {
      return {files_[row->file], row->line};
    }
  }
  return {"", 0};
}

}  // namespace mittens::simulator
