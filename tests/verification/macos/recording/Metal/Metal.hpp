// A stand-in for metal-cpp on Linux: the names that MLX's metal/device.h uses, over a device that records instead of
// running. Against the real header the same sources are compiled and linked by tests/test_macos_host.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// Clang's question for the macOS that a program runs on, such as "macOS 26.2": here a test says which one that is.
bool pretended_macos_is_at_least(const char* version);
#define __builtin_available(version, ...) pretended_macos_is_at_least(#version)

namespace NS {

using UInteger = std::size_t;

template <typename T>
class SharedPtr {
 public:
  T* get() const {
    return pointer_;
  }

 private:
  T* pointer_ = nullptr;
};

template <typename T>
SharedPtr<T> TransferPtr(T*) {
  return {};
}

struct AutoreleasePool {
  static AutoreleasePool* alloc() {
    static AutoreleasePool pool;
    return &pool;
  }
  AutoreleasePool* init() {
    return this;
  }
};

struct String {
  std::string text;
  const char* utf8String() const {
    return text.c_str();
  }
};

struct Array {
  std::vector<String> strings;
  UInteger count() const {
    return strings.size();
  }
  template <typename Object>
  const Object* object(UInteger index) const {
    return &strings.at(index);
  }
};

}  // namespace NS

namespace MTL {

struct Size {
  Size(NS::UInteger width, NS::UInteger height, NS::UInteger depth) : width(width), height(height), depth(depth) {}
  NS::UInteger width, height, depth;
};

enum class DataType {};

class Allocation;
class Buffer;
class CommandQueue;
class Device;
class Fence;
class Function;
class LinkedFunctions;
class Resource;
class ResidencySet;

// Launches run as they are recorded, while their caller still holds the arrays.
struct CommandBuffer {
  template <typename Handler>
  void addCompletedHandler(Handler&&) {}
};

struct Library {
  std::string source;
  NS::Array names = {};
  NS::Array* functionNames() {
    return &names;
  }
};

struct ComputePipelineState {
  std::string kernel;
  Library* library;
  NS::UInteger threads = 1024;
  NS::UInteger memory = 0;
  NS::UInteger maxTotalThreadsPerThreadgroup() const {
    return threads;
  }
  NS::UInteger staticThreadgroupMemoryLength() const {
    return memory;
  }
  NS::UInteger threadExecutionWidth() const {
    return 32;
  }
};

// What setBytes was given, by buffer index.
struct ComputeCommandEncoder {
  ComputePipelineState* pipeline = nullptr;
  NS::UInteger threadgroup_bytes = 0;
  std::vector<std::pair<NS::UInteger, std::vector<std::byte>>> bytes;

  void setComputePipelineState(ComputePipelineState* state) {
    pipeline = state;
  }
  void setBytes(const void* data, NS::UInteger length, NS::UInteger index) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes.emplace_back(index, std::vector<std::byte>(begin, begin + length));
  }
  void setThreadgroupMemoryLength(NS::UInteger length, NS::UInteger) {
    threadgroup_bytes = length;
  }
};

}  // namespace MTL
