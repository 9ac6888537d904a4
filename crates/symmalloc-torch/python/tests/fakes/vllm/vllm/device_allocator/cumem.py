class CuMemAllocator:
    instance = None

    @staticmethod
    def get_instance():
        raise AssertionError("the original allocator was used")
