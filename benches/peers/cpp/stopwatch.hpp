// A stopwatch for machines that others use as well.
//
// A processor of a guest can be half of a core, and the other half another guest's. Who keeps a core's units busy then takes longer
// while the neighbour is busy too, up to twice as long, and no counter tells a guest. So it counts with arithmetic
// of its own how fast a processor is, before and after what it times.
//
// `../src/stopwatch.rs` and `../src/processor.rs` have the same for the Rust program: change all.
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

/// Independent additions, rotations and the like: several in a cycle.
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

/// The processors that this program may run on; one without a number where it cannot choose.
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

/// What a stopwatch read.
struct Reading {
    double nanoseconds;
    /// Whether the processor was slowed, before or after.
    bool is_disturbed;
};

/// Times work on a processor that nobody slows, where a program can choose its processor and there is one.
class Stopwatch {
public:
    /// Looks at all processors that the program may run on.
    Stopwatch() {
        for (size_t at = 0; at < processors_.count(); at++) {
            processors_.stay_on(at);
            for (int again = 0; again < 3; again++) is_slowed();
        }
        processors_.go_anywhere();
    }

    /// Times the work, divided by a number of things that it does. Other threads go where they like, and so does this one
    /// before and after.
    template <class Work> Reading time(double things, Work work) {
        const bool was_slowed = !settle();
        const auto start = Clock::now();
        work();
        const double elapsed = nanoseconds_since(start);
        const bool is_disturbed = is_slowed() || was_slowed;
        processors_.go_anywhere();
        return {elapsed / things, is_disturbed};
    }

    /// So many readings, in nanoseconds. Disturbed ones are put aside and taken again, up to a limit; then they count.
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
    /// How many of them were disturbed.
    int disturbed() const { return disturbed_; }

private:
    /// Rounds of arithmetic that say how fast a processor is: some 25 us.
    static constexpr uint64_t ROUNDS = 20'000;
    /// A processor is slowed if its arithmetic takes so many times what it took at best.
    static constexpr double SLOWED = 1.1;
    /// Disturbed readings that are put aside, for each one that is asked for.
    static constexpr int PATIENCE = 3;

    /// Goes to a processor that nobody slows. Whether there is one; the work is timed on the last one else.
    bool settle() {
        const size_t count = processors_.count();
        for (size_t step = 0; step < 2 * count; step++) {
            if (step > 0) at_ = (at_ + 1) % count;
            processors_.stay_on(at_);
            if (!is_slowed()) return true;
        }
        return false;
    }

    /// Whether somebody slows the processor that this runs on.
    bool is_slowed() {
        const auto start = Clock::now();
        uint64_t result = independent(ROUNDS);
        asm volatile("" : : "r"(result));
        const double elapsed = nanoseconds_since(start);
        best_ = std::min(best_, elapsed);
        return elapsed > SLOWED * best_;
    }

    Processors processors_;
    /// What arithmetic took at best, in nanoseconds.
    double best_ = std::numeric_limits<double>::max();
    /// The one that work is timed on, among the processors.
    size_t at_ = 0;
    int readings_ = 0, disturbed_ = 0;
};

} // namespace peers
