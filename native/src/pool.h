// The threads that share every step: one pool for a whole engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace evensong {

// Memory that a thread will read soon.
struct Ahead {
  const char* data = nullptr;
  std::size_t bytes = 0;
};

// Work in phases: all units of one are done before the next begins. Which thread takes which unit is left open.
class Job {
 public:
  virtual ~Job() = default;
  // Called by one thread while no unit runs: the number of units of the next phase, or -1 when there is none.
  virtual std::int64_t next_phase() = 0;
  virtual void run_unit(std::int64_t unit, int thread) = 0;
  // Memory that a thread is likely to read first in a phase to come: fetched while it waits for the others.
  virtual Ahead ahead(int thread) const = 0;
};

// The thread that calls `run` is thread 0; the others are made here. Each gets a stretch of a phase's units, so that it
// reads memory that lies together, and takes from the stretches of others when its own is done: a thread that lost its
// processor to another process holds up one unit, not its whole share.
//
// A thread that waits spins for some microseconds, then sleeps: it must not keep a processor from whoever could use it.
class Pool {
 public:
  // `processors`: one for each thread that is made, to bind it to; or none.
  Pool(int threads, const std::vector<int>& processors);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(ranges_.size()); }
  // Raises what a unit raised first; the units and phases after it are left out.
  void run(Job& job);

 private:
  struct alignas(64) Range {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
  };

  void follow(int me);
  void take_units(int me);
  void arrive_and_wait(std::uint32_t phase, int me);
  void begin_next_phase(std::uint32_t phase);
  std::uint32_t wait_beyond(std::uint32_t phase, std::int64_t spin_ns, Ahead ahead);

  std::vector<Range> ranges_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  // Counts phases in all bits but the lowest, which says that there are units to run.
  alignas(64) std::atomic<std::uint32_t> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::mutex failure_lock_;
  std::exception_ptr failure_;
};

// Processors that the calling thread may use, in ascending order; empty where the system does not say.
std::vector<int> usable_processors();
// Binds the calling thread to one processor.
void bind_to_processor(int processor);

}  // namespace evensong
