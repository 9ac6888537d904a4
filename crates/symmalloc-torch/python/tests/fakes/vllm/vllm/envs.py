import os

VLLM_USE_NCCL_SYMM_MEM = os.environ.get("VLLM_USE_NCCL_SYMM_MEM") == "1"
