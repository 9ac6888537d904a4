"""The subset of CuPy that symmalloc.cupy uses, for machines without it."""

from . import cuda as cuda
