/*
 * symmalloc as a C++ memory resource. It satisfies the concepts of CCCL (cuda::mr::resource and cuda::mr::synchronous_resource; before
 * CCCL 3.1 async_resource and resource), and therefore works with RMM 26 and other libraries that accept such resources. Header only; link
 * libsymmalloc.
 *
 *     symmalloc::memory_resource memory = symmalloc::memory_resource::of_device(0);
 *     void* scratch = memory.allocate(stream, 1 << 20);   // stream-ordered: no wait, and no driver call if cached
 *     memory.deallocate(stream, scratch, 1 << 20);
 *
 * Streams are cudaStream_t, cuda::stream_ref or rmm::cuda_stream_view; nullptr is the default stream. They must live as long as the
 * allocator. Memory without a stream comes from a separate pool, and its deallocation waits for the device, as cudaFree does.
 *
 * CCCL before 3.1 has memory resources only if LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE is defined. Define it before including any
 * CUDA header. Define SYMMALLOC_WITHOUT_CCCL to exclude CCCL's headers.
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
/* Before CCCL 3.1 that header is empty unless the program enables it. */
#if !defined(CCCL_VERSION) || CCCL_VERSION >= 3001000 || defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#define SYMMALLOC_HAS_CCCL 1
#endif
#endif

namespace symmalloc {

/* The limits leave no memory, or the driver failed to provide it. */
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
inline constexpr bool is_stream =
    std::is_pointer_v<Stream> || std::is_null_pointer_v<Stream> || has_get<Stream>::value || has_value<Stream>::value;

template <class Stream>
void* handle(const Stream& stream) {
    if constexpr (std::is_pointer_v<Stream> || std::is_null_pointer_v<Stream>) {
        return stream;
    } else if constexpr (has_get<Stream>::value) {
        return stream.get();
    } else {
        return stream.value();
    }
}

}  // namespace detail

/* A memory resource of one device. Copies refer to the same memory. */
class memory_resource {
public:
    /* The alignment of every allocation, in bytes. */
    static constexpr std::size_t alignment_bytes = 512;

    /* Wraps an allocator. Stream-ordered memory comes from the given pool. The allocator must outlive this object. */
    explicit memory_resource(symmalloc_allocator* allocator, std::uint32_t pool = 0) noexcept
        : allocator_(allocator), pool_(pool) {}

    /* Returns the resource of the process's allocator for a device, which PyTorch and other runtimes share. The first use creates the
    * allocator, configured by SYMMALLOC_CONF. Throws `error`. */
    static memory_resource of_device(std::int32_t device) {
        symmalloc_allocator* allocator = nullptr;
        detail::check(symmalloc_process_allocator(device, &allocator));
        return memory_resource(allocator);
    }

    symmalloc_allocator* allocator() const noexcept { return allocator_; }
    std::uint32_t pool() const noexcept { return pool_; }

    /* Allocates for work on a stream. Throws `out_of_memory` and `error`. */
    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void* allocate(Stream stream, std::size_t bytes, std::size_t alignment = alignment_bytes) {
        check_alignment(alignment);
        void* pointer = nullptr;
        detail::check(symmalloc_allocate(allocator_, pool_, detail::handle(stream), bytes, &pointer));
        return pointer;
    }

    /* Deallocates after the work submitted to the stream so far, regardless of the stream of the allocation. */
    template <class Stream, std::enable_if_t<detail::is_stream<Stream>, int> = 0>
    void deallocate(Stream stream, void* pointer, std::size_t, std::size_t = alignment_bytes) noexcept {
        report(symmalloc_free_on(allocator_, pointer, detail::handle(stream)));
    }

    /* Allocates for work on any stream. Throws `out_of_memory` and `error`. */
    void* allocate_sync(std::size_t bytes, std::size_t alignment = alignment_bytes) {
        check_alignment(alignment);
        void* pointer = nullptr;
        detail::check(symmalloc_allocate_unordered(allocator_, bytes, &pointer));
        return pointer;
    }

    /* Blocks until the device has completed all work submitted so far, and deallocates. */
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

    /* Returns true if each resource may deallocate memory of the other. */
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
            throw error(SYMMALLOC_INVALID_ARGUMENT, "unsupported alignment: use a power of two up to 512 bytes");
        }
    }

    /* Reports an error on standard error. It does not throw, because destructors deallocate. The memory stays allocated. In a forked
    * child, a deallocation has no effect and is no error. */
    static void report(symmalloc_status status) noexcept {
        if (status != SYMMALLOC_OK) std::fprintf(stderr, "symmalloc: %s\n", symmalloc_error_message());
    }

    symmalloc_allocator* allocator_;
    std::uint32_t pool_;
};

}  // namespace symmalloc

#endif
