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

#include "feed.h"
#include "kernels.h"
#include "links.h"
#include "pool.h"
#include "step.h"

namespace evensong {

// Activations [max_rows, width]; rows are `stride` elements apart and padded with zeros.
//
// What the output head writes has banks of such rows, one after the other: a step's logits stay while the next one runs.
struct Buffer {
  std::int64_t width = 0;
  std::int64_t stride = 0;
  DType type = DType::f32;
  std::int64_t rows = 0;  // of a bank
  std::int64_t banks = 1;
  Memory memory;
  char* base = nullptr;           // its memory, or some that it shares
  Group* group = nullptr;         // whose part of an exchange it is; where that lies changes
  LogitsGroup* logits = nullptr;  // whose members write columns of it

  char* data() const { return group != nullptr ? group->part() : base; }
  template <typename T>
  T* row(std::int64_t index) const {
    return reinterpret_cast<T*>(data()) + index * stride;
  }
  char* bytes(std::int64_t index) const { return data() + index * row_bytes(); }
  char* bank(std::int64_t index) const { return data() + index * rows * row_bytes(); }
  std::int64_t row_bytes() const { return stride * static_cast<std::int64_t>(size_of(type)); }
  // For those who keep the pointer.
  char* fixed() const {
    check(group == nullptr, "a part of an exchange is written by embeddings and products, and read by all_reduce");
    return base;
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

// The largest logit of each panel of the output head, where a step wants nothing else: [rows, num_panels]; of a bank.
struct BestLogits {
  bool used = false;  // by the step that wrote the bank last: then its logits are not written
  std::int64_t first_column = 0, num_columns = 0;  // of the logits, that the head wrote
  std::int64_t num_panels = 0;
  std::vector<float> values;
  std::vector<std::int32_t> ids;  // from the first column

  // Of a row: NaN where it has one, the lowest id on a tie.
  BestToken of_row(std::int64_t row) const;
};

// Copies blocks, in their order, in every cache of a program: before the segments of a step that asks for it.
class BlockCopies : public Segment {
 public:
  explicit BlockCopies(std::int32_t block_size) : block_size_(block_size) {}
  // Layers may share an array.
  void add(const LayerCache& cache);
  const char* name() const override { return "copy_blocks"; }
  std::int64_t begin(const Step& step) override;
  void run(Step& step, std::int64_t unit, Scratch scratch) override;

 private:
  struct Array {
    char* data;
    std::size_t block_bytes;
  };
  std::int64_t block_size_;
  std::vector<Array> arrays_;
};

class Program {
 public:
  // `feed`: memory of a FeedTable that it shares with others; else it has one of its own.
  Program(const Kernels& kernels, const ProgramLimits& limits, char* feed = nullptr, std::size_t feed_bytes = 0);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const Kernels& kernels() const { return kernels_; }
  const ProgramLimits& limits() const { return limits_; }

  int add_buffer(std::int64_t width, DType type, bool sampled_rows = false);
  // What lies in memory of others, which the caller keeps.
  int add_exchange(Group& group);
  int add_shared_logits(LogitsGroup& group);
  const Buffer& buffer(int index) const;
  // `buffer`, checked: it has at least this width and this type.
  const Buffer& buffer(int index, std::int64_t width, DType type) const;

  void append(std::unique_ptr<Segment> segment) { segments_.push_back(std::move(segment)); }
  std::size_t num_segments() const { return segments_.size(); }
  Segment& segment(std::size_t index) const { return *segments_[index]; }

  // Keeps what segments point into.
  void hold(std::shared_ptr<void> owner) { held_.push_back(std::move(owner)); }

  // Where sampled tokens are left for later steps.
  FeedTable& feed() const { return *feed_; }
  // Memory that a segment needs of each thread.
  void need_scratch(std::size_t bytes) { scratch_ = scratch_ > bytes ? scratch_ : bytes; }
  std::size_t scratch() const { return scratch_; }
  BestLogits& best_logits(std::int64_t bank) { return banks_[static_cast<std::size_t>(bank)]; }
  BlockCopies& copies() { return copies_; }
  // Attention is cut into units for so many heads, the same in all layers; 0 before the first attention.
  std::int32_t num_kv_heads = 0;

 private:
  int add(std::unique_ptr<Buffer> buffer);

  const Kernels& kernels_;
  ProgramLimits limits_;
  std::vector<std::shared_ptr<void>> held_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::unique_ptr<FeedTable> feed_;
  std::vector<BestLogits> banks_;
  BlockCopies copies_;
  std::size_t scratch_ = 256 * 1024;
};

// ---- the segments; each checks its sizes here, once, so that no step has to

// Into a part of an exchange: `table` holds the rows from `first_row` on, and those of other tokens become zeros.
std::unique_ptr<Segment> make_embedding(Program& program, const PackedMatrix& table, float scale, int out,
                                        std::int64_t first_row = 0);
std::unique_ptr<Segment> make_norm(Program& program, int in, const float* weight, float eps, int out,
                                   bool sampled_rows = false);
std::unique_ptr<Segment> make_add_norm(Program& program, int x, int y, const float* weight, float eps);
std::unique_ptr<Segment> make_linear(Program& program, const PackedMatrix& weight, const float* bias, int in, int out,
                                     Epilogue epilogue, bool sampled_rows = false, std::int64_t first_column = 0);
std::unique_ptr<Segment> make_rope(Program& program, const RopeArgs& args, const LayerCache& cache, int qkv, int query);
std::unique_ptr<Segment> make_attention(Program& program, const LayerCache& cache, std::int32_t num_heads, float scale,
                                        float soft_cap, int query, int out);
std::unique_ptr<Segment> make_convert(Program& program, int in, int out);
std::unique_ptr<Segment> make_copy_sampled(Program& program, int in, int out);
std::unique_ptr<Segment> make_sampling(Program& program, int logits);
std::unique_ptr<Segment> make_tap(Program& program, std::string name, int in, char* target, std::size_t bytes);
// `call` gets the number of the step's rows.
std::unique_ptr<Segment> make_callback(std::string name, std::function<void(std::int64_t)> call);

// ---- what members of a group and neighbouring stages do together; see links.h

void append_all_reduce(Program& program, int part, int out, bool adds);
void append_gather_logits(Program& program, int logits);
void append_send(Program& program, int in, Channel& channel);
void append_receive(Program& program, Channel& channel, int out);

}  // namespace evensong
