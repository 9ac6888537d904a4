import os

failed = False
compilations = 0


def is_symmetric_memory_enabled():
    return os.environ.get("VLLM_USE_NCCL_SYMM_MEM") == "1" and not failed


def compile_nccl_allocator():
    global failed, compilations
    compilations += 1
    failed = os.environ.get("FAKE_VLLM_COMPILES") == "0"
