// A small team of threads that execute one function together, in step.
//
// Work is taken in chunks from a shared counter, so that a thread whose core is busy with another process does less.
// Who computes what never decides a result. Waiting spins for some microseconds, then sleeps: the machine also runs the
// web process, Redis and its clients.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace tf {

class Team {
 public:
  explicit Team(int size) : size_(std::max(1, size)) {
    for (int id = 1; id < size_; id++) threads_.emplace_back([this, id] { serve(id); });
  }
  ~Team() {
    job_ = nullptr;
    start_.fetch_add(1);
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;

  int size() const { return size_; }

  // Every member calls f(id); returns when all have.
  void run(const std::function<void(int)>& f) {
    job_ = &f;
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    f(0);
    barrier();
  }

  // Within run, called by every member alike: f(i) for 0 <= i < n, each once, then everybody waits for the others.
  template <typename F>
  void loop(int n, F&& f) {
    if (size_ == 1) {
      for (int i = 0; i < n; i++) f(i);
      return;
    }
    const int chunk = std::max(1, n / (size_ * kChunks));
    for (int first; (first = next_.fetch_add(chunk, std::memory_order_relaxed)) < n;)
      for (int i = first; i < std::min(n, first + chunk); i++) f(i);
    barrier();
  }

 private:
  static constexpr int kChunks = 4;   // per member: fewer leave members idle at the end, more cost atomics
  static constexpr int kSpins = 3000;  // about 50 microseconds

  static void wait_change(std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < kSpins; i++) {
      if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
  }

  void barrier() {
    uint32_t turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      turn_.notify_all();
    } else {
      wait_change(turn_, turn);
    }
  }

  void serve(int id) {
    for (uint32_t seen = 0;; seen++) {
      wait_change(start_, seen);
      if (!job_) return;
      (*job_)(id);
      barrier();
    }
  }

  const int size_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
  std::vector<std::thread> threads_;
};

}  // namespace tf
