#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "waiting.h"

namespace evensong {

namespace {

// What is kept of a profile: an hour would fill the memory.
constexpr std::size_t kMostSpans = 4'000'000;

}  // namespace

// A step's segments as the phases of a job.
class Engine::StepJob : public Job {
 public:
  StepJob(Engine& engine, Work& work)
      : engine_(engine), work_(work), next_(work.first) {}

  std::int64_t next_phase() override {
    finish_phase();
    if (!copied_) {
      copied_ = true;
      current_ = &work_.program->copies();
      if (const std::int64_t units = current_->begin(*work_.step); units > 0) return units;
    }
    for (; next_ < work_.last; ++next_) {
      Segment& segment = work_.program->segment(next_);
      if (segment.calls_back()) {
        segment.run(*work_.step, 0, Scratch{nullptr, 0});
        continue;
      }
      const std::int64_t units = segment.begin(*work_.step);
      if (units == 0) continue;
      current_ = &segment;
      index_ = static_cast<std::int32_t>(next_++);
      ahead_ = next_reader_of_weights();
      return units;
    }
    return -1;
  }

  Ahead ahead(int thread) const override {
    return ahead_ == nullptr ? Ahead{} : ahead_->ahead(*work_.step, thread, engine_.pool_threads_);
  }

  void run_unit(std::int64_t unit, int thread) override {
    const Memory& memory = engine_.scratch_[static_cast<std::size_t>(thread)];
    const Scratch scratch{memory.data(), memory.size()};
    if (!engine_.record_.load(std::memory_order_relaxed)) {
      current_->run(*work_.step, unit, scratch);
      return;
    }
    const std::int64_t begin = now_ns();
    current_->run(*work_.step, unit, scratch);
    engine_.note({index_, thread, begin, now_ns()});
  }

 private:
  // Weights come from memory, and what lies between two products is short: memory would rest meanwhile.
  const Segment* next_reader_of_weights() const {
    for (std::size_t i = next_; i < std::min(next_ + kLookAhead, work_.last); ++i)
      if (work_.program->segment(i).reads_weights()) return &work_.program->segment(i);
    return nullptr;
  }

  static constexpr std::size_t kLookAhead = 3;

  void finish_phase() {
    if (engine_.progress_.ticks == nullptr) return;
    __atomic_fetch_add(engine_.progress_.ticks, 1, __ATOMIC_RELAXED);
    __atomic_store_n(engine_.progress_.last, static_cast<std::uint64_t>(now_ns()), __ATOMIC_RELAXED);
  }

  Engine& engine_;
  Work& work_;
  std::size_t next_;
  bool copied_ = false;
  std::int32_t index_ = -1;
  Segment* current_ = nullptr;
  const Segment* ahead_ = nullptr;
};

Engine::Engine(int threads, std::vector<int> processors) : pool_threads_(threads) {
  check(threads >= 1 && threads <= 1024, "an engine has 1 to 1024 threads");
  scratch_.resize(static_cast<std::size_t>(threads));
  if (processors.empty()) {
    processors_ = usable_processors();
    if (processors_.size() != scratch_.size()) processors_.clear();
  }
  for (std::size_t i = 0; i < scratch_.size() && !processors.empty(); ++i)
    processors_.push_back(processors[i % processors.size()]);
  leader_ = std::thread([this] { serve(); });
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    stop_ = true;
  }
  work_arrived_.notify_all();
  if (leader_.joinable()) leader_.join();
}

std::int64_t Engine::submit(std::shared_ptr<Program> program, std::shared_ptr<Step> step, std::size_t first,
                            std::size_t last) {
  check(first <= last && last <= program->num_segments(), "no such segments");
  step->prepare(program->limits());
  step->cancelled = &cancelled_;
  const Kernels& kernels = program->kernels();
  if (program->num_kv_heads > 0)
    step->plan_attention(program->num_kv_heads, kernels.query_block, kernels.split_keys, pool_threads_);
  step->prepare_output();
  const std::lock_guard<std::mutex> hold(lock_);
  const std::int64_t ticket = next_ticket_++;
  queue_.push_back({ticket, std::move(program), std::move(step), first, last});
  work_arrived_.notify_one();
  return ticket;
}

std::shared_ptr<Step> Engine::wait(std::int64_t ticket) {
  std::unique_lock<std::mutex> hold(lock_);
  check(ticket >= 0 && ticket < next_ticket_, "no such ticket");
  work_done_.wait(hold, [&] { return done_.count(ticket) > 0; });
  Done done = std::move(done_.at(ticket));
  done_.erase(ticket);
  hold.unlock();
  if (done.failure) std::rethrow_exception(done.failure);
  return done.step;
}

bool Engine::ready(std::int64_t ticket) {
  const std::lock_guard<std::mutex> hold(lock_);
  check(ticket >= 0 && ticket < next_ticket_, "no such ticket");
  return done_.count(ticket) > 0;
}

void Engine::serve() {
  if (!processors_.empty()) bind_to_processor(processors_.front());
  pool_ = std::make_unique<Pool>(pool_threads_, processors_);
  for (;;) {
    std::unique_lock<std::mutex> hold(lock_);
    work_arrived_.wait(hold, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) break;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    hold.unlock();
    Done done{work.step, nullptr};
    try {
      run_noted(work);
    } catch (...) {
      done.failure = std::current_exception();
    }
    const std::int64_t ticket = work.ticket;
    // The last hold on a program may be this one, and what it holds of Python is let go by its own deleter.
    work = Work{};
    hold.lock();
    done_.emplace(ticket, std::move(done));
    work_done_.notify_all();
    hold.unlock();
    ring();
  }
  pool_.reset();
}

void Engine::run(Work& work) {
  for (Memory& memory : scratch_)
    if (memory.size() < work.program->scratch()) memory = Memory(work.program->scratch());
  FeedTable& feed = work.program->feed();
  const std::int64_t step_id = work.step->step_id;
  if (step_id >= 0 && work.first > 0 && feed.failed(step_id))
    throw std::runtime_error("an earlier part of this step has failed");
  try {
    StepJob job(*this, work);
    pool_->run(job);
  } catch (...) {
    if (step_id >= 0) feed.fail(step_id);
    throw;
  }
  if (work.step->publishes) feed.publish(step_id);
}

void Engine::run_noted(Work& work) {
  if (!record_.load(std::memory_order_relaxed)) return run(work);
  struct Note {
    Engine& engine;
    StepSpan span;
    ~Note() {
      span.end = now_ns();
      const std::lock_guard<std::mutex> hold(engine.spans_lock_);
      if (engine.steps_.size() < kMostSpans) engine.steps_.push_back(span);
    }
  } note{*this, {work.step->step_id, now_ns(), 0, work.step->num_rows()}};
  run(work);
}

void Engine::ring() {
  const int fd = doorbell_.load();
  if (fd < 0) return;
  const std::uint64_t one = 1;
  // One that is full has been rung.
  [[maybe_unused]] const auto written = write(fd, &one, sizeof one);
}

void Engine::record_spans(bool on) { record_.store(on); }

void Engine::note(const Span& span) {
  const std::lock_guard<std::mutex> hold(spans_lock_);
  if (spans_.size() < kMostSpans) spans_.push_back(span);
}

std::vector<Span> Engine::take_spans() {
  const std::lock_guard<std::mutex> hold(spans_lock_);
  return std::exchange(spans_, {});
}

std::vector<StepSpan> Engine::take_steps() {
  const std::lock_guard<std::mutex> hold(spans_lock_);
  return std::exchange(steps_, {});
}

}  // namespace evensong
