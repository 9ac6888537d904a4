// The calls of CUDA's runtime without the language: used where `crt/` is missing, as in CUDA's wheels.
#pragma once

#include <cuda_runtime_api.h>
