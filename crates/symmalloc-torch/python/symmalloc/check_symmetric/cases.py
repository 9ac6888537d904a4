"""The cases. docs/check-symmetric.md describes the mechanism of each.

A case that ends normally is correct if no compared element was wrong. The runner requires compared elements and symmetric
kernels.

These cases also check that their mechanism occurred, and otherwise raise `CannotRun`:

1-address-order   several segments, in an order of addresses that differs between ranks
2-event           second streams that are idle on some ranks only
7-address-reused  an address that is reused
8-remapped        memory that is released
8-sleep           a pool that can sleep
9-out-of-memory   an allocation that fails on rank 0 alone
10-opposite       all-reduces that do not wait for each other

The others do not check it. 6-spanning remarks how many allocations of the driver the tensor spans, and 11-backward, 11-threads
and 11-nested remark tensors outside of their pools.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, NamedTuple

from .nccl import Filler, Holes, address_range
from .pools import Pool, RawLink
from .rank import CannotRun, Rank
from .runner import Case

MIB = 1 << 20
# 1 MiB and 2 MiB of float32. Smaller tensors may use a kernel that does not access the peers' buffers.
SMALL, LARGE = 1 << 18, 1 << 19
SEGMENT_BYTES = 2 * MIB
# About 30 ms on a GPU with 1.7 GHz.
DELAY_CYCLES = 50_000_000
CHURN = 10_000
OPPOSITE_SECONDS = 4.0


def empty(rank: Rank, pool: Pool, elements: int) -> Any:
    """Allocates a tensor in the pool, and creates the windows of new segments. Collective."""
    import torch

    rank.note(f"allocates {elements * 4:,} bytes in the pool")
    with pool.scope():
        tensor = torch.empty(elements, device="cuda")
    pool.observe()
    rank.note("synchronizes the windows of the pool")
    pool.sync()
    return tensor


def reduce(rank: Rank, link: Any, tensor: Any, tag: int) -> None:
    """Fills, reduces and checks a tensor."""
    rank.fill(tensor, tag)
    link.all_reduce(tensor)
    rank.expect(tensor, tag)


def reduce_all(rank: Rank, link: Any, tensors: list[Any], tag: int) -> None:
    """Fills all tensors, reduces them, and then checks them all, so that a write to a wrong tensor is noticed."""
    for number, tensor in enumerate(tensors):
        rank.fill(tensor, tag + number)
    for tensor in tensors:
        link.all_reduce(tensor)
    for number, tensor in enumerate(tensors):
        rank.expect(tensor, tag + number)


def settle(rank: Rank) -> None:
    rank.note("waits for the device")
    rank.settle()


def compare_places(rank: Rank, pool: Pool, tensors: list[Any]) -> None:
    """Adds a remark if the ranks placed tensors differently."""
    everyone = rank.exchange([pool.place(tensor) for tensor in tensors])
    rank.facts["places"] = everyone[rank.rank]
    differ = sum(len({str(place) for place in places}) > 1 for places in zip(*everyone, strict=True))
    if differ:
        rank.remark(f"{differ} of {len(tensors)} tensors have different places on the ranks")


def replay(rank: Rank, graph: Any) -> None:
    rank.note("replays a graph")
    graph.replay()


def linked(rank: Rank) -> tuple[Pool, Any]:
    """Returns a pool and a communicator on which it is registered."""
    pool = rank.allocator.pool()
    return pool, pool.link()


# The control


def control(rank: Rank) -> None:
    """Passes tensors of different segments or offsets to one all-reduce: the result must be wrong."""
    pool, link = linked(rank)
    tensors = [empty(rank, pool, LARGE) for _ in range(2)]
    for tensor in tensors:
        rank.fill(tensor, 1)
    rank.exchange("filled")
    tensor = tensors[rank.rank % 2]
    link.all_reduce(tensor)
    rank.expect(tensor, 1)


# 1


def address_order(rank: Rank) -> None:
    """Frees and reallocates tensors in segments whose addresses ascend on even ranks and descend on odd ones."""
    pool, link = linked(rank)
    holes = Holes(4, SEGMENT_BYTES, ascending=rank.rank % 2 == 0)
    for round_number in range(3):
        tensors = []
        for number in range(8):
            if number % 2 == 0:
                holes.open()
            tensors.append(empty(rank, pool, SMALL))
        if round_number == 0:
            places = [tensor.data_ptr() for tensor in tensors]
            order = sorted(range(8), key=places.__getitem__)
            orders = rank.exchange(order)
            segments = rank.exchange(len(pool.segments()))
            rank.facts["addresses"] = [hex(place) for place in places]
        reduce_all(rank, link, tensors, round_number * 100)
        if round_number:
            compare_places(rank, pool, tensors)
        settle(rank)
        del tensors
    if max(segments) == 1:
        raise CannotRun("all tensors are in one segment")
    if orders.count(orders[0]) == rank.world:
        raise CannotRun("the driver placed the segments in the same order on all ranks")


# 2


def event_on_one_rank(rank: Rank) -> None:
    """Frees a block that a second stream uses, while that stream is busy on some ranks only."""
    import torch

    pool, link = linked(rank)
    side = torch.cuda.Stream()
    idle: list[bool] = []
    held = []
    for round_number in range(6):
        is_slow = (round_number + rank.rank) % 2 == 1
        used = empty(rank, pool, LARGE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if is_slow:
                torch.cuda._sleep(DELAY_CYCLES)
            used.fill_(-1.0)
        used.record_stream(side)
        del used
        if not is_slow:
            side.synchronize()
        idle.append(side.query())
        # The block is free on ranks whose allocator polls events and whose second stream is idle.
        held.append(empty(rank, pool, LARGE))
        reduce(rank, link, held[-1], round_number)
    settle(rank)
    # No earlier result may have been overwritten.
    for round_number, tensor in enumerate(held):
        rank.expect(tensor, round_number)
    compare_places(rank, pool, held)
    everyone = rank.exchange(idle)
    if all(len(set(states)) == 1 for states in zip(*everyone, strict=True)):
        raise CannotRun("the second streams of all ranks were idle at the same time")


# 3


def private_allocations(rank: Rank) -> None:
    """Allocates private memory and addresses on rank 0, before and between symmetric tensors."""
    import torch

    private = [torch.empty(3 * MIB, device="cuda") for _ in range(5)] if rank.rank == 0 else []
    holes = Holes(8, SEGMENT_BYTES, ascending=False) if rank.rank == 0 else None
    pool, link = linked(rank)
    for round_number in range(3):
        tensors = []
        for number in range(8):
            if rank.rank == 0:
                if holes is not None and number % 2 == 0:
                    holes.open()
                private.append(torch.empty((number + 1) * SMALL, device="cuda"))
                if number % 3 == 2:
                    private.pop(0)
            tensors.append(empty(rank, pool, SMALL if number % 2 else LARGE))
        reduce_all(rank, link, tensors, round_number * 100)
        if round_number:
            compare_places(rank, pool, tensors)
        settle(rank)
        # The ranks free in the same order.
        for number in (3, 0, 6, 1, 7, 2, 5, 4):
            tensors[number] = None


# 4


def grows_at_different_moments(rank: Rank) -> None:
    """Allocates all tensors at once on even ranks. Odd ranks allocate the second half after the first half was reduced."""
    import torch

    pool, link = linked(rank)
    tensors: list[Any] = []

    def grow(count: int) -> None:
        rank.note(f"allocates {count} tensors in the pool")
        for _ in range(count):
            with pool.scope():
                tensors.append(torch.empty(SMALL, device="cuda"))
            pool.observe()

    grow(8 if rank.rank % 2 == 0 else 4)
    rank.note("synchronizes the windows of the pool")
    pool.sync()
    reduce_all(rank, link, tensors[:4], 0)
    settle(rank)
    if rank.rank % 2 == 1:
        grow(4)
    rank.note("synchronizes the windows of the pool")
    pool.sync()
    reduce_all(rank, link, tensors[4:], 10)
    settle(rank)
    compare_places(rank, pool, tensors)


def grows_during_collective(rank: Rank) -> None:
    """Grows the pool while an all-reduce waits for another rank."""
    import torch

    pool, link = linked(rank)
    tensors = [empty(rank, pool, LARGE)]
    for number in range(6):
        rank.fill(tensors[-1], number)
        if (number + rank.rank) % 2 == 0:
            torch.cuda._sleep(DELAY_CYCLES)
        link.all_reduce(tensors[-1])
        tensors.append(empty(rank, pool, 6 * LARGE))
        rank.expect(tensors[-2], number)
        reduce(rank, link, tensors[-1], 100 + number)
    settle(rank)
    compare_places(rank, pool, tensors)


# 5


class Capture:
    """A capture on a stream, with the graph's own pool."""

    def __init__(self, rank: Rank, stream: Any) -> None:
        import torch

        self._rank = rank
        self.graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        self._capture = torch.cuda.graph(self.graph, pool=self._pool, stream=stream)

    def __enter__(self) -> None:
        import torch

        torch.cuda.synchronize()
        self._rank.note("begins a capture")
        self._rank.allocator.graph_pool = self._pool
        self._capture.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._rank.note("ends a capture")
        self._rank.allocator.graph_pool = None
        self._capture.__exit__(*error)


