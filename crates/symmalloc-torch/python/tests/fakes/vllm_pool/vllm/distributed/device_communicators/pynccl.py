class PyNcclCommunicator:
    pass
