// A stopwatch for machines that other users share.
//
// A processor of a virtual machine can be half of a core whose other half belongs to another guest. Work that keeps a
// core's units busy takes up to twice as long while the neighbor is busy, and no counter reports this to the guest. The
// stopwatch therefore measures the speed of the processor with its own arithmetic, before and after the timed work.
//
// `../src/stopwatch.rs` and `../src/processor.rs` implement the same for the Rust program: change all of them together.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>
#ifdef __linux__
#include <sched.h>
#endif

namespace peers {

using Clock = std::chrono::steady_clock;

inline double nanoseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

/// Performs independent additions, rotations and similar operations, several per cycle.
[[gnu::noinline]] inline uint64_t independent(uint64_t rounds) {
    uint64_t a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
    asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    for (uint64_t round = 0; round < rounds; round++) {
        a = (a << 9 | a >> 55) ^ round;
        b = b * 5 - round;
        c = (c >> 1) + round;
        d = ~(d + round);
        e = (e << 13 | e >> 51) + round;
        f = f * 9 ^ round;
    }
    return a ^ b ^ c ^ d ^ e ^ f;
}

/// The processors that this program may run on; a single one without a number if it cannot choose.
class Processors {
public:
#ifdef __linux__
    Processors() {
        CPU_ZERO(&allowed_);
        sched_getaffinity(0, sizeof allowed_, &allowed_);
        for (int number = 0; number < CPU_SETSIZE; number++)
            if (CPU_ISSET(number, &allowed_)) numbers_.push_back(number);
    }
    void stay_on(size_t at) const {
        if (at >= numbers_.size()) return;
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(numbers_[at], &only);
        sched_setaffinity(0, sizeof only, &only);
    }
    void go_anywhere() const { sched_setaffinity(0, sizeof allowed_, &allowed_); }
#else
    void stay_on(size_t) const {}
    void go_anywhere() const {}
#endif
    size_t count() const { return std::max(numbers_.size(), size_t(1)); }

private:
    std::vector<int> numbers_;
#ifdef __linux__
    cpu_set_t allowed_;
#endif
};

/// One reading of a stopwatch.
struct Reading {
    double nanoseconds;
    /// Set if the processor was slowed before or after the work.
    bool is_disturbed;
};

/// Times work on a processor that is not slowed, if there is one and the program can choose its processor.
class Stopwatch {
public:
    /// Measures all processors that the program may run on.
    Stopwatch() {
        for (size_t at = 0; at < processors_.count(); at++) {
            processors_.stay_on(at);
            for (int again = 0; again < 3; again++) is_slowed();
        }
        processors_.go_anywhere();
    }

    /// Times the work and divides the time by `things`. The thread is pinned to one processor during the work only;
    /// other threads are not affected.
    template <class Work> Reading time(double things, Work work) {
        const bool was_slowed = !settle();
        const auto start = Clock::now();
        work();
        const double elapsed = nanoseconds_since(start);
        const bool is_disturbed = is_slowed() || was_slowed;
        processors_.go_anywhere();
        return {elapsed / things, is_disturbed};
    }

    /// Returns `count` readings in nanoseconds. Disturbed readings are repeated up to a limit, after which they are
    /// used.
    template <class Read> std::vector<double> read(int count, Read reading) {
        std::vector<double> clean, disturbed;
        while (int(clean.size()) < count && int(disturbed.size()) < PATIENCE * count) {
            const Reading one = reading();
            (one.is_disturbed ? disturbed : clean).push_back(one.nanoseconds);
        }
        readings_ += int(clean.size() + disturbed.size());
        disturbed_ += int(disturbed.size());
        for (size_t at = 0; int(clean.size()) < count; at++) clean.push_back(disturbed[at]);
        return clean;
    }

    /// Number of readings so far.
    int readings() const { return readings_; }
    /// Number of disturbed readings so far.
    int disturbed() const { return disturbed_; }

private:
    /// Rounds of arithmetic that measure the speed of a processor, in about 25 us.
    static constexpr uint64_t ROUNDS = 20'000;
    /// A processor is slowed if its arithmetic takes more than this many times the best time.
    static constexpr double SLOWED = 1.1;
    /// Maximum number of disturbed readings that are set aside, per requested reading.
    static constexpr int PATIENCE = 3;

    /// Moves to a processor that is not slowed. Returns false and uses the last processor if there is none.
    bool settle() {
        const size_t count = processors_.count();
        for (size_t step = 0; step < 2 * count; step++) {
            if (step > 0) at_ = (at_ + 1) % count;
            processors_.stay_on(at_);
            if (!is_slowed()) return true;
        }
        return false;
    }

    /// Returns true if the current processor is slowed.
    bool is_slowed() {
        const auto start = Clock::now();
        uint64_t result = independent(ROUNDS);
        asm volatile("" : : "r"(result));
        const double elapsed = nanoseconds_since(start);
        best_ = std::min(best_, elapsed);
        return elapsed > SLOWED * best_;
    }

    Processors processors_;
    /// Best time of the arithmetic, in nanoseconds.
    double best_ = std::numeric_limits<double>::max();
    /// Index of the processor on which work is timed.
    size_t at_ = 0;
    int readings_ = 0, disturbed_ = 0;
};

} // namespace peers
