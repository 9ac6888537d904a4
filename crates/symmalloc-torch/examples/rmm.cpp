// RMM's containers on symmalloc.hpp: a vector is filled on one stream, copied on another stream, and freed while the copy is read.
// It has no kernel, so a C++ compiler suffices. The wheels librmm-cu13 and rapids-logger contain RMM 26; any toolkit has CUDA's headers.
//
//     c++ -std=c++20 -O2 examples/rmm.cpp -I $RMM/include -I $RMM/include/rapids -I $LOGGER/include -I $CUDA/include
//         $(pkg-config --cflags --libs symmalloc) -L $RMM/lib64 -L $LOGGER/lib64 -L $CUDA/lib64
//         -lrmm -lrapids_logger -lcudart -o rmm && ./rmm

#include <rmm/cuda_stream.hpp>
#include <rmm/device_uvector.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/per_device_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>

#include "symmalloc.hpp"

#include <chrono>
#include <cstdio>
#include <vector>

static_assert(cuda::mr::resource_with<symmalloc::memory_resource, cuda::mr::device_accessible>);

// Returns the number of wrong words.
static long wrong_words(rmm::device_uvector<unsigned> const& vector, unsigned byte, cuda::stream_ref stream) {
    std::vector<unsigned> host(vector.size());
    RMM_CUDA_TRY(cudaMemcpyAsync(host.data(), vector.data(), vector.size() * 4, cudaMemcpyDeviceToHost, stream.get()));
    stream.sync();
    long wrong = 0;
    for (unsigned word : host) wrong += word != byte * 0x01010101u;
    return wrong;
}

// Returns the nanoseconds for the creation and destruction of a vector.
template <class Resource>
static double pair_of(Resource memory, std::size_t words, cuda::stream_ref stream) {
    constexpr int rounds = 100000;
    cuda::mr::any_resource<cuda::mr::device_accessible> any{memory};
    rmm::device_uvector<unsigned>(words, stream, any);
    auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; round++) rmm::device_uvector<unsigned>(words, stream, any);
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / rounds;
}

int main() {
    auto memory = symmalloc::memory_resource::of_device(0);
    rmm::cuda_stream first, second;
    cuda::stream_ref first_ref{first}, second_ref{second};
    rmm::mr::set_current_device_resource(cuda::mr::any_resource<cuda::mr::device_accessible>{memory});

    long wrong = 0, words = 0;
    const void* place = nullptr;
    for (unsigned round = 0; round < 200; round++) {
        const std::size_t size = (1 << 18) + (round % 7) * 5000;
        rmm::device_uvector<unsigned> filled(size, first_ref);        // from the current resource: ours
        RMM_CUDA_TRY(cudaMemsetAsync(filled.data(), int(round & 0x7f), size * 4, first_ref.get()));
        first.synchronize();
        rmm::device_uvector<unsigned> copied(filled, second_ref);
        if (round % 7 == 0) {
            if (place != nullptr && place != filled.data()) wrong++;     // equal programs have equal placements
            place = filled.data();
        }
        filled.set_stream(second_ref);                                // freed after the copy
        { rmm::device_buffer given_back = filled.release(); }
        wrong += wrong_words(copied, round & 0x7f, second_ref);
        words += long(size);
    }
    std::printf("%ld words, %ld wrong\n", words, wrong);

    rmm::mr::statistics_resource_adaptor counted{cuda::mr::any_resource<cuda::mr::device_accessible>{memory}};
    { rmm::device_uvector<unsigned> vector(1 << 20, first_ref, counted); }
    std::printf("an adaptor of RMM around it: peak %lld bytes, %lld allocation\n",
                static_cast<long long>(counted.get_bytes_counter().peak),
                static_cast<long long>(counted.get_allocations_counter().total));

    try {
        rmm::device_uvector<unsigned> vector(std::size_t(1) << 44, first_ref);
        std::printf("an allocation of 64 TiB succeeded\n");
        return 1;
    } catch (std::bad_alloc const& error) {
        std::printf("64 TiB: %s\n", error.what());
    }
    rmm::mr::cuda_async_memory_resource driver{};
    for (std::size_t size : {std::size_t(1) << 10, std::size_t(1) << 20}) {
        std::printf("vector of %zu KiB, created and destroyed: symmalloc %.0f ns, cuda_async_memory_resource %.0f ns\n", size * 4 >> 10,
                    pair_of(memory, size, first_ref), pair_of(driver, size, first_ref));
    }
    return wrong != 0;
}
