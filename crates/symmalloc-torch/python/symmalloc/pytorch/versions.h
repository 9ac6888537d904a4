// Guards for what differs between the versions of PyTorch. Each guard names the version that added something.
#pragma once

#include <torch/headeronly/version.h>

// True from this version of PyTorch on.
#define SYMMALLOC_TORCH(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
