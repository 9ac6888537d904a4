// A version that PyTorch never had.
#pragma once

#define TORCH_VERSION_MAJOR 2
#define TORCH_VERSION_MINOR 99
#define TORCH_VERSION "2.99.0"
