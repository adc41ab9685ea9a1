// The few names that metal-cpp needs of Apple's header, for compiling the macOS sources on Linux.
#pragma once

typedef double CFTimeInterval;
typedef const struct __CFString* CFStringRef;
typedef struct __CFRunLoop* CFRunLoopRef;
