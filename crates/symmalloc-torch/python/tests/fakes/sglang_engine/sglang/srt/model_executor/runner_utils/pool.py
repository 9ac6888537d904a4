MIB = 1 << 20


def find_free_graph_pool_runs(pool_id):
    """Returns addresses and sizes: aligned, misaligned, and too small for an aligned segment."""
    return [(8 * MIB, 6 * MIB), (20 * MIB + 512, 9 * MIB), (41 * MIB, 2 * MIB), (64 * MIB, 512)]
