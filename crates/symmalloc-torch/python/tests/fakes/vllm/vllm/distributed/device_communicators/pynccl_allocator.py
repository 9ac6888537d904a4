_cached_pool_snapshot = None


def is_symmetric_memory_tensor(tensor):
    return _cached_pool_snapshot is not None


class nccl_symm_mem_context:
    def __init__(self, pynccl_comm, disabled=False):
        raise AssertionError("the original context was used")
