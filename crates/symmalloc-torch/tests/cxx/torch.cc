// PyTorch's uses of an allocator, without PyTorch: calls the entry points as CUDAPluggableAllocator does, with C++ types,
// and catches their exceptions. tests/cxx.rs starts it on the stub of libcuda, with the case as its argument.

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <sys/types.h>
#include <sys/wait.h>
#include <typeinfo>
#include <unistd.h>
#include <utility>

#include "c10.h"
#include "symmalloc.h"

using Stream = void *;
using MempoolId = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(Stream)>;

// PyTorch's declarations: C++ types instead of their memory layout in the header.
using Alloc = void *(ssize_t, int, Stream);
using Free = void(void *, ssize_t, int, Stream);
using Begin = void(int, MempoolId, Filter);
using OfPool = void(int, MempoolId);

template <class F> static std::function<F> entry(const char *name) {
  void *found = dlsym(RTLD_DEFAULT, name);
  if (!found) {
    std::fprintf(stderr, "%s is missing\n", name);
    std::exit(1);
  }
  return reinterpret_cast<F *>(found);
}

static std::function<Alloc> alloc = entry<Alloc>("symmalloc_torch_alloc");
static std::function<Free> free_ = entry<Free>("symmalloc_torch_free");
static std::function<Begin> begin = entry<Begin>("symmalloc_torch_begin_allocate_to_pool");
static std::function<OfPool> end = entry<OfPool>("symmalloc_torch_end_allocate_to_pool");
static std::function<OfPool> release = entry<OfPool>("symmalloc_torch_release_pool");
static std::function<void()> reset = entry<void()>("symmalloc_torch_reset");
static std::function<void(int)> init = entry<void(int)>("symmalloc_torch_init");
static std::function<void(double, int)> fraction = entry<void(double, int)>("symmalloc_torch_memory_fraction");

#define CHECK(what)                                                                                                            \
  do {                                                                                                                         \
    if (!(what)) {                                                                                                             \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                          \
      std::exit(1);                                                                                                            \
    }                                                                                                                          \
  } while (false)

static uint32_t pool_of(void *pointer) {
  symmalloc_allocator *allocator = nullptr;
  symmalloc_placement placement;
  CHECK(symmalloc_process_allocator(0, &allocator) == SYMMALLOC_OK);
  CHECK(symmalloc_placement_of(allocator, pointer, &placement) == SYMMALLOC_OK);
  return placement.pool;
}

static const ssize_t MIB = 1 << 20;

// A failed allocation throws the documented exception, and later calls work.
static void out_of_memory(const std::string &type, bool has_runtime_error) {
  void *held = alloc(8 * MIB, 0, nullptr);
  CHECK(held != nullptr);
  bool thrown = false;
  try {
    alloc(ssize_t(1) << 40, 0, nullptr);
  } catch (const std::exception &error) {
    thrown = true;
    std::printf("%s: %s\n", typeid(error).name(), error.what());
    CHECK(type == typeid(error).name());
    CHECK(std::strstr(error.what(), "out of memory: 1.00 TiB on s0 in p0"));
    CHECK(has_runtime_error == (dynamic_cast<const std::runtime_error *>(&error) != nullptr));
  }
  CHECK(thrown);
  // The exception outlives its catch block, as PyTorch keeps the exceptions of a backward thread.
  std::exception_ptr kept;
  try {
    alloc(ssize_t(1) << 40, 0, nullptr);
  } catch (...) {
    kept = std::current_exception();
  }
  CHECK(kept != nullptr);
  kept = nullptr;
  free_(held, 8 * MIB, 0, nullptr);
  void *again = alloc(8 * MIB, 0, nullptr);
  CHECK(again == held);
  free_(again, 8 * MIB, 0, nullptr);
}

// Other failures are not out-of-memory errors.
static void other_errors(const std::string &type) {
  const auto expect = [&](const std::function<void()> &act, const char *text) {
    try {
      act();
    } catch (const std::exception &error) {
      std::printf("%s: %s\n", typeid(error).name(), error.what());
      CHECK(type == typeid(error).name());
      CHECK(std::strstr(error.what(), text));
      return;
    }
    CHECK(!"no exception was thrown");
  };
  expect([] { alloc(512, 99, nullptr); }, "device 99 does not exist");
  expect([] { alloc(512, -1, nullptr); }, "`device` is -1");
  expect([] { alloc(-1, 0, nullptr); }, "-1 bytes cannot be allocated");
  expect([] { fraction(1.5, 0); }, "invalid memory fraction 1.5");
}

struct Counted {
  static int alive;
  char large[64] = {};  // too large to lie in the std::function itself
  Counted() { ++alive; }
  Counted(const Counted &) { ++alive; }
  ~Counted() { --alive; }
  bool operator()(Stream stream) const { return stream == nullptr; }
};
int Counted::alive = 0;

