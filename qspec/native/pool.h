// A few threads that run one function together, meet at barriers, and sleep between calls.
//
// Waiting costs least when cores are free and gives way when they are not: a thread that waits spins for some tens of
// microseconds (longer than a piece takes), then yields a few hundred times, then parks. To yield is not enough on a
// busy machine: the scheduler soon brings the waiting thread back, to use up the time that the other thread needs.
// Pieces are claimed, not dealt out, so a thread that lost its core costs the others no more than the piece it held.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace qspec {

class Pool {
 public:
  // Throws what the system says when it has no memory for another thread; those that began are ended first.
  explicit Pool(int threads) : size_(threads < 1 ? 1 : threads), process_(getpid()) {
    try {
      for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
      end();
      throw;
    }
  }

  // Must not be called in a process that was forked from the pool's: its threads do not exist there (see `usable`).
  ~Pool() { end(); }

  int size() const { return size_; }
  bool usable() const { return getpid() == process_; }

  // Run job(thread) on every thread, the caller being thread 0; one caller at a time.
  void run(const std::function<void(int)>& job) {
    std::lock_guard<std::mutex> one(callers_);
    job_ = &job;
    next_.store(0, std::memory_order_relaxed);
    if (size_ > 1) {
      {
        std::lock_guard<std::mutex> lock(sleep_);
        epoch_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
    }
    job(0);
    barrier();
  }

  // Wait for all threads of the job. Ends a phase: pieces are numbered from 0 again.
  void barrier() {
    if (size_ == 1) return next_.store(0, std::memory_order_relaxed);
    const unsigned generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1);
      if (parked_.load()) {  // who parks says so first and then looks at the generation again
        { std::lock_guard<std::mutex> lock(meet_); }
        met_.notify_all();
      }
    } else if (!seen_change(generation_, generation)) {
      std::unique_lock<std::mutex> lock(meet_);
      parked_.fetch_add(1);
      met_.wait(lock, [&] { return generation_.load() != generation; });
      parked_.fetch_sub(1);
    }
  }

  // Number of the next piece of this phase that nobody has taken.
  int claim() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void end() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stop_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  static constexpr int SPINS = 4000, YIELDS = 200;

  // Wait a while for another value than `old`; whether it came.
  static bool seen_change(const std::atomic<unsigned>& value, unsigned old) {
    for (int turn = 0; turn < SPINS + YIELDS; ++turn) {
      if (value.load(std::memory_order_acquire) != old) return true;
      if (turn >= SPINS) std::this_thread::yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
    return false;
  }

  void work(int thread) {
    for (unsigned seen = 0;;) {
      if (!seen_change(epoch_, seen)) {
        std::unique_lock<std::mutex> lock(sleep_);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_) return;
      (*job_)(thread);
      barrier();
    }
  }

  const int size_;
  const pid_t process_;
  const std::function<void(int)>* job_ = nullptr;
  std::mutex callers_, sleep_, meet_;
  std::condition_variable wake_, met_;
  bool stop_ = false;  // written before epoch_ is, read after it
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> parked_{0};
  alignas(64) std::atomic<int> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace qspec
