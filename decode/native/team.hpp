// A small team of threads that walk through the same phases together.
//
// Work is claimed in chunks from one counter and counted when done; a phase is over when its chunks are done, whoever
// did them. So nobody waits for a member that sleeps or whose core is busy with another process, unless it is in the
// middle of a chunk: the others go on without it, and when it comes back it skips what is over. This matters: web
// process, Redis and clients share the cores. Who computes what never decides a result.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace tf {

// How much there is to do in one job; every member walks through the same phases because it has the same counts.
struct Counts {
  int rows, tiles, samples, draws;
};

class Team {
 public:
  // One member's way through one job.
  class Walk {
   public:
    Walk(Team& team, uint32_t base) : team_(team), base_(base) {}

    // f(i) for 0 <= i < n, each once by somebody; returns when all are done. Every member calls it alike.
    // SAFETY: outside f a member may be late, even by whole jobs: it must read nothing that a later job writes.
    template <typename F>
    void loop(int n, F&& f) {
      const int chunk = std::max(1, n / (team_.size_ * kChunks));
      const uint32_t end = base_ + uint32_t((n + chunk - 1) / chunk);
      uint32_t next = team_.next_.load(std::memory_order_acquire);
      while (before(next, end)) {
        if (!team_.next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
        const int first = int(next - base_) * chunk;
        for (int i = first; i < std::min(n, first + chunk); i++) f(i);
        if (team_.done_.fetch_add(1, std::memory_order_acq_rel) + 1 == end) team_.done_.notify_all();
        next = team_.next_.load(std::memory_order_acquire);
      }
      wait_for(team_.done_, [end](uint32_t done) { return !before(done, end); });
      base_ = end;
    }

   private:
    Team& team_;
    uint32_t base_;  // chunks of all phases before this one
  };

  using Body = std::function<void(int member, const Counts&, Walk&)>;

  Team(int size, Body body) : size_(std::max(1, size)), body_(std::move(body)) {
    for (int id = 1; id < size_; id++) threads_.emplace_back([this, id] { serve(id); });
  }
  ~Team() {
    stopped_.store(true, std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_acq_rel);
    publish();
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;

  int size() const { return size_; }

  // Walk the body with all members that come; returns when everything is done.
  void run(const Counts& counts) {
    const uint32_t base = next_.load(std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_acq_rel);  // odd: being written
    const int values[] = {int(base), counts.rows, counts.tiles, counts.samples, counts.draws};
    for (int i = 0; i < 5; i++) slot_[i].store(values[i], std::memory_order_relaxed);
    publish();
    Walk walk(*this, base);
    body_(0, counts, walk);
  }

 private:
  static constexpr int kChunks = 4;    // per member and phase: fewer leave members idle at the end, more cost atomics
  static constexpr int kSpins = 2000;  // some tens of microseconds, about what falling asleep and waking up costs

  static bool before(uint32_t a, uint32_t b) { return int32_t(a - b) < 0; }

  template <typename Reached>
  static uint32_t wait_for(std::atomic<uint32_t>& value, Reached&& reached) {
    uint32_t seen = value.load(std::memory_order_acquire);
    for (int i = 0; i < kSpins && !reached(seen); i++) {
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
      seen = value.load(std::memory_order_acquire);
    }
    for (; !reached(seen); seen = value.load(std::memory_order_acquire)) value.wait(seen, std::memory_order_acquire);
    return seen;
  }

  void publish() {
    job_.fetch_add(1, std::memory_order_acq_rel);
    job_.notify_all();
  }

  void serve(int id) {
    uint32_t last = 0;
    for (;;) {
      const uint32_t job = wait_for(job_, [&](uint32_t j) { return j != last && j % 2 == 0; });
      if (stopped_.load(std::memory_order_relaxed)) return;
      int values[5];
      for (int i = 0; i < 5; i++) values[i] = slot_[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (job_.load(std::memory_order_relaxed) != job) continue;  // a later job was written meanwhile
      last = job;
      Walk walk(*this, uint32_t(values[0]));
      body_(id, Counts{values[1], values[2], values[3], values[4]}, walk);
    }
  }

  const int size_;
  const Body body_;
  std::atomic<bool> stopped_{false};
  std::atomic<int> slot_[5] = {};
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint32_t> next_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::vector<std::thread> threads_;
};

}  // namespace tf
