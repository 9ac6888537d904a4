// A subset of CUDA's `crt/host_defines.h`, which its wheels lack, for compilers other than nvcc.
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __global__
#define __host__
#define __no_return__ __attribute__((noreturn))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDARTAPI_WEAK __attribute__((weak))