def registered_during_capture(rank: Rank) -> None:
    """Grows the pool during a capture."""
    import torch

    pool, link = linked(rank)
    reduce(rank, link, empty(rank, pool, SMALL), 0)
    settle(rank)
    stream, output = torch.cuda.Stream(), torch.empty(SMALL, device="cuda")
    capture = Capture(rank, stream)
    with capture:
        tensor = empty(rank, pool, SMALL)
        rank.fill(tensor, 1)
        link.all_reduce(tensor)
        output.copy_(tensor)
    rank.exchange("captured")
    for _ in range(3):
        output.zero_()
        torch.cuda.synchronize()
        replay(rank, capture.graph)
        rank.expect(output, 1)
        settle(rank)


class Captured(NamedTuple):
    """A captured graph of two all-reduces."""

    pool: Pool
    """The pool of tensors outside of the graph."""
    graphs: Pool
    """The pool of the graph's tensors, which must live as long as the graph."""
    link: Any
    stream: Any
    """The stream of the capture."""
    graph: Any
    source: Any
    output: Any


def _captured(rank: Rank) -> Captured:
    """Captures two all-reduces whose tensors are allocated and freed in the capture. Collective."""
    import torch

    pool, link = linked(rank)
    stream = torch.cuda.Stream()
    graphs = _graph_pool(rank, pool, stream)
    source, output = torch.empty(SMALL, device="cuda"), torch.empty(SMALL, device="cuda")
    capture = Capture(rank, stream)
    with capture:
        with graphs.scope():
            first = torch.empty(SMALL, device="cuda")
        first.copy_(source)
        link.all_reduce(first)
        half = first * 0.5
        del first
        with graphs.scope():
            again = torch.empty(SMALL, device="cuda")
        again.copy_(half)
        link.all_reduce(again)
        output.copy_(again)
        del again, half
    rank.exchange("captured")
    return Captured(pool, graphs, link, stream, capture.graph, source, output)


