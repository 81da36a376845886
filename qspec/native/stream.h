// Layers that are read from a file again for every pass. A thread reads ahead, around and around, into places that are
// used over and over: the disk works while layers run, and between passes.
#pragma once
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "model.h"

namespace qspec {

// One reader, and one thread at a time that takes pieces, always all of them in their order.
class Stream {
 public:
  Stream(int file, const Piece* pieces, int count)
      : file_(dup(file)), process_(getpid()), pieces_(pieces, pieces + count), gaps_(count) {
    for (int i = 0; i < count; ++i)  // pieces since the place of piece i was last in use
      while (pieces_[(i + count - ++gaps_[i]) % count].to != pieces_[i].to) {
      }
    reader_ = std::thread([this] { read_all(); });
  }

  // Must not be called in a process that was forked from the stream's: its thread does not exist there (see `usable`).
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    reader_.join();
    close(file_);
  }

  bool usable() const { return getpid() == process_; }

  // Wait for the next piece; false: it cannot be read, nor can those behind it.
  bool take() {
    const auto begin = Clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return read_ > given_back_ || failed_; });
    sums_.waited += seconds_since(begin);
    return read_ > given_back_;
  }

  // The piece that was taken is not needed any more.
  void give_back() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++given_back_;
    }
    changed_.notify_all();
  }

  Reading reading() {
    std::lock_guard<std::mutex> lock(mutex_);
    return sums_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void read_all() {
    for (int64_t n = 0; !failed_; ++n) {
      const size_t i = n % pieces_.size();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || given_back_ > n - gaps_[i]; });
        if (stop_) return;
      }
      const auto begin = Clock::now();
      const int error = read(pieces_[i]);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        sums_.seconds += seconds_since(begin);
        sums_.bytes += pieces_[i].size;
        sums_.error = error;
        failed_ = error != 0;
        read_ += !failed_;
      }
      changed_.notify_all();
    }
  }

  // 0, an error number, or -1: the file ends too early.
  int read(const Piece& piece) const {
    for (int64_t done = 0; done < piece.size;) {
      const auto count = pread(file_, static_cast<char*>(piece.to) + done, piece.size - done, piece.start + done);
      if (count == 0) return -1;
      if (count < 0 && errno != EINTR) return errno;
      done += count > 0 ? count : 0;
    }
    return 0;
  }

  const int file_;
  const pid_t process_;
  const std::vector<Piece> pieces_;
  std::vector<int64_t> gaps_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t read_ = 0, given_back_ = 0;
  bool stop_ = false, failed_ = false;
  Reading sums_{};
  std::thread reader_;
};

}  // namespace qspec
