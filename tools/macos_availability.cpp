// The function behind __builtin_available: the version of macOS. Xcode links Apple's own in, ziglang has none.
#include <cstdint>

struct Version {
  uint32_t platform;
  uint32_t number;  // major, minor and patch in 16, 8 and 8 bits
};

extern "C" bool _availability_version_check(uint32_t count, const Version* versions);  // of libSystem

extern "C" __attribute__((visibility("hidden"))) int32_t __isPlatformVersionAtLeast(uint32_t platform, uint32_t major,
                                                                                    uint32_t minor, uint32_t patch) {
  Version wanted{platform, major << 16 | (minor & 0xff) << 8 | (patch & 0xff)};
  return _availability_version_check(1, &wanted);
}
