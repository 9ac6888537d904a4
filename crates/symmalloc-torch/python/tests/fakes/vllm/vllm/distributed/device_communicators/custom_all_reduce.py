class CustomAllreduce:
    def __init__(self, group, device, max_size=8192, symm_mem_enabled=False, *, register_graph_buffers=True):
        self.is_registered = register_graph_buffers
