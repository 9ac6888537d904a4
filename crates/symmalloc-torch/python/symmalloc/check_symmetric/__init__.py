"""`python -m symmalloc.check_symmetric`: checks that NCCL's symmetric memory is correct on this machine, under any allocator.

Each case runs in separate processes with a deadline. docs/check-symmetric.md in the repository describes the cases.

__main__    the command line
cases       the cases
pools       the allocators, each as a pool of symmetric memory
nccl        NCCL and the CUDA driver through ctypes
rank        the state of one rank of a case: its notes, its values, and exchanges between ranks
runner      processes and deadlines
verdicts    verdicts, the table and JSON

Only `pools` imports symmalloc, and only to check symmalloc itself.
"""