def _graph_pool(rank: Rank, pool: Pool, stream: Any) -> Pool:
    """Returns a pool that has free memory for the captures on a stream."""
    import torch

    graphs = pool.for_graphs(16 * MIB, stream)
    if graphs is pool:
        with torch.cuda.stream(stream):
            tensors = [empty(rank, pool, SMALL) for _ in range(4)]
            settle(rank)
            del tensors
    return graphs


def graph_memory_reused(rank: Rank) -> None:
    """Replays a graph that reuses memory, and allocates and reduces other tensors of the pool between replays."""
    import torch

    captured = _captured(rank)
    ranks = rank.world * (rank.world + 1) // 2
    # The second all-reduce sums equal values of all ranks.
    base = 2 * (torch.arange(SMALL, device="cuda", dtype=torch.float32) % 1024)
    for number in range(20):
        captured.source.copy_(base).mul_(rank.rank + 1)
        replay(rank, captured.graph)
        rank.compared(SMALL, (captured.output != base * (0.5 * ranks * rank.world)).sum())
        tensors = [empty(rank, captured.pool, SMALL * (1 + (number + other) % 2)) for other in range(2)]
        reduce_all(rank, captured.link, tensors, number * 10)
        del tensors
    settle(rank)


def graph_tensor_freed(rank: Rank) -> None:
    """Allocates tensors after a capture whose symmetric tensors were freed. A replay must not overwrite them."""
    import torch

    captured = _captured(rank)
    captured.source.fill_(-1.0)
    with torch.cuda.stream(captured.stream):
        captured.stream.wait_stream(torch.cuda.default_stream())
        tensors = [empty(rank, captured.pool, SMALL) for _ in range(4)]
        reduce_all(rank, captured.link, tensors, 0)
        replay(rank, captured.graph)
        for number, tensor in enumerate(tensors):
            rank.expect(tensor, number)
        settle(rank)


