// symmalloc.hpp on the stub of libcuda: a library's uses of a memory resource.

#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE 1
#include "symmalloc.hpp"

#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>
#include <dlfcn.h>

#define CHECK(what) \
    do { \
        if (!(what)) { std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); std::exit(1); } \
    } while (0)

using symmalloc::memory_resource;

// CCCL 3.1 renamed the concepts; the stand-in has both.
#if defined(MOCK_OF_CCCL) || CCCL_VERSION >= 3001000
#define HAS_NAMES_OF_CCCL_3_1 1
#endif

#if __cplusplus >= 202002L
static_assert(cuda::has_property<memory_resource, cuda::mr::device_accessible>);
#ifdef HAS_NAMES_OF_CCCL_3_1
static_assert(cuda::mr::resource<memory_resource>);
static_assert(cuda::mr::synchronous_resource<memory_resource>);
#else
static_assert(cuda::mr::async_resource<memory_resource>);
static_assert(cuda::mr::async_resource_with<memory_resource, cuda::mr::device_accessible>);
#endif
#ifdef MOCK_OF_CCCL
static_assert(cuda::mr::async_resource_2<memory_resource>);
#endif
#endif

// The interface of rmm::cuda_stream_view.
struct StreamView {
    cudaStream_t stream;
    cudaStream_t value() const noexcept { return stream; }
};

// A vector's memory, as in libraries.
template <class Resource>
class Buffer {
public:
    Buffer(Resource memory, std::size_t bytes, cuda::stream_ref stream)
        : memory_(memory), bytes_(bytes), stream_(stream), data_(memory_.allocate(stream, bytes, 256)) {}
    ~Buffer() { memory_.deallocate(stream_, data_, bytes_, 256); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    void* data() const { return data_; }

private:
    Resource memory_;
    std::size_t bytes_;
    cuda::stream_ref stream_;
    void* data_;
};

int main() {
    void* libcuda = dlopen("libcuda.so", RTLD_NOW);
    CHECK(libcuda != nullptr);
    auto calls = reinterpret_cast<std::uint64_t (*)(const char*)>(dlsym(libcuda, "stub_calls"));
    auto retain = reinterpret_cast<int (*)(void**, int)>(dlsym(libcuda, "cuDevicePrimaryCtxRetain"));
    auto enter = reinterpret_cast<int (*)(void*)>(dlsym(libcuda, "cuCtxSetCurrent"));
    auto make = reinterpret_cast<int (*)(cudaStream_t*, unsigned)>(dlsym(libcuda, "cuStreamCreate"));
    memory_resource memory = memory_resource::of_device(0);
    void* context = nullptr;
    cudaStream_t a = nullptr, b = nullptr;
    CHECK(retain(&context, 0) == 0 && enter(context) == 0 && make(&a, 1) == 0 && make(&b, 1) == 0);

    void* first = nullptr;
    {
        Buffer<memory_resource> buffer(memory, 1 << 20, a);
        first = buffer.data();
        CHECK(first != nullptr && reinterpret_cast<std::uintptr_t>(first) % memory_resource::alignment_bytes == 0);
    }
    const std::uint64_t waits = calls("cuCtxSynchronize"), records = calls("cuEventRecord");
    CHECK(memory.allocate(a, 1 << 20) == first);
    memory.deallocate(StreamView{b}, first, 1 << 20);
    CHECK(calls("cuEventRecord") == records + 1);
    CHECK(memory.allocate_async(1 << 20, 256, cuda::stream_ref(a)) == first);
    memory.deallocate_async(first, 1 << 20, 256, cuda::stream_ref(a));
    CHECK(memory.allocate_async(1 << 20, a) == first);
    memory.deallocate_async(first, 1 << 20, a);
    CHECK(calls("cuCtxSynchronize") == waits);

#ifndef MOCK_OF_CCCL
    // The parameter type of libraries.
#ifdef HAS_NAMES_OF_CCCL_3_1
    cuda::mr::resource_ref<cuda::mr::device_accessible> reference{memory};
    CHECK(reference.allocate(cuda::stream_ref(a), 1 << 20, 256) == first);
    reference.deallocate(cuda::stream_ref(a), first, 1 << 20, 256);
#else
    cuda::mr::async_resource_ref<cuda::mr::device_accessible> reference{memory};
    CHECK(reference.allocate_async(1 << 20, 256, cuda::stream_ref(a)) == first);
    reference.deallocate_async(first, 1 << 20, 256, cuda::stream_ref(a));
#endif
#endif

    void* unordered = memory.allocate_sync(1 << 20);
    CHECK(unordered != first);
    memory.deallocate_sync(unordered, 1 << 20);
    CHECK(memory.allocate(1 << 20) == unordered);
    memory.deallocate(a, unordered, 1 << 20);
    CHECK(calls("cuCtxSynchronize") == waits + 2);
    memory.deallocate(unordered, 1 << 20);  // a double free is only reported

    // nullptr is the default stream, in every function that takes one.
    void* ordered = memory.allocate(nullptr, 1 << 20);
    memory.deallocate(nullptr, ordered, 1 << 20);
    CHECK(memory.allocate(cudaStream_t{}, 1 << 20, 256) == ordered);
    memory.deallocate(nullptr, ordered, 1 << 20, 256);
    CHECK(memory.allocate_async(1 << 20, nullptr) == ordered);
    memory.deallocate_async(ordered, 1 << 20, nullptr);
    CHECK(memory.allocate_async(1 << 20, 256, nullptr) == ordered);
    memory.deallocate_async(ordered, 1 << 20, 256, nullptr);
    CHECK(calls("cuCtxSynchronize") == waits + 2);

    symmalloc_allocator* own = nullptr;
    CHECK(symmalloc_create(0, "total_limit_mb:20", &own) == SYMMALLOC_OK);
    memory_resource small(own);
    CHECK(small != memory && small == memory_resource(own));
    try {
        small.allocate(a, 64 << 20);
        return 1;
    } catch (const std::bad_alloc& error) {
        CHECK(std::strstr(error.what(), "64.00 MiB") != nullptr);
    }
    try {
        small.allocate(a, 1, 1024);
        return 1;
    } catch (const symmalloc::error& error) {
        CHECK(error.status() == SYMMALLOC_INVALID_ARGUMENT);
    }
    CHECK(small.allocate(a, 0) == nullptr);
    small.deallocate(a, nullptr, 0);
    // In a forked child, a deallocation has no effect and prints nothing.
    void* shared = memory.allocate(a, 1 << 20);
    const pid_t child = fork();
    if (child == 0) {
        memory.deallocate(a, shared, 1 << 20);
        memory.deallocate_sync(shared, 1 << 20);
        _exit(symmalloc_destroy(own) == SYMMALLOC_OK ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    memory.deallocate(a, shared, 1 << 20);
    CHECK(symmalloc_destroy(own) == SYMMALLOC_OK);
    std::puts("a memory resource");
    return 0;
}
