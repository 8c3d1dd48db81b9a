// The engine: a queue of steps, one thread that runs them in order, and its pool.
//
// Steps are handed in and waited for by ticket, so that a later step can be in the queue while one runs: it starts
// without Python, and may name tokens that the one before it samples (Step::token_ids).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pool.h"
#include "program.h"
#include "step.h"

namespace evensong {

// When one thread worked in one segment; nanoseconds of the monotonic clock.
struct Span {
  std::int32_t segment;  // -1: block copies
  std::int32_t thread;
  std::int64_t begin;
  std::int64_t end;
};

// When a step, or a part of it, ran, its waits included.
struct StepSpan {
  std::int64_t step_id;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t rows;
};

// Words that a watcher in another process reads: how often the engine came forward, and when last.
struct Progress {
  std::uint64_t* ticks = nullptr;
  std::uint64_t* last = nullptr;
};

class Engine {
 public:
  // `processors`: those to bind threads to, in turn; none: as Engine::processors_ says.
  explicit Engine(int threads, std::vector<int> processors = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Ends its threads after the steps that are queued; the destructor does it otherwise.
  void stop();
  int threads() const { return pool_threads_; }
  // Segments first..last of `program` for `step`; a ticket. Raises std::invalid_argument for a step that does not fit.
  std::int64_t submit(std::shared_ptr<Program> program, std::shared_ptr<Step> step, std::size_t first,
                      std::size_t last);
  // Until the step of `ticket` has ended; raises what it raised. Each ticket is waited for once.
  std::shared_ptr<Step> wait(std::int64_t ticket);
  // Whether `wait` would return at once.
  bool ready(std::int64_t ticket);
  // An eventfd that grows by one whenever the step of a ticket has ended; -1: none. The caller keeps it open.
  void set_doorbell(int fd) { doorbell_.store(fd); }
  // From now on steps do not wait for other ranks: they fail with Cancelled.
  void cancel() { cancelled_.store(true); }

  void set_progress(Progress progress) { progress_ = progress; }
  void record_spans(bool on);
  std::vector<Span> take_spans();
  std::vector<StepSpan> take_steps();

 private:
  struct Work {
    std::int64_t ticket;
    std::shared_ptr<Program> program;
    std::shared_ptr<Step> step;
    std::size_t first, last;
  };
  struct Done {
    std::shared_ptr<Step> step;
    std::exception_ptr failure;
  };
  class StepJob;

  void serve();
  void run(Work& work);
  void run_noted(Work& work);
  void ring();
  void note(const Span& span);

  const int pool_threads_;
  // One for each thread. Unless they are given: where there are as many usable ones as threads; with a share of the
  // machine only, the system places them.
  std::vector<int> processors_;
  std::mutex lock_;
  std::condition_variable work_arrived_, work_done_;
  std::deque<Work> queue_;
  std::map<std::int64_t, Done> done_;
  std::int64_t next_ticket_ = 0;
  bool stop_ = false;
  Progress progress_;
  std::atomic<bool> record_{false};
  std::mutex spans_lock_;
  std::vector<Span> spans_;
  std::vector<StepSpan> steps_;
  std::atomic<bool> cancelled_{false};
  std::atomic<int> doorbell_{-1};
  std::vector<Memory> scratch_;
  std::unique_ptr<Pool> pool_;
  std::thread leader_;
};

}  // namespace evensong
