"""What symmalloc.cupy uses of CuPy, for machines without it."""

from . import cuda as cuda
