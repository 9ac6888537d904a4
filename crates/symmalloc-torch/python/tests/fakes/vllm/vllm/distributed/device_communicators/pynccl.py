class PyNcclCommunicator:
    """A communicator that the test has connected."""

    def __init__(self, comm, rank, world_size, device):
        self.comm, self.rank, self.world_size, self.device = comm, rank, world_size, device
        self.is_destroyed = False

    def destroy(self):
        self.is_destroyed = True


def symmetric_context(communicator):
    """Enters the context as the custom all-reduce does: looked up at the call."""
    from vllm.distributed.device_communicators.pynccl_allocator import nccl_symm_mem_context

    return nccl_symm_mem_context(communicator)
