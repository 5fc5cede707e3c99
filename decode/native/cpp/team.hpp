// A small team of threads that walk through the same phases together.
//
// Work is claimed in chunks from one counter and counted when done; a phase is over when its chunks are done, whoever
// did them. So nobody waits for a member that sleeps or whose core is busy with another process, unless it is in the
// middle of a chunk: the others go on without it, and when it comes back it skips what is over. In the long phases not
// even then: results are computed in private and published by whoever finishes first, so that a member who has waited
// long enough does the missing chunk again. This matters: web process, Redis and clients share the cores. Who computes
// what never decides a result.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace tf {

// How much there is to do in one job; every member walks through the same phases because it has the same counts.
struct Counts {
  int rows, tiles, last_tiles, samples, draws;
};

// The phases of a step, for the profile.
enum Phase { kEmbed, kNorm, kQkv, kAppend, kAttend, kAttnOut, kGateUp, kDown, kHead, kSample, kNumPhases };

class Team {
 public:
  using Clock = std::chrono::steady_clock;

  // Seconds that member 0 spent in each phase, working and waiting for others.
  struct Profile {
    double work[kNumPhases] = {}, wait[kNumPhases] = {};
  };

  // One member's way through one job.
  class Walk {
   public:
    Walk(Team& team, uint64_t base, Profile* profile) : team_(team), base_(base), profile_(profile) {}

    // f(i) for 0 <= i < n, each once by somebody; returns when all are done. Every member calls it alike.
    // SAFETY: outside f a member may be late, even by whole jobs: it must read nothing that a later job writes.
    template <typename F>
    void loop(Phase phase, int n, F&& f) {
      run(phase, n, n, [](int, int) {}, [&](int i, int) { f(i); }, false);
    }

    // compute(i, place) into memory of the member's own, then publish(i, place): for 0 <= i < n, the second once by
    // somebody. `most`: places that a member has, each for one item.
    // SAFETY: compute may run late, even by whole jobs, and its result is dropped then: it may read what a later job
    // writes, but no address or index may depend on that.
    template <typename Compute, typename Publish>
    void loop(Phase phase, int n, int most, Compute&& compute, Publish&& publish) {
      run(phase, n, most, compute, publish, true);
    }

   private:
    template <typename Compute, typename Publish>
    void run(Phase phase, int n, int most, Compute&& compute, Publish&& publish, bool repeatable) {
      const auto begin = Clock::now();
      const int size = std::max(1, std::min(most, n / (team_.size_ * kChunks))), chunks = (n + size - 1) / size;
      const uint64_t end = base_ + uint64_t(chunks);
      int num_own = 0;
      auto take = [&](int chunk) {
        const int first = chunk * size, last = std::min(n, first + size);
        for (int i = first; i < last; i++) compute(i, i - first);
        if (repeatable && !team_.claim(chunk, base_ + chunk)) return;
        for (int i = first; i < last; i++) publish(i, i - first);
        num_own++;
        if (team_.done_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(end)) team_.done_.notify_all();
      };
      uint64_t next = team_.next_.load(std::memory_order_acquire);
      while (next < end) {
        if (!team_.next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
        take(int(next - base_));
        next = team_.next_.load(std::memory_order_acquire);
      }
      const auto over = [end](uint32_t done) { return !before(done, uint32_t(end)); };
      auto worked = begin;
      if (profile_ || !over(team_.done_.load(std::memory_order_acquire))) worked = Clock::now();
      if (repeatable && num_own && !spin(team_.done_, over, worked + 2 * (worked - begin) / num_own))
        for (int chunk = 0; chunk < chunks && !over(team_.done_.load(std::memory_order_acquire)); chunk++)
          if (!team_.is_claimed(chunk, base_ + chunk)) take(chunk);
      wait_for(team_.done_, over);
      base_ = end;
      if (!profile_) return;
      profile_->work[phase] += std::chrono::duration<double>(worked - begin).count();
      profile_->wait[phase] += std::chrono::duration<double>(Clock::now() - worked).count();
    }

    Team& team_;
    uint64_t base_;  // chunks of all phases before this one
    Profile* profile_;
  };

  using Body = std::function<void(int member, const Counts&, Walk&)>;

