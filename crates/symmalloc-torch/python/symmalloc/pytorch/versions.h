// Guards for differences between versions of PyTorch. Each guard names the version that added a feature.
#pragma once

#include <torch/headeronly/version.h>

// True for this version of PyTorch and later ones.
#define SYMMALLOC_TORCH(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