# 6


def inside_segment(rank: Rank) -> None:
    """Reduces parts of a tensor, at many offsets, and checks what lies around them."""
    pool, link = linked(rank)
    padding = empty(rank, pool, LARGE)
    tensor = empty(rank, pool, 8 * LARGE)
    for number, (start, elements) in enumerate(
        ((0, SMALL), (4, SMALL), (1, SMALL), (1023, SMALL + 1), (3 * LARGE + 7, LARGE + 13), (8 * LARGE - SMALL, SMALL))
    ):
        rank.fill(tensor, number)
        part = tensor[start : start + elements]
        link.all_reduce(part)
        base, ranks = rank.base(tensor.numel(), number), rank.world * (rank.world + 1) // 2
        expected = base * float(rank.rank + 1)
        expected[start : start + elements] = base[start : start + elements] * float(ranks)
        rank.compared(tensor.numel(), (tensor != expected).sum())
    reduce(rank, link, padding, 50)
    settle(rank)


def part_of_segment(rank: Rank) -> None:
    """Registers a part of a segment, and reduces tensors inside, outside and across its end."""
    pool = rank.allocator.pool()
    tensor = empty(rank, pool, 8 * LARGE)
    link = RawLink.connect(rank, "communicator with a window over a part")
    rank.allocator._warm(link)
    page = -tensor.data_ptr() % 4096 // 4
    start, elements = page + LARGE, 4 * LARGE
    address = tensor.data_ptr() + 4 * start
    rank.note("ncclCommWindowRegister of a part of a segment")
    window = link.communicator.register(address, 4 * elements)
    parts = (
        (start, LARGE, True),
        (start + LARGE, 3 * LARGE, True),
        (0, page + SMALL, False),
        (start + elements, LARGE, False),
    )
    for number, (first, count, is_inside) in enumerate(parts):
        part = tensor[first : first + count]
        rank.fill(part, number)
        link.all_reduce(part, is_symmetric=is_inside)
        rank.expect(part, number)
        settle(rank)
    across = tensor[start + 3 * LARGE : start + 5 * LARGE]
    rank.fill(across, 50)
    link.all_reduce(across, is_symmetric=False)
    rank.expect(across, 50)
    settle(rank)
    rank.exchange("reduced")
    link.communicator.deregister(window)


