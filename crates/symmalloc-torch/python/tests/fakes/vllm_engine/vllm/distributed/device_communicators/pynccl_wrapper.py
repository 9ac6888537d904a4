class NCCLLibrary:
    def ncclCommWindowRegister(self, comm, buffer, size, flags):
        return 1
