DEFERRABLE_TAGS = ("weights", "kv_cache")


def get_mem_allocator_instance():
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
