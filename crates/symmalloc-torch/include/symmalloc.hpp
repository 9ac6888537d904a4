/*
 * symmalloc as a memory resource for C++: of CCCL (cuda::mr::resource, cuda::mr::synchronous_resource, and their names before CCCL 3.1,
 * async_resource and resource), and so of RMM 26 and of libraries that take any of these. Header only; link libsymmalloc_torch.
 *
 *     symmalloc::memory_resource memory = symmalloc::memory_resource::of_device(0);
 *     void* scratch = memory.allocate(stream, 1 << 20);   // ordered by the stream: no wait, no driver call from the cache
 *     memory.deallocate(stream, scratch, 1 << 20);
 *
 * Streams are cudaStream_t, cuda::stream_ref or rmm::cuda_stream_view. They live as long as the allocator. What is allocated without a
 * stream comes from a pool of its own, and its deallocation waits for the device, as cudaFree does.
 *
 * CCCL before 3.1 has memory resources only where LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE is defined: define it before anything of
 * CUDA is included. SYMMALLOC_WITHOUT_CCCL keeps CCCL's headers out.
 */

#ifndef SYMMALLOC_HPP
#define SYMMALLOC_HPP

#include "symmalloc.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#if __has_include(<cuda/memory_resource>) && !defined(SYMMALLOC_WITHOUT_CCCL)
#include <cuda/memory_resource>
/* Before CCCL 3.1 that header is empty unless the program asks for it. */
#if !defined(CCCL_VERSION) || CCCL_VERSION >= 3001000 || defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#define SYMMALLOC_HAS_CCCL 1
#endif
#endif

namespace symmalloc {

/* There is no memory within the limits, or the driver refused it. */
class out_of_memory : public std::bad_alloc {
public:
    explicit out_of_memory(std::string message) : message_(std::move(message)) {}
    const char* what() const noexcept override { return message_.c_str(); }

private:
    std::string message_;
};

/* Any other failure. */
class error : public std::runtime_error {
public:
    error(symmalloc_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
    symmalloc_status status() const noexcept { return status_; }

private:
    symmalloc_status status_;
};

namespace detail {

inline void check(symmalloc_status status) {
    if (status == SYMMALLOC_OK) return;
    const std::string message = symmalloc_error_message();
    if (status == SYMMALLOC_OUT_OF_MEMORY) throw out_of_memory(message);
    throw error(status, message);
}

template <class Stream, class = void>
struct has_get : std::false_type {};
template <class Stream>
struct has_get<Stream, std::void_t<decltype(std::declval<const Stream&>().get())>> : std::true_type {};

template <class Stream, class = void>
struct has_value : std::false_type {};
template <class Stream>
struct has_value<Stream, std::void_t<decltype(std::declval<const Stream&>().value())>> : std::true_type {};

template <class Stream>
inline constexpr bool is_stream = std::is_pointer_v<Stream> || has_get<Stream>::value || has_value<Stream>::value;

template <class Stream>
void* handle(const Stream& stream) {
    if constexpr (std::is_pointer_v<Stream>) {
        return stream;
    } else if constexpr (has_get<Stream>::value) {
        return stream.get();
    } else {
        return stream.value();
    }
}

}  // namespace detail

/* Memory of one device. Copies are other names of the same memory. */
class memory_resource {
public:
    /* What every allocation is aligned to. */
    static constexpr std::size_t alignment_bytes = 512;

    /* Memory of an allocator, and for streams of one of its pools. The allocator outlives this. */
    explicit memory_resource(symmalloc_allocator* allocator, std::uint32_t pool = 0) noexcept
        : allocator_(allocator), pool_(pool) {}

    /* Memory of the process's allocator of a device, which PyTorch and other runtimes share. It is made at its first use, with
     * SYMMALLOC_CONF. Throws `error`. */
    static memory_resource of_device(std::int32_t device) {
        symmalloc_allocator* allocator = nullptr;
        detail::check(symmalloc_torch_allocator(device, &allocator));
        return memory_resource(allocator);
    }

    symmalloc_allocator* allocator() const noexcept { return allocator_; }
    std::uint32_t pool() const noexcept { return pool_; }

    /* For work on a stream. Throws `out_of_memory` and `error`. */
    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void* allocate(Stream stream, std::size_t bytes, std::size_t alignment = alignment_bytes) {
        check_alignment(alignment);
        void* pointer = nullptr;
        detail::check(symmalloc_allocate(allocator_, pool_, bytes, detail::handle(stream), &pointer));
        return pointer;
    }

    /* Behind the work that the stream has so far, whatever stream it was allocated for. */
    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void deallocate(Stream stream, void* pointer, std::size_t, std::size_t = alignment_bytes) noexcept {
        report(symmalloc_free_on(allocator_, pointer, detail::handle(stream)));
    }

    /* For work on any stream. Throws as above. */
    void* allocate_sync(std::size_t bytes, std::size_t alignment = alignment_bytes) {
        check_alignment(alignment);
        void* pointer = nullptr;
        detail::check(symmalloc_allocate_unordered(allocator_, bytes, &pointer));
        return pointer;
    }

    /* When the device has done all its work so far. Blocks until then. */
    void deallocate_sync(void* pointer, std::size_t, std::size_t = alignment_bytes) noexcept {
        report(symmalloc_free_unordered(allocator_, pointer));
    }

    /* The names before CCCL 3.1. */
    void* allocate(std::size_t bytes, std::size_t alignment = alignment_bytes) { return allocate_sync(bytes, alignment); }

    void deallocate(void* pointer, std::size_t bytes, std::size_t alignment = alignment_bytes) noexcept {
        deallocate_sync(pointer, bytes, alignment);
    }

    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void* allocate_async(std::size_t bytes, std::size_t alignment, Stream stream) {
        return allocate(stream, bytes, alignment);
    }

    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void* allocate_async(std::size_t bytes, Stream stream) {
        return allocate(stream, bytes);
    }

    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void deallocate_async(void* pointer, std::size_t bytes, std::size_t alignment, Stream stream) noexcept {
        deallocate(stream, pointer, bytes, alignment);
    }

    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void deallocate_async(void* pointer, std::size_t bytes, Stream stream) noexcept {
        deallocate(stream, pointer, bytes);
    }

    /* Whether what one allocates the other may deallocate. */
    friend bool operator==(const memory_resource& a, const memory_resource& b) noexcept {
        return a.allocator_ == b.allocator_;
    }
    friend bool operator!=(const memory_resource& a, const memory_resource& b) noexcept { return !(a == b); }

#ifdef SYMMALLOC_HAS_CCCL
    friend constexpr void get_property(const memory_resource&, ::cuda::mr::device_accessible) noexcept {}
#endif

private:
    static void check_alignment(std::size_t alignment) {
        const bool is_power = alignment != 0 && (alignment & (alignment - 1)) == 0;
        if (!is_power || alignment > alignment_bytes) {
            throw error(SYMMALLOC_INVALID_ARGUMENT, "memory is aligned to 512 bytes: ask for a power of two up to that");
        }
    }

    /* Destructors deallocate, so nothing is thrown: what could not be freed stays allocated, and the error output says why. */
    static void report(symmalloc_status status) noexcept {
        if (status != SYMMALLOC_OK) std::fprintf(stderr, "symmalloc: %s\n", symmalloc_error_message());
    }

    symmalloc_allocator* allocator_;
    std::uint32_t pool_;
};

}  // namespace symmalloc

#endif
