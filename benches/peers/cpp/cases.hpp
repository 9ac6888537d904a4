// The cases that every peer runs, written once. A peer is a class that allocates and frees. The program of each peer
// has a few dozen lines and passes the class to `measure`.
//
//   job files ─┐
//              ├─► cases ─► Peer ─► one JSON line per figure on stdout
//   options  ──┘
//
// The interface of a peer:
//
//   static int streams(int count)                  creates that many streams, numbered from 0
//   static void enter_thread()                     called first in every thread that allocates
//   Peer()                                         holds no memory yet: the next pass over a job is a cold one
//   void *allocate(size_t bytes, int stream)
//   void free(void *block, size_t bytes, int stream)
//   static constexpr bool records_uses             true if `void record_use(void *block, int stream)` exists
//   void synchronize()                             waits for the device, outside of the measurement
//   void report(Report &, const std::string &job)  reports the memory at the end of a job's passes
//   ~Peer()                                        releases all memory
//
// The Rust program in `../src` runs the same cases with the same numbers: change both together.
#pragma once

#include "stopwatch.hpp"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace peers {

/// The amount of measurement. The defaults are those of the Rust program.
struct Options {
    std::string peer;
    std::filesystem::path jobs;
    int cold = 3;
    int steady = 9;
    int repeats = 5;
    int pairs = 100'000;
    int thread_ms = 100;
    std::vector<int> threads = {1, 2, 4, 8, 16, 32};

    /// Parses `--name value` options, as the driver script passes them.
    static Options parse(int count, char **words) {
        Options options;
        for (int at = 1; at + 1 < count; at += 2) {
            const std::string name = words[at], value = words[at + 1];
            if (name == "--peer") options.peer = value;
            else if (name == "--jobs") options.jobs = value;
            else if (name == "--cold") options.cold = std::stoi(value);
            else if (name == "--steady") options.steady = std::stoi(value);
            else if (name == "--repeats") options.repeats = std::stoi(value);
            else if (name == "--pairs") options.pairs = std::stoi(value);
            else if (name == "--thread-ms") options.thread_ms = std::stoi(value);
            else if (name == "--threads") options.threads = numbers(value);
            else { std::fprintf(stderr, "unknown option %s\n", name.c_str()); std::exit(2); }
        }
        return options;
    }

    static std::vector<int> numbers(const std::string &list) {
        std::vector<int> found;
        for (size_t at = 0; at < list.size(); at = std::min(list.find(',', at), list.size() - 1) + 1)
            found.push_back(std::stoi(list.substr(at)));
        return found;
    }
};

/// The output of figures: `{"peer": ..., "case": ..., "at": ..., "values": [...]}`, one line each.
class Report {
public:
    explicit Report(std::string peer) : peer_(std::move(peer)) {}

    void figure(const char *name, const std::string &at, const std::vector<double> &values) {
        std::printf("{\"peer\":\"%s\",\"case\":\"%s\",\"at\":\"%s\",\"values\":[", peer_.c_str(), name, at.c_str());
        for (size_t index = 0; index < values.size(); index++)
            std::printf(index ? ",%.10g" : "%.10g", values[index]);
        std::printf("]}\n");
        std::fflush(stdout);
    }

private:
    std::string peer_;
};

struct Step {
    char kind; // 'a'llocate, 'f'ree, 'u'se on another stream
    uint32_t place;
    int stream;
    size_t bytes;
};

/// A recorded job that leaves nothing allocated. Each line of its file is `a BYTES STREAM`, `f NUMBER` or `u NUMBER
/// STREAM`. Allocations are numbered in order. A program keeps them in places, and reuses the most recently vacated
/// place.
struct Job {
    std::string name;
    std::vector<Step> steps;
    uint32_t places = 0;
    int streams = 1;
    bool has_uses = false;

    static Job read(const std::filesystem::path &path) {
        Job job;
        job.name = path.stem().string();
        std::vector<Step> owners;
        std::vector<uint32_t> left;
        std::ifstream lines(path);
        char kind;
        while (lines >> kind) {
            Step step{kind, 0, 0, 0};
            if (kind == 'a') {
                lines >> step.bytes >> step.stream;
                if (left.empty()) left.push_back(job.places++);
                step.place = left.back();
                left.pop_back();
                owners.push_back(step);
            } else {
                uint32_t number;
                lines >> number;
                step = owners[number];
                step.kind = kind;
                if (kind == 'f') left.push_back(step.place);
                if (kind == 'u') lines >> step.stream;
                job.has_uses |= kind == 'u';
            }
            job.streams = std::max(job.streams, step.stream + 1);
            job.steps.push_back(step);
        }
        return job;
    }
};

inline std::vector<Job> read_jobs(const std::filesystem::path &folder) {
    std::vector<std::filesystem::path> paths;
    for (const auto &entry : std::filesystem::directory_iterator(folder))
        if (entry.path().extension() == ".job") paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<Job> jobs;
    for (const auto &path : paths) jobs.push_back(Job::read(path));
    // Jobs with uses, which only some peers support, come last.
    std::stable_partition(jobs.begin(), jobs.end(), [](const Job &job) { return !job.has_uses; });
    return jobs;
}

/// Marsaglia's xorshift64, which produces the same numbers in every program.
struct Random {
    uint64_t state = 88172645463325252ull;
    uint64_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state;
    }
    /// Draws a size from 512 B to 4 MiB, with every power of two equally likely.
    size_t bytes() { return size_t(512) << next() % 14; }
};

