// A few threads that run one function together, meet at barriers, and sleep between calls.
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
  explicit Pool(int threads) : size_(threads < 1 ? 1 : threads), process_(getpid()) {
    for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  // Must not be called in a process that was forked from the pool's: its threads do not exist there (see `usable`).
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stop_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

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
      generation_.store(generation + 1, std::memory_order_release);
    } else {
      for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) pause(spins);
    }
  }

  // Number of the next piece of this phase that nobody has taken.
  int claim() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static void pause(int spins) {
    if (spins >= 4000) return std::this_thread::yield();  // someone else may need this core to get on
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void work(int thread) {
    for (unsigned seen = 0;;) {
      for (int spins = 0; spins < 4200 && epoch_.load(std::memory_order_acquire) == seen; ++spins) pause(spins);
      if (epoch_.load(std::memory_order_acquire) == seen) {
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
  std::mutex callers_, sleep_;
  std::condition_variable wake_;
  bool stop_ = false;  // written before epoch_ is, read after it
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace qspec
