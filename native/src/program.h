// A model's forward pass as a list of segments, recorded once and replayed for every step.
//
// Segments name buffers by number; a buffer has a fixed width and as many rows as the step that runs. Python appends
// segments (bind_program.cpp) while the model's forward is recorded, and the engine runs them (engine.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "step.h"

namespace evensong {

// Activations [max_rows, width]; rows are `stride` elements apart and padded with zeros.
struct Buffer {
  std::int64_t width;
  std::int64_t stride;
  DType type;
  Memory memory;

  template <typename T>
  T* row(std::int64_t index) const {
    return reinterpret_cast<T*>(memory.data()) + index * stride;
  }
  char* bytes(std::int64_t index) const {
    return memory.data() + index * stride * static_cast<std::int64_t>(size_of(type));
  }
};

class Segment {
 public:
  virtual ~Segment() = default;
  virtual const char* name() const = 0;
  // By one thread, before its units run: how many there are.
  virtual std::int64_t begin(const Step& step) = 0;
  virtual void run(Step& step, std::int64_t unit, Scratch scratch) = 0;
  // What one of `threads` will read first of all that it reads of weights.
  virtual Ahead ahead(const Step&, int thread, int threads) const { return (void)thread, (void)threads, Ahead{}; }
  virtual bool reads_weights() const { return false; }
  // A Python function is called while the pool stands still, by the thread that runs the step.
  virtual bool calls_back() const { return false; }
};

// Where a layer keeps keys and values, and how its blocks are found.
struct LayerCache {
  void* data;
  DType type;
  std::int64_t num_rows;
  std::int32_t num_kv_heads, head_dim;
  std::int32_t group;  // whose block tables it reads
  std::int32_t window;
};

// The largest logit of each panel of the output head, where a step wants nothing else: [rows, num_panels].
struct BestLogits {
  bool used = false;  // in the step that runs: then its logits are not written
  std::int64_t num_panels = 0;
  std::vector<float> values;
  std::vector<std::int32_t> ids;
};

struct ProgramLimits {
  std::int64_t max_rows;       // tokens of a step
  std::int64_t max_samples;    // sampled rows of a step
  std::int64_t max_positions;  // tokens of a sequence
  std::int64_t num_blocks;
  std::int32_t block_size;
  std::int32_t num_groups;
  std::int64_t num_feed_slots;
  std::int64_t vocab_size;  // ids that a token may have
};

class Program {
 public:
  Program(const Kernels& kernels, const ProgramLimits& limits);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const Kernels& kernels() const { return kernels_; }
  const ProgramLimits& limits() const { return limits_; }

  int add_buffer(std::int64_t width, DType type, bool sampled_rows = false);
  const Buffer& buffer(int index) const;
  // `buffer`, checked: it has at least this width and this type.
  const Buffer& buffer(int index, std::int64_t width, DType type) const;

  void append(std::unique_ptr<Segment> segment) { segments_.push_back(std::move(segment)); }
  std::size_t num_segments() const { return segments_.size(); }
  Segment& segment(std::size_t index) const { return *segments_[index]; }

  // Keeps what segments point into.
  void hold(std::shared_ptr<void> owner) { held_.push_back(std::move(owner)); }

  // Where sampled tokens are left for later steps.
  std::vector<std::int64_t>& feed() { return feed_; }
  // Memory that a segment needs of each thread.
  void need_scratch(std::size_t bytes) { scratch_ = scratch_ > bytes ? scratch_ : bytes; }
  std::size_t scratch() const { return scratch_; }
  BestLogits best_logits;
  // Attention is cut into units for so many heads, the same in all layers; 0 before the first attention.
  std::int32_t num_kv_heads = 0;

 private:
  const Kernels& kernels_;
  ProgramLimits limits_;
  std::vector<std::shared_ptr<void>> held_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<std::int64_t> feed_;
  std::size_t scratch_ = 256 * 1024;
};

// ---- the segments; each checks its sizes here, once, so that no step has to

std::unique_ptr<Segment> make_embedding(Program& program, const PackedMatrix& table, float scale, int out);
std::unique_ptr<Segment> make_norm(Program& program, int in, const float* weight, float eps, int out,
                                   bool sampled_rows = false);
std::unique_ptr<Segment> make_add_norm(Program& program, int x, int y, const float* weight, float eps);
std::unique_ptr<Segment> make_linear(Program& program, const PackedMatrix& weight, const float* bias, int in, int out,
                                     Epilogue epilogue, bool sampled_rows = false);
std::unique_ptr<Segment> make_rope(Program& program, const RopeArgs& args, const LayerCache& cache, int qkv, int query);
std::unique_ptr<Segment> make_attention(Program& program, const LayerCache& cache, std::int32_t num_heads, float scale,
                                        float soft_cap, int query, int out);
std::unique_ptr<Segment> make_convert(Program& program, int in, int out);
std::unique_ptr<Segment> make_copy_sampled(Program& program, int in, int out);
std::unique_ptr<Segment> make_sampling(Program& program, int logits);
std::unique_ptr<Segment> make_tap(Program& program, std::string name, int in, char* target, std::size_t bytes);
// `call` gets the number of the step's rows.
std::unique_ptr<Segment> make_callback(std::string name, std::function<void(std::int64_t)> call);

}  // namespace evensong
