nccl_allocator_source = """
extern "C" {
void register_segment(seg) {
  ncclResult_t res = ncclCommWindowRegister(comm, seg.addr, seg.size, &seg.window, 1);
}
}
"""
