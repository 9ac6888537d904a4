// The C library's malloc on the same ops, which shows their cost on a CPU without a device. It has no requirements, so
// it also checks the driver script and the cases on any machine. The memory is never touched, so there are no page
// faults.
#include "cases.hpp"

namespace {

struct Malloc {
    static constexpr bool records_uses = false;
    static void streams(int) {}
    static void enter_thread() {}
    void *allocate(size_t bytes, int) {
        void *block = std::malloc(bytes);
        // Prevents the compiler from removing a pair.
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