def spans_segments(rank: Rank) -> None:
    """Reduces a tensor that is larger than the pieces of memory of which a segment may consist."""
    pool, link = linked(rank)
    first = empty(rank, pool, 6 * LARGE)
    reduce(rank, link, first, 1)
    settle(rank)
    large = empty(rank, pool, 24 * LARGE)
    address, end = large.data_ptr(), large.data_ptr() + 4 * large.numel()
    pieces = 0
    while address < end:
        base, size_bytes = address_range(address)
        address, pieces = base + size_bytes, pieces + 1
    rank.facts["pieces"] = pieces
    rank.remark(f"the tensor is in {pieces} {'allocation' if pieces == 1 else 'allocations'} of the driver")
    for number in range(3):
        reduce_all(rank, link, [first, large], 10 * number)
    settle(rank)


# 7


def address_reused(rank: Rank) -> None:
    """Releases segments, and allocates again at the same addresses."""
    pool, link = linked(rank)
    before: set[int] = set()
    reused = released = 0
    for round_number in range(4):
        tensors = [empty(rank, pool, 12 * LARGE) for _ in range(2)]
        segments = {address for address, _ in pool.segments()}
        reused += len(segments & before) if round_number % 2 else 0
        reduce_all(rank, link, tensors, 10 * round_number)
        settle(rank)
        before = segments
        del tensors
        rank.exchange("freed")
        pool.trim()
        if not pool.segments():
            released += 1
        elif round_number % 2 == 0:
            pool.renew()
            released += 1
    rank.facts |= {"released": released, "reused": reused}
    if not any(rank.exchange(reused)):
        raise CannotRun("no address was reused")
    rank.remark(f"{reused} addresses were reused")


# 8


def remapped_under_graph(rank: Rank) -> None:
    """Releases the free memory around live tensors, one of which a captured graph uses, and allocates again."""
    import torch

    pool, link = linked(rank)
    tensors: list[Any] = [empty(rank, pool, 12 * LARGE) for _ in range(4)]
    reduce_all(rank, link, tensors, 0)
    settle(rank)
    capture = Capture(rank, torch.cuda.Stream())
    with capture:
        link.all_reduce(tensors[3])
    rank.exchange("captured")
    released_bytes = 0
    for round_number in range(3):
        tensors[1] = tensors[2] = None
        settle(rank)
        rank.exchange("freed")
        before_bytes = pool.size_bytes()
        pool.trim()
        pool.sync()  # an allocator may release a segment when its window has been removed
        released_bytes += before_bytes - pool.size_bytes()
        rank.fill(tensors[3], 40 + round_number)
        settle(rank)
        replay(rank, capture.graph)
        rank.expect(tensors[3], 40 + round_number)
        settle(rank)
        tensors[1], tensors[2] = empty(rank, pool, 12 * LARGE), empty(rank, pool, 12 * LARGE)
        reduce_all(rank, link, tensors, 50 + 10 * round_number)
        rank.fill(tensors[3], 45 + round_number)
        settle(rank)
        replay(rank, capture.graph)
        rank.expect(tensors[3], 45 + round_number)
        settle(rank)
    rank.facts["released_bytes"] = released_bytes
    if max(rank.exchange(released_bytes)) <= 0:
        raise CannotRun("the allocator released no memory of its pool")


