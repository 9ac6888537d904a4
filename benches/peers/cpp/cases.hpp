// The cases that every peer runs, written once. A peer is a class that allocates and frees; each of its programs is
// a few dozen lines and hands the class to `measure`.
//
//   job files ─┐
//              ├─► cases ─► Peer ─► one JSON line per figure on stdout
//   options  ──┘
//
// What a peer gives:
//
//   static int streams(int count)                  makes that many streams; they are numbered from 0
//   static void enter_thread()                     called first in every thread that allocates
//   Peer()                                         holds no memory yet: the next pass over a job is a cold one
//   void *allocate(size_t bytes, int stream)
//   void free(void *block, size_t bytes, int stream)
//   static constexpr bool records_uses             whether `void record_use(void *block, int stream)` exists
//   void synchronize()                             waits for the device, outside of what is measured
//   void report(Report &, const std::string &job)  memory at the end of a job's passes
//   ~Peer()                                        gives all memory back
//
// The Rust program in `../src` runs the same cases with the same numbers: change both.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace peers {

/// How much is measured. The defaults are the ones of the Rust program.
struct Options {
    std::string peer;
    std::filesystem::path jobs;
    int cold = 3;
    int steady = 9;
    int repeats = 5;
    int pairs = 100'000;
    int thread_ms = 100;
    std::vector<int> threads = {1, 2, 4, 8, 16, 32};

    /// `--name value`, as the driver script writes them.
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

/// Where figures go: `{"peer": ..., "case": ..., "at": ..., "values": [...]}`, one line each.
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

/// A recorded job that leaves nothing allocated. The file has `a BYTES STREAM`, `f NUMBER` and `u NUMBER STREAM`, one a
/// line; allocations are numbered in the order in which they are made. A program keeps them in places, and uses the
/// place that was left last again.
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
    // What only some peers can do comes last.
    std::stable_partition(jobs.begin(), jobs.end(), [](const Job &job) { return !job.has_uses; });
    return jobs;
}

using Clock = std::chrono::steady_clock;

inline double nanoseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

/// Marsaglia's xorshift64, the same numbers in every program.
struct Random {
    uint64_t state = 88172645463325252ull;
    uint64_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state;
    }
    /// 512 B to 4 MiB, every power of two equally often.
    size_t bytes() { return size_t(512) << next() % 14; }
};

/// One pass over a job; nanoseconds.
template <class Peer> double pass(Peer &peer, const Job &job, std::vector<void *> &blocks) {
    const auto start = Clock::now();
    for (const Step &step : job.steps) {
        if (step.kind == 'a') {
            blocks[step.place] = peer.allocate(step.bytes, step.stream);
        } else if (step.kind == 'f') {
            peer.free(blocks[step.place], step.bytes, step.stream);
        } else if constexpr (Peer::records_uses) {
            peer.record_use(blocks[step.place], step.stream);
        }
    }
    return nanoseconds_since(start);
}

/// Passes over memory that was just obtained, and over memory that is there.
template <class Peer> void replay(const Options &options, Report &report, const Job &job) {
    std::vector<void *> blocks(job.places);
    std::vector<double> cold, steady;
    const double ops = double(job.steps.size());
    for (int repeat = 0; repeat < options.cold; repeat++) {
        Peer peer;
        cold.push_back(pass(peer, job, blocks) / ops);
        peer.synchronize();
        if (repeat + 1 < options.cold) continue;
        for (int again = 0; again < options.steady; again++) {
            steady.push_back(pass(peer, job, blocks) / ops);
            peer.synchronize();
        }
        peer.report(report, job.name);
    }
    report.figure("cold_ns_per_op", job.name, cold);
    report.figure("steady_ns_per_op", job.name, steady);
}

