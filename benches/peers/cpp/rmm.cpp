// RMM's resources through its C++ calls: `--resource pool`, `arena` or `async`.
//
// The pool starts with 2 MiB and grows by its own rules. The arena takes a single piece of memory at the start, large
// enough for every job. Its peak only reflects that choice, so it reports no memory.
#include "cuda.hpp"
#include <optional>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>

namespace {

constexpr size_t ALIGNMENT = 256;

/// Counts the memory that the resources take from the device.
struct Upstream {
    rmm::mr::statistics_resource_adaptor counted{rmm::mr::cuda_memory_resource{}};

    void report(peers::Report &report, const std::string &job) const {
        report.figure("reserved_peak_bytes", job, {double(counted.get_bytes_counter().peak)});
        report.figure("segments", job, {double(counted.get_allocations_counter().peak)});
    }
};

struct Pool {
    Upstream upstream;
    rmm::mr::pool_memory_resource resource{upstream.counted, size_t(2) << 20};

    void report(peers::Report &report, const std::string &job) { upstream.report(report, job); }
};

struct Arena {
    rmm::mr::arena_memory_resource resource{rmm::mr::cuda_memory_resource{}, size_t(40) << 30};

    void report(peers::Report &, const std::string &) {}
};

struct Async {
    rmm::mr::cuda_async_memory_resource resource{std::nullopt, ~size_t(0)};

    void report(peers::Report &report, const std::string &job) { peers::report_pool(report, job, resource.pool_handle()); }
};

template <class Made> struct Rmm : peers::OnCuda {
    static constexpr bool records_uses = false;
    std::optional<Made> made{std::in_place};

    ~Rmm() {
        synchronize();
        made.reset();
    }
    void *allocate(size_t bytes, int stream) {
        return made->resource.allocate(cuda::stream_ref{peers::cuda_streams()[stream]}, bytes, ALIGNMENT);
    }
    void free(void *block, size_t bytes, int stream) {
        made->resource.deallocate(cuda::stream_ref{peers::cuda_streams()[stream]}, block, bytes, ALIGNMENT);
    }
    void report(peers::Report &report, const std::string &job) { made->report(report, job); }
};

} // namespace

int main(int count, char **words) {
    if (count < 3 || words[1] != std::string("--resource")) {
        std::fprintf(stderr, "usage: rmm --resource pool|arena|async ...\n");
        return 2;
    }
    const std::string resource = words[2];
    const auto options = peers::Options::parse(count - 2, words + 2);
    peers::Report report(options.peer);
    if (resource == "pool") return peers::measure<Rmm<Pool>>(options, report);
    if (resource == "arena") return peers::measure<Rmm<Arena>>(options, report);
    return peers::measure<Rmm<Async>>(options, report);
}