def sleep_and_wake(rank: Rank) -> None:
    """Releases all memory of the pool, restores it at its addresses, and replays a graph that was captured before."""
    import torch

    pool, link = linked(rank)
    tensors = [empty(rank, pool, LARGE) for _ in range(4)]
    reduce_all(rank, link, tensors, 0)
    capture = Capture(rank, torch.cuda.Stream())
    with capture:
        for tensor in tensors[:2]:
            link.all_reduce(tensor)
    rank.exchange("captured")
    for round_number in range(2):
        settle(rank)
        pool.sleep()
        # Other data occupies the memory meanwhile.
        other = torch.full((24 * LARGE,), -1.0, device="cuda")
        torch.cuda.synchronize()
        del other
        pool.wake()
        for number, tensor in enumerate(tensors):
            rank.fill(tensor, 10 * round_number + number)
        torch.cuda.synchronize()
        replay(rank, capture.graph)
        torch.cuda.synchronize()
        for tensor in tensors[2:]:
            link.all_reduce(tensor)
        for number, tensor in enumerate(tensors):
            rank.expect(tensor, 10 * round_number + number)
    settle(rank)


# 9


def out_of_memory_on_one_rank(rank: Rank) -> None:
    """Fills the memory of rank 0. Its allocation fails, and the others must not hang."""
    import torch

    pool, link = linked(rank)
    small = empty(rank, pool, LARGE)
    reduce(rank, link, small, 0)
    settle(rank)
    rank.exchange("warm")
    rank.note("fills the memory of the GPU")
    filler = Filler(512 * MIB) if rank.rank == 0 else None
    failure, large = "", None
    rank.note("allocates 2 GiB in the pool")
    try:
        with pool.scope():
            large = torch.empty(1 << 29, device="cuda")
    except RuntimeError as error:
        failure = str(error).split("\n")[0]
    rank.note("learns which ranks have failed")
    failed = [number for number, text in enumerate(rank.exchange(failure)) if text]
    if filler is not None:
        filler.free()
    if failed != [0]:
        raise CannotRun(
            f"the allocation failed on ranks {failed}, and not on rank 0 alone{': ' + failure if failure else ''}"
        )
    del large
    # All ranks have freed or never had the tensor, and continue.
    again = empty(rank, pool, LARGE)
    reduce_all(rank, link, [small, again], 10)
    settle(rank)


# 10


def aborted_and_recreated(rank: Rank) -> None:
    """Aborts a communicator, and registers the pool on a new one."""
    pool, first = linked(rank)
    second = pool.link()
    tensors = [empty(rank, pool, LARGE) for _ in range(3)]
    for number, link in enumerate((first, second)):
        reduce_all(rank, link, tensors, 10 * number)
    settle(rank)
    rank.exchange("reduced")
    second.abort()
    rank.exchange("aborted")
    reduce_all(rank, first, tensors, 20)
    third = pool.link()
    reduce_all(rank, third, tensors, 30)
    tensors.append(empty(rank, pool, 12 * LARGE))
    for number, link in enumerate((first, third)):
        reduce_all(rank, link, tensors, 40 + 10 * number)
    settle(rank)


def several_communicators(rank: Rank) -> None:
    """Registers a pool on four communicators, and grows it. All ranks use them in one order, as NCCL requires."""
    pool = rank.allocator.pool()
    links = [pool.link() for _ in range(4)]
    tensors: list[Any] = []
    for round_number in range(3):
        tensors.append(empty(rank, pool, (2 + 4 * round_number) * LARGE))
        for number in range(4):
            link = links[(round_number + number) % 4]
            reduce_all(rank, link, tensors, 40 * round_number + 10 * number)
        settle(rank)


def opposite_orders(rank: Rank) -> None:
    """Reduces on two communicators at the same time, in opposite orders on even and odd ranks.

    NCCL requires one order. If the all-reduces wait for each other, this case cannot run.
    """
    import torch

    pool, first = linked(rank)
    second = pool.link()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for round_number in range(4):
        tensors = [empty(rank, pool, (2 + 4 * round_number) * LARGE) for _ in range(2)]
        torch.cuda.synchronize()
        calls = list(zip((first, second), streams, tensors, (0, 1), strict=True))
        for link, stream, tensor, number in calls if rank.rank % 2 == 0 else calls[::-1]:
            with torch.cuda.stream(stream):
                rank.fill(tensor, 10 * round_number + number)
                link.all_reduce(tensor)
        until = time.monotonic() + OPPOSITE_SECONDS
        while not all(stream.query() for stream in streams):
            if time.monotonic() > until:
                raise CannotRun(
                    "all-reduces of two communicators in opposite orders wait for each other here: "
                    "NCCL requires one order on all ranks"
                )
            time.sleep(0.001)
        for _, _, tensor, number in calls:
            rank.expect(tensor, 10 * round_number + number)
        settle(rank)


