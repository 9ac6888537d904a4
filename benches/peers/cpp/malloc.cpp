// The C library's malloc on the same ops: what a CPU takes for them when there is no device. It needs nothing, so it
// also shows on any machine that the driver script and the cases work. Nothing touches the memory, so no page is faulted in.
#include "cases.hpp"

namespace {

struct Malloc {
    static constexpr bool records_uses = false;
    static void streams(int) {}
    static void enter_thread() {}
    void *allocate(size_t bytes, int) {
        void *block = std::malloc(bytes);
        // Otherwise the compiler may leave out a pair.
        asm volatile("" : "+r"(block) : : "memory");
        return block;
    }
    void free(void *block, size_t, int) { std::free(block); }
    void synchronize() {}
    void report(peers::Report &, const std::string &) {}
};

} // namespace

int main(int count, char **words) {
    const auto options = peers::Options::parse(count, words);
    peers::Report report(options.peer);
    return peers::measure<Malloc>(options, report);
}
