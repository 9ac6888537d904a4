// PyTorch's uses of an allocator, without PyTorch: makes the calls of the compiled class from C++, with filters that throw.
// tests/cxx.rs starts it on the stub of libcuda, with the case as its argument.

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include "symmalloc.h"

using Stream = void *;
using MempoolId = std::pair<uint64_t, uint64_t>;
using Filter = std::function<bool(Stream)>;

#define CHECK(what)                                                                                                            \
  do {                                                                                                                         \
    if (!(what)) {                                                                                                             \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                          \
      std::exit(1);                                                                                                            \
    }                                                                                                                          \
  } while (false)

static const size_t MIB = 1 << 20;

static void *alloc(size_t bytes) {
  void *pointer = nullptr;
  CHECK(symmalloc_torch_allocate(0, nullptr, bytes, 0, nullptr, &pointer) == SYMMALLOC_OK);
  return pointer;
}

// PyTorch frees in destructors, which ignore failures.
static void free_(void *pointer) { (void)symmalloc_torch_deallocate(0, pointer, nullptr); }

// As the class does: the context is a copy of the filter, which `destroy` deletes.
static void begin(MempoolId id, Filter filter) {
  const auto accepts = [](void *context, void *stream) { return (*static_cast<Filter *>(context))(stream); };
  const auto destroy = [](void *context) { delete static_cast<Filter *>(context); };
  uint64_t number = 0;
  auto *copy = new Filter(std::move(filter));
  CHECK(symmalloc_torch_begin_scope(0, id.first, id.second, accepts, copy, destroy, &number) == SYMMALLOC_OK);
}

static void end(MempoolId id) { CHECK(symmalloc_torch_end_scope(0, id.first, id.second) == SYMMALLOC_OK); }

static void release(MempoolId id) { CHECK(symmalloc_torch_release_use(0, id.first, id.second) == SYMMALLOC_OK); }

static uint32_t pool_of(void *pointer) {
  symmalloc_allocator *allocator = nullptr;
  symmalloc_placement placement;
  CHECK(symmalloc_process_allocator(0, &allocator) == SYMMALLOC_OK);
  CHECK(symmalloc_placement_of(allocator, pointer, &placement) == SYMMALLOC_OK);
  return placement.pool;
}

struct Counted {
  static int alive;
  Counted() { ++alive; }
  Counted(const Counted &) { ++alive; }
  ~Counted() { --alive; }
  bool operator()(Stream stream) const { return stream == nullptr; }
};
int Counted::alive = 0;

// A filter decides for each allocation, and is destroyed with its scope.
static void scopes() {
  const MempoolId first{1, 0}, second{0, 7};
  begin(first, Counted{});
  CHECK(Counted::alive == 1);
  void *in_first = alloc(MIB);
  end(first);
  CHECK(Counted::alive == 0);
  void *outside = alloc(MIB);
  bool takes = false;
  begin(second, [&takes](Stream) { return takes; });
  void *not_taken = alloc(MIB);
  takes = true;
  void *in_second = alloc(MIB);
  end(second);
  CHECK(pool_of(in_first) != 0 && pool_of(in_second) != 0 && pool_of(in_first) != pool_of(in_second));
  CHECK(pool_of(outside) == 0 && pool_of(not_taken) == 0);
  for (void *pointer : {in_first, in_second, outside, not_taken})
    free_(pointer);
  release(first);
  release(second);
  CHECK(symmalloc_torch_trim(0, 0) == SYMMALLOC_OK);
}

// Exceptions of a filter propagate through the library to the caller, and no lock stays held.
static void throwing_filter() {
  const MempoolId id{3, 0};
  bool throws = false;
  begin(id, [&throws](Stream) -> bool {
    if (throws)
      throw std::out_of_range("from the filter");
    return true;
  });
  throws = true;
  bool caught = false;
  try {
    alloc(MIB);
  } catch (const std::out_of_range &error) {
    caught = std::strcmp(error.what(), "from the filter") == 0;
  }
  CHECK(caught);
  throws = false;
  void *pointer = alloc(MIB);
  CHECK(pool_of(pointer) != 0);
  end(id);
  free_(pointer);
  release(id);
}

// A forked child cannot use CUDA: a free has no effect, and an allocation fails.
static void forked() {
  const MempoolId id{4, 0};
  begin(id, [](Stream) { return true; });
  void *pointer = alloc(MIB);
  const pid_t child = fork();
  if (child == 0) {
    free_(pointer);
    end(id);
    release(id);
    CHECK(symmalloc_torch_trim(0, 0) != SYMMALLOC_INTERNAL);
    void *none = nullptr;
    CHECK(symmalloc_torch_allocate(0, nullptr, MIB, 0, nullptr, &none) == SYMMALLOC_INVALID_STATE);
    std::_Exit(std::strstr(symmalloc_error_message(), "forked") ? 0 : 2);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  free_(pointer);
  end(id);
  release(id);
}

// The reader of standard error has exited. Messages of a free are lost, without further effects.
static void unread() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  std::signal(SIGPIPE, SIG_IGN);
  close(ends[0]);
  CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
  void *pointer = alloc(MIB);
  free_(pointer);
  free_(pointer);
}

// Tensors that are freed after static objects were destroyed.
static struct Late {
  void *pointer = nullptr;
  ~Late() {
    if (pointer)
      free_(pointer);
  }
} late;

int main(int argc, char **argv) {
  CHECK(argc == 2);
  const std::string what = argv[1];
  if (what == "scopes") {
    scopes();
    throwing_filter();
  } else if (what == "fork") {
    forked();
  } else if (what == "unread") {
    unread();
  } else if (what == "late") {
    late.pointer = alloc(MIB);
  } else {
    CHECK(!"a case");
  }
  std::printf("passed\n");
  return 0;
}