# 11


def backward(rank: Rank) -> None:
    """Allocates in the pool inside of backward passes, which run in a thread of PyTorch."""
    import torch

    pool, link = linked(rank)
    inside: list[bool] = []

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Any, tag: int) -> Any:
            context.tag = tag
            return tensor * 1.0

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            tensor = empty(rank, pool, gradient.numel())
            inside.append(pool.place(tensor) is not None)
            reduce(rank, link, tensor, context.tag)
            return gradient + tensor.sum() * 0.0, None

    for step in range(3):
        leaf = torch.ones(LARGE, device="cuda", requires_grad=True)
        value = leaf
        for layer in range(4):
            value = Reduced.apply(value, 10 * step + layer)
        value.sum().backward()
        settle(rank)
    outside = inside.count(False)
    if outside:
        rank.remark(f"{outside} of {len(inside)} tensors were outside of the pool")


def threads(rank: Rank) -> None:
    """Allocates in two pools from two threads, each with its own stream, in orders that differ between the ranks."""
    import torch

    pools = [linked(rank) for _ in range(2)]
    device = torch.cuda.current_device()
    streams = [torch.cuda.Stream() for _ in pools]
    turns = [threading.Event() for _ in range(2)]
    tensors: list[list[Any]] = [[], []]
    failures: list[BaseException] = []
    # All ranks use the streams in one order at first, because an allocator may number streams by their first use.
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(device)
            pool, _ = pools[number]
            turns[number].wait()
            with torch.cuda.stream(streams[number]), pool.scope():
                for size in range(6):
                    private = torch.empty(SMALL, device="cuda")
                    tensors[number].append(torch.empty(SMALL * (1 + size % 3), device="cuda"))
                    del private
        except BaseException as error:
            failures.append(error)
        finally:
            turns[1 - number].set()

    for _ in range(2):
        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        # The order of the threads differs between the ranks. Windows are made below, in one order.
        turns[rank.rank % 2].set()
        rank.note("waits for two threads that allocate")
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        for pool, _ in pools:
            pool.sync()
        torch.cuda.synchronize()
        for number, (pool, link) in enumerate(pools):
            missing = sum(pool.place(tensor) is None for tensor in tensors[number])
            if missing:
                rank.remark(f"{missing} of {len(tensors[number])} tensors of a thread were outside of its pool")
            reduce_all(rank, link, tensors[number], 100 * number)
            settle(rank)
            tensors[number].clear()
        for turn in turns:
            turn.clear()


def nested(rank: Rank) -> None:
    """Nests the scopes of two pools, and checks that each tensor is in its pool."""
    import torch

    (outer, outer_link), (inner, inner_link) = linked(rank), linked(rank)
    for round_number in range(3):
        rank.note("allocates in nested scopes")
        with outer.scope():
            first = torch.empty(LARGE, device="cuda")
            with inner.scope():
                second = torch.empty(LARGE, device="cuda")
            third = torch.empty(LARGE, device="cuda")
        outer.sync()
        inner.sync()
        for pool, tensors in ((outer, (first, third)), (inner, (second,))):
            outside = sum(pool.place(tensor) is None for tensor in tensors)
            if outside:
                rank.remark(f"{outside} of {len(tensors)} tensors were outside of their pool")
        reduce_all(rank, outer_link, [first, third], 10 * round_number)
        reduce_all(rank, inner_link, [second], 10 * round_number + 5)
        settle(rank)
        del first, second, third


