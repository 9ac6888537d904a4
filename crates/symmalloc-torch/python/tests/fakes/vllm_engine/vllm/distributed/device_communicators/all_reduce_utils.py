NCCL_SYMM_MEM_ALL_REDUCE_CONFIG = {
    "min_world_size": 4,
    "custom_ar_preferred_ranges": {},
    "always_use_above_world_size": 8,
}