/// Runs one pass over a job.
template <class Peer>
Reading pass(Peer &peer, const Job &job, std::vector<void *> &blocks, Stopwatch &stopwatch) {
    const Reading reading = stopwatch.time(double(job.steps.size()), [&] {
        for (const Step &step : job.steps) {
            if (step.kind == 'a') {
                blocks[step.place] = peer.allocate(step.bytes, step.stream);
            } else if (step.kind == 'f') {
                peer.free(blocks[step.place], step.bytes, step.stream);
            } else if constexpr (Peer::records_uses) {
                peer.record_use(blocks[step.place], step.stream);
            }
        }
    });
    peer.synchronize();
    return reading;
}

/// Measures passes over newly obtained memory, and passes over memory that is already there.
template <class Peer> void replay(const Options &options, Stopwatch &stopwatch, Report &report, const Job &job) {
    std::vector<void *> blocks(job.places);
    const auto cold = stopwatch.read(options.cold, [&] {
        Peer peer;
        return pass(peer, job, blocks, stopwatch);
    });
    report.figure("cold_ns_per_op", job.name, cold);

    Peer peer;
    pass(peer, job, blocks, stopwatch);
    const auto steady = stopwatch.read(options.steady, [&] { return pass(peer, job, blocks, stopwatch); });
    report.figure("steady_ns_per_op", job.name, steady);
    peer.report(report, job.name);
}

/// Measures repeated allocation and free of one block.
template <class Peer> void pair(const Options &options, Stopwatch &stopwatch, Report &report, size_t bytes) {
    Peer peer;
    const auto repeat = [&] {
        const Reading reading = stopwatch.time(options.pairs, [&] {
            for (int at = 0; at < options.pairs; at++) peer.free(peer.allocate(bytes, 0), bytes, 0);
        });
        peer.synchronize();
        return reading;
    };
    repeat();
    report.figure("pair_ns", std::to_string(bytes), stopwatch.read(options.repeats, repeat));
}

/// Measures the replacement of random blocks among many live ones by blocks of different sizes.
template <class Peer> void replacement(const Options &options, Stopwatch &stopwatch, Report &report) {
    // A compile-time constant, so that the division is not part of the measurement.
    constexpr size_t LIVE = 1000;
    Peer peer;
    Random random;
    std::vector<std::pair<void *, size_t>> blocks(LIVE);
    for (auto &[block, bytes] : blocks) {
        bytes = random.bytes();
        block = peer.allocate(bytes, 0);
    }
    const auto repeat = [&] {
        const Reading reading = stopwatch.time(options.pairs, [&] {
            for (int at = 0; at < options.pairs; at++) {
                auto &[block, bytes] = blocks[random.next() % LIVE];
                peer.free(block, bytes, 0);
                bytes = random.bytes();
                block = peer.allocate(bytes, 0);
            }
        });
        peer.synchronize();
        return reading;
    };
    repeat();
    const auto values = stopwatch.read(options.repeats, repeat);
    for (auto &[block, bytes] : blocks) peer.free(block, bytes, 0);
    report.figure("replacement_ns", std::to_string(LIVE), values);
}

/// Measures threads with separate streams that allocate and free 4 KiB until they are stopped.
template <class Peer> void threads(const Options &options, Report &report, int count) {
    constexpr size_t bytes = 4096;
    Peer peer;
    std::vector<double> values;
    for (int repeat = 0; repeat < options.repeats; repeat++) {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false}, stop{false};
        std::vector<double> rates(count);
        std::vector<std::thread> running;
        for (int stream = 0; stream < count; stream++)
            running.emplace_back([&, stream] {
                Peer::enter_thread();
                for (int at = 0; at < 100; at++) peer.free(peer.allocate(bytes, stream), bytes, stream);
                ready++;
                while (!go) std::this_thread::yield();
                // Each thread uses its own clock, because they start at different times.
                const auto start = Clock::now();
                uint64_t done = 0;
                // Runs the work at least once, so that a thread that gets no processor before the stop also has a rate.
                do {
                    for (int at = 0; at < 64; at++) peer.free(peer.allocate(bytes, stream), bytes, stream);
                    done += 64;
                } while (!stop.load(std::memory_order_relaxed));
                rates[stream] = double(done) * 1e9 / nanoseconds_since(start);
            });
        while (ready < count) std::this_thread::yield();
        go = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(options.thread_ms));
        stop = true;
        for (auto &thread : running) thread.join();
        values.push_back(std::accumulate(rates.begin(), rates.end(), 0.0));
        peer.synchronize();
    }
    report.figure("pairs_per_second", std::to_string(count), values);
}

/// Runs all cases.
template <class Peer> int measure(const Options &options, Report &report) {
    const std::vector<Job> jobs = read_jobs(options.jobs);
    int streams = 1;
    for (const Job &job : jobs) streams = std::max(streams, job.streams);
    for (const int count : options.threads) streams = std::max(streams, count);
    Peer::streams(streams);
    Peer::enter_thread();
    Stopwatch stopwatch;
    for (const size_t bytes : {size_t(4096), size_t(4) << 20}) pair<Peer>(options, stopwatch, report, bytes);
    replacement<Peer>(options, stopwatch, report);
    for (const int count : options.threads) threads<Peer>(options, report, count);
    for (const Job &job : jobs)
        if (Peer::records_uses || !job.has_uses) replay<Peer>(options, stopwatch, report, job);
    report.figure("readings", "all", {double(stopwatch.readings())});
    report.figure("readings", "disturbed", {double(stopwatch.disturbed())});
    return 0;
}

} // namespace peers