/// One block, again and again.
template <class Peer> void pair(const Options &options, Report &report, size_t bytes) {
    Peer peer;
    std::vector<double> values;
    for (int repeat = -1; repeat < options.repeats; repeat++) {
        const auto start = Clock::now();
        for (int at = 0; at < options.pairs; at++) peer.free(peer.allocate(bytes, 0), bytes, 0);
        if (repeat >= 0) values.push_back(nanoseconds_since(start) / options.pairs);
        peer.synchronize();
    }
    report.figure("pair_ns", std::to_string(bytes), values);
}

/// One block that is replaced by another.
struct Replacement {
    uint32_t place;
    uint64_t bytes;
};

/// Many live blocks, of which a random one at a time is replaced by one of another size. Who and by what is drawn before the
/// clock starts: what takes longest in drawing, a division, would stand in front of all that an allocator does.
template <class Peer> void replacement(const Options &options, Report &report, size_t live) {
    Peer peer;
    Random random;
    std::vector<std::pair<void *, size_t>> blocks(live);
    for (auto &[block, bytes] : blocks) {
        bytes = random.bytes();
        block = peer.allocate(bytes, 0);
    }
    std::vector<double> values;
    std::vector<Replacement> replacements(options.pairs);
    for (int repeat = -1; repeat < options.repeats; repeat++) {
        for (auto &[place, bytes] : replacements) {
            place = random.next() % live;
            bytes = random.bytes();
        }
        const auto start = Clock::now();
        for (const auto &replacement : replacements) {
            auto &[block, bytes] = blocks[replacement.place];
            peer.free(block, bytes, 0);
            bytes = replacement.bytes;
            block = peer.allocate(bytes, 0);
        }
        if (repeat >= 0) values.push_back(nanoseconds_since(start) / options.pairs);
        peer.synchronize();
    }
    for (auto &[block, bytes] : blocks) peer.free(block, bytes, 0);
    report.figure("replacement_ns", std::to_string(live), values);
}

/// Threads with a stream each that allocate and free 4 KiB for as long as they are told to.
template <class Peer> void threads(const Options &options, Report &report, int count) {
    constexpr size_t bytes = 4096;
    Peer peer;
    std::vector<double> values;
    for (int repeat = 0; repeat < options.repeats; repeat++) {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false}, stop{false};
        std::vector<uint64_t> pairs(count);
        std::vector<std::thread> running;
        for (int stream = 0; stream < count; stream++)
            running.emplace_back([&, stream] {
                Peer::enter_thread();
                for (int at = 0; at < 100; at++) peer.free(peer.allocate(bytes, stream), bytes, stream);
                ready++;
                while (!go) std::this_thread::yield();
                uint64_t done = 0;
                do {
                    for (int at = 0; at < 64; at++) peer.free(peer.allocate(bytes, stream), bytes, stream);
                    done += 64;
                } while (!stop.load(std::memory_order_relaxed));
                pairs[stream] = done;
            });
        while (ready < count) std::this_thread::yield();
        const auto start = Clock::now();
        go = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(options.thread_ms));
        stop = true;
        for (auto &thread : running) thread.join();
        const double elapsed = nanoseconds_since(start);
        uint64_t total = 0;
        for (const uint64_t done : pairs) total += done;
        values.push_back(double(total) / elapsed * 1e9);
        peer.synchronize();
    }
    report.figure("pairs_per_second", std::to_string(count), values);
}

/// All cases.
template <class Peer> int measure(const Options &options, Report &report) {
    const std::vector<Job> jobs = read_jobs(options.jobs);
    int streams = 1;
    for (const Job &job : jobs) streams = std::max(streams, job.streams);
    for (const int count : options.threads) streams = std::max(streams, count);
    Peer::streams(streams);
    Peer::enter_thread();
    for (const size_t bytes : {size_t(4096), size_t(4) << 20}) pair<Peer>(options, report, bytes);
    replacement<Peer>(options, report, 1000);
    for (const int count : options.threads) threads<Peer>(options, report, count);
    for (const Job &job : jobs)
        if (Peer::records_uses || !job.has_uses) replay<Peer>(options, report, job);
    return 0;
}

} // namespace peers
