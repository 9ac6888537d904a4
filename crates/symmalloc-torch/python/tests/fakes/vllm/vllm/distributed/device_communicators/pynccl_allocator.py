class nccl_symm_mem_context:
    def __init__(self, pynccl_comm, disabled=False):
        raise AssertionError("the original context was used")
