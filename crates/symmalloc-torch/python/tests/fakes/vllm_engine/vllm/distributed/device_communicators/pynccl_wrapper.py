class NCCLLibrary:
    def ncclCommWindowRegister(self, comm, buffer, size, flags):  # noqa: N802
        return 1