// A filter is a std::function by value: copied, called, destroyed.
static void scopes() {
  const MempoolId first{1, 0}, second{0, 7};
  const Stream here = reinterpret_cast<Stream>(0);
  begin(0, first, Counted{});
  CHECK(Counted::alive == 1);
  void *in_first = alloc(MIB, 0, here);
  end(0, first);
  CHECK(Counted::alive == 0);
  void *outside = alloc(MIB, 0, here);
  // A small filter that is stored in the std::function, with a value.
  bool takes = false;
  begin(0, second, [&takes](Stream) { return takes; });
  void *not_taken = alloc(MIB, 0, here);
  takes = true;
  void *in_second = alloc(MIB, 0, here);
  end(0, second);
  CHECK(pool_of(in_first) != 0 && pool_of(in_second) != 0 && pool_of(in_first) != pool_of(in_second));
  CHECK(pool_of(outside) == 0 && pool_of(not_taken) == 0);
  // The same id is the same pool.
  begin(0, first, Counted{});
  void *again = alloc(MIB, 0, here);
  end(0, first);
  CHECK(pool_of(again) == pool_of(in_first));
  for (void *pointer : {in_first, in_second, outside, not_taken, again})
    free_(pointer, MIB, 0, here);
  release(0, first);
  release(0, first);
  release(0, second);
  reset();
}

// Exceptions of a filter propagate through the library to the caller, and no lock stays held.
static void throwing_filter() {
  const MempoolId id{3, 0};
  bool throws = false;
  begin(0, id, [&throws](Stream) -> bool {
    if (throws)
      throw std::out_of_range("from the filter");
    return true;
  });
  throws = true;
  bool caught = false;
  try {
    alloc(MIB, 0, nullptr);
  } catch (const std::out_of_range &error) {
    caught = std::strcmp(error.what(), "from the filter") == 0;
  }
  CHECK(caught);
  throws = false;
  void *pointer = alloc(MIB, 0, nullptr);
  CHECK(pool_of(pointer) != 0);
  end(0, id);
  free_(pointer, MIB, 0, nullptr);
  release(0, id);
}

// symmalloc_torch_complete adds the functions that PyTorch's class does not support.
static void virtuals(const char *library) {
  using Allocator = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
  uint32_t replaced = 7;
  CHECK(symmalloc_torch_complete(&replaced) == SYMMALLOC_OK && replaced == 0);
  void *c10 = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  CHECK(c10 != nullptr);
  void *make_current = dlsym(c10, "_ZN5torch4cuda22CUDAPluggableAllocator12make_currentEv");
  CHECK(make_current != nullptr);
  Allocator *current = reinterpret_cast<Allocator *(*)()>(make_current)();
  c10::cuda::CUDACachingAllocator::CUDAAllocator *base = current;
  size_t largest = 0;
  bool refused = false;
  try {
    base->cacheInfo(0, &largest);
  } catch (const std::exception &) {
    refused = true;
  }
  CHECK(refused);
  void *held = alloc(8 * MIB, 0, nullptr);
  CHECK(symmalloc_torch_complete(&replaced) == SYMMALLOC_OK && replaced == 2);
  base->cacheInfo(0, &largest);
  CHECK(largest > 0 && largest <= (size_t(1) << 30) - size_t(8 * MIB));
  CHECK(base->name() == "pluggable");
  base->enablePeerAccess(1, 0);
  CHECK(current->peers_enabled == 1);
  bool thrown = false;
  try {
    base->enablePeerAccess(5, 0);
  } catch (const std::exception &error) {
    thrown = std::strstr(error.what(), "device 5 cannot access the memory of device 0") != nullptr;
  }
  CHECK(thrown);
  free_(held, 8 * MIB, 0, nullptr);
}

// A forked child cannot use CUDA: a free has no effect, and an allocation throws.
static void forked() {
  const MempoolId id{4, 0};
  begin(0, id, [](Stream) { return true; });
  void *pointer = alloc(MIB, 0, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    free_(pointer, MIB, 0, nullptr);
    end(0, id);
    release(0, id);
    reset();
    try {
      alloc(MIB, 0, nullptr);
    } catch (const std::exception &error) {
      std::_Exit(std::strstr(error.what(), "forked") ? 0 : 2);
    }
    std::_Exit(3);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  free_(pointer, MIB, 0, nullptr);
  end(0, id);
  release(0, id);
}

// The reader of standard error has exited. Messages of a free are lost, without further effects.
static void unread() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  std::signal(SIGPIPE, SIG_IGN);
  close(ends[0]);
  CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
  void *pointer = alloc(MIB, 0, nullptr);
  free_(pointer, MIB, 0, nullptr);
  free_(pointer, MIB, 0, nullptr);
}

// Tensors that are freed after static objects were destroyed.
static struct Late {
  void *pointer = nullptr;
  ~Late() {
    if (pointer)
      free_(pointer, MIB, 0, nullptr);
  }
} late;

int main(int argc, char **argv) {
  CHECK(argc >= 2);
  const std::string what = argv[1];
  init(1);
  if (what == "runtime_error") {
    out_of_memory("St13runtime_error", true);
    other_errors("St13runtime_error");
  } else if (what == "torch_error") {
    // Loads the libraries with local visibility, as Python does.
    for (int at = 2; at < argc; ++at)
      if (!dlopen(argv[at], RTLD_LAZY | RTLD_LOCAL)) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
      }
    out_of_memory("N3c1016OutOfMemoryErrorE", false);
    other_errors("N3c105ErrorE");
  } else if (what == "scopes") {
    scopes();
    throwing_filter();
  } else if (what == "virtuals") {
    CHECK(argc == 3);
    virtuals(argv[2]);
  } else if (what == "fork") {
    forked();
  } else if (what == "unread") {
    unread();
  } else if (what == "late") {
    late.pointer = alloc(MIB, 0, nullptr);
  } else {
    CHECK(!"a case");
  }
  std::printf("passed\n");
  return 0;
}
