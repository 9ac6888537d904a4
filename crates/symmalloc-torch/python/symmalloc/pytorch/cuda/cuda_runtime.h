// The calls of CUDA's runtime without language extensions, for installations that lack `crt/`, such as CUDA's wheels.
#pragma once

#include <cuda_runtime_api.h>
