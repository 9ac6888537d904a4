"""The subset of Numba that symmalloc.numba uses, for machines without it: the contract of external memory managers."""