  // `max_items`: the longest loop whose results are published.
  Team(int size, int max_items, Body body)
      : size_(std::max(1, size)), body_(std::move(body)), claimed_(new std::atomic<uint64_t>[max_items]()) {
    try {
      for (int id = 1; id < size_; id++) threads_.emplace_back([this, id] { serve(id); });
    } catch (...) {  // no more threads to be had: those that run are ended, or the program would be
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  Team(const Team&) = delete;

  int size() const { return size_; }

  // Walk the body with all members that come; returns when everything is done.
  void run(const Counts& counts, Profile* profile) {
    const uint64_t base = next_.load(std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_acq_rel);  // odd: being written
    std::atomic_thread_fence(std::memory_order_release);  // whoever reads a new value below sees the odd number
    base_.store(base, std::memory_order_relaxed);
    const auto values = std::bit_cast<CountArray>(counts);
    for (int i = 0; i < kNumCounts; i++) counts_[i].store(values[i], std::memory_order_relaxed);
    announce();
    Walk walk(*this, base, profile);
    body_(0, counts, walk);
  }

 private:
  static constexpr int kNumCounts = sizeof(Counts) / sizeof(int);
  using CountArray = std::array<int, kNumCounts>;
  static constexpr int kChunks = 4;  // per member and phase: fewer leave members idle at the end, more cost atomics
  static constexpr std::chrono::microseconds kPatience{50};  // about what falling asleep and waking up costs

  static bool before(uint32_t a, uint32_t b) { return int32_t(a - b) < 0; }

  // The right to publish a chunk. Numbers of chunks only rise, so a late member's claim fails.
  bool claim(int place, uint64_t number) {
    uint64_t seen = claimed_[place].load(std::memory_order_relaxed);
    return seen <= number && claimed_[place].compare_exchange_strong(seen, number + 1, std::memory_order_acq_rel);
  }
  bool is_claimed(int place, uint64_t number) const {
    return claimed_[place].load(std::memory_order_relaxed) > number;
  }

  // Whether `value` was reached by then.
  template <typename Reached>
  static bool spin(std::atomic<uint32_t>& value, Reached&& reached, Clock::time_point until) {
    for (int i = 1; !reached(value.load(std::memory_order_acquire)); i++) {
      if (i % 32 == 0 && Clock::now() > until) return false;
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
    return true;
  }

  template <typename Reached>
  static uint32_t wait_for(std::atomic<uint32_t>& value, Reached&& reached) {
    uint32_t seen = value.load(std::memory_order_acquire);
    if (!reached(seen)) spin(value, reached, Clock::now() + kPatience);
    seen = value.load(std::memory_order_acquire);
    for (; !reached(seen); seen = value.load(std::memory_order_acquire)) value.wait(seen, std::memory_order_acquire);
    return seen;
  }

  void stop() {
    stopped_.store(true, std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_acq_rel);
    announce();
    for (auto& thread : threads_) thread.join();
  }

  void announce() {
    job_.fetch_add(1, std::memory_order_acq_rel);
    job_.notify_all();
  }

  void serve(int id) {
    uint32_t last = 0;
    for (;;) {
      const uint32_t job = wait_for(job_, [&](uint32_t j) { return j != last && j % 2 == 0; });
      if (stopped_.load(std::memory_order_relaxed)) return;
      const uint64_t base = base_.load(std::memory_order_relaxed);
      CountArray values;
      for (int i = 0; i < kNumCounts; i++) values[i] = counts_[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      // A member that slept through a job may have read the base of one and counts of the next: such a mixture would
      // walk other phases than everybody else. The number of the job is the same only where nothing was written.
      if (job_.load(std::memory_order_relaxed) != job) continue;
      last = job;
      Walk walk(*this, base, nullptr);
      body_(id, std::bit_cast<Counts>(values), walk);
    }
  }

  const int size_;
  const Body body_;
  std::atomic<bool> stopped_{false};
  std::atomic<uint64_t> base_{0};
  std::atomic<int> counts_[kNumCounts] = {};
  const std::unique_ptr<std::atomic<uint64_t>[]> claimed_;  // by place of a chunk in its phase: number of the last + 1
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::vector<std::thread> threads_;
};

}  // namespace tf
