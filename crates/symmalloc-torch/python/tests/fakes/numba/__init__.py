"""What symmalloc.numba uses of Numba, for machines without it: the contract of external memory managers."""
