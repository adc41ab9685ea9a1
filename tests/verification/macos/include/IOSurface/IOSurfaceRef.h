// The one name that metal-cpp needs of Apple's header, for compiling the macOS sources on Linux.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
