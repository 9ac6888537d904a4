from vllm.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_tensor


def has_symmetric_output(output):
    return is_symmetric_memory_tensor(output)