# 12


def churn(rank: Rank, seed: int) -> None:
    """Allocates and frees at random, with splits and merges, and reduces each tensor."""
    import torch

    pool, link = linked(rank)
    draw, mine = random.Random(seed), random.Random(1000 * seed + rank.rank)
    # PyTorch's segments for small and for larger tensors.
    holes = [Holes(8, size_bytes, ascending=rank.rank % 2 == 0) for size_bytes in (SEGMENT_BYTES, 10 * SEGMENT_BYTES)]
    segments = -1
    private: list[Any] = []
    live: list[tuple[Any, int]] = []
    count = 0
    while count < CHURN:
        if len(live) < 4 or (len(live) < 24 and draw.random() < 0.52):
            if count < 200 and segments != (segments := len(pool.segments())):
                for hole in holes:
                    hole.open()
            if mine.random() < 0.02:
                private.append(torch.empty(mine.randrange(1, 8) * SMALL, device="cuda"))
                del private[:-4]
            elements = draw.choice((SMALL, SMALL, SMALL + 128, LARGE, 3 * SMALL, 5 * SMALL, 9 * SMALL))
            with pool.scope():
                tensor = torch.empty(elements, device="cuda")
            pool.sync()
            reduce(rank, link, tensor, count % 8192)
            live.append((tensor, count % 8192))
        else:
            tensor, tag = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.25:  # nothing may have overwritten it
                rank.expect(tensor, tag)
            del tensor
        count += 1
        if count % 500 == 0:
            rank.note(f"{count:,} of {CHURN:,} operations")
            rank.settle()
    # What is left must be intact.
    for tensor, tag in live:
        rank.expect(tensor, tag)


CONTROL = Case("control", "the check itself: ranks that pass different tensors get wrong results", control)

CASES = (
    Case("1-address-order", "segments whose addresses are ordered differently on each rank", address_order),
    Case("2-event", "a block used by another stream whose event has completed on one rank only", event_on_one_rank),
    Case("3-private", "private allocations on rank 0, before and between symmetric ones", private_allocations),
    Case("4-growth-moments", "a pool that grows at different moments on the ranks", grows_at_different_moments),
    Case("4-growth-running", "a pool that grows while a collective runs", grows_during_collective),
    Case("5-capture-growth", "a window that is registered during a capture", registered_during_capture),
    Case("5-graph-reuse", "memory of a graph that is reused between replays", graph_memory_reused),
    Case("5-graph-freed", "a captured graph whose symmetric tensors were freed", graph_tensor_freed),
    Case("6-inside", "tensors in the middle of a segment", inside_segment),
    Case("6-part", "a window over a part of a segment", part_of_segment),
    Case("6-spanning", "a tensor that is larger than the pieces of a segment", spans_segments),
    Case("7-address-reused", "a released segment whose address is reused", address_reused),
    Case("8-remapped", "memory released and mapped again next to live tensors and under a graph", remapped_under_graph),
    Case("8-sleep", "memory released and mapped again under windows and a graph (sleep and wake)", sleep_and_wake),
    Case("9-out-of-memory", "one rank that is out of memory", out_of_memory_on_one_rank),
    Case("10-aborted", "a communicator that is aborted and recreated", aborted_and_recreated),
    Case("10-several", "four communicators on one pool that grows", several_communicators),
    Case("10-opposite", "two communicators on one pool, used in opposite orders on two ranks", opposite_orders),
    Case("11-backward", "a pool that is used in backward passes", backward),
    Case("11-threads", "pools that are used in two threads", threads),
    Case("11-nested", "pools whose scopes are nested", nested),
    Case("12-churn-1", "10,000 random allocations and frees, first seed", lambda rank: churn(rank, 1), seconds=40.0),
    Case("12-churn-2", "10,000 random allocations and frees, second seed", lambda rank: churn(rank, 2), seconds=40.0),
)
