// Segments whose units are rows, or panels of a weight.
#include <algorithm>
#include <cstring>
#include <utility>

#include "packed.h"
#include "program.h"
#include "rows_at_once.h"

namespace evensong {

namespace {

class Embedding : public Segment {
 public:
  Embedding(Program& program, const PackedMatrix& table, float scale, const Buffer& out, std::int64_t first_row)
      : program_(program), table_(table), scale_(scale), out_(out), first_row_(first_row) {}
  const char* name() const override { return "embedding"; }
  std::int64_t begin(const Step& step) override {
    if (step.feed_after >= 0) program_.feed().wait(step.feed_after, step.cancelled);
    return step.num_rows();
  }
  void run(Step& step, std::int64_t row, Scratch) override {
    std::int64_t& token = step.token_ids[static_cast<std::size_t>(row)];
    // The step that sampled it has ended: steps run one after the other, and `begin` waits for those of other ranks.
    if (token < 0) token = program_.feed().token(-1 - token);
    check(token >= 0 && token < program_.limits().vocab_size, "a fed token was never sampled");
    const std::int64_t held = token - first_row_;
    if (held >= 0 && held < table_.rows)
      program_.kernels().gather(table_, held, scale_, out_.row<float>(row));
    else
      std::memset(out_.bytes(row), 0, static_cast<std::size_t>(out_.width) * sizeof(float));
  }

 private:
  Program& program_;
  PackedMatrix table_;
  float scale_;
  const Buffer& out_;
  std::int64_t first_row_;
};

class Norm : public Segment {
 public:
  Norm(const Kernels& kernels, const Buffer& in, const float* weight, float eps, const Buffer& out, bool sampled_rows)
      : kernels_(kernels), in_(in), weight_(weight), eps_(eps), out_(out), sampled_rows_(sampled_rows) {}
  const char* name() const override { return "rms_norm"; }
  std::int64_t rows(const Step& step) const { return sampled_rows_ ? step.num_samples() : step.num_rows(); }
  std::int64_t begin(const Step& step) override { return row_units(rows(step)); }
  void run(Step& step, std::int64_t unit, Scratch) override {
    for_rows(unit, rows(step), [&](std::int64_t row) {
      kernels_.rms_norm(in_.row<float>(row), weight_, eps_, in_.width, out_.bytes(row), out_.type);
    });
  }

 private:
  const Kernels& kernels_;
  const Buffer& in_;
  const float* weight_;
  float eps_;
  const Buffer& out_;
  bool sampled_rows_;
};

class AddNorm : public Segment {
 public:
  AddNorm(const Kernels& kernels, const Buffer& x, const Buffer& y, const float* weight, float eps)
      : kernels_(kernels), x_(x), y_(y), weight_(weight), eps_(eps) {}
  const char* name() const override { return "add_rms_norm"; }
  std::int64_t begin(const Step& step) override { return row_units(step.num_rows()); }
  void run(Step& step, std::int64_t unit, Scratch) override {
    for_rows(unit, step.num_rows(), [&](std::int64_t row) {
      kernels_.add_rms_norm(x_.row<float>(row), y_.row<float>(row), weight_, eps_, x_.width);
    });
  }

 private:
  const Kernels& kernels_;
  const Buffer& x_;
  const Buffer& y_;
  const float* weight_;
  float eps_;
};

// Widens or rounds.
class Convert : public Segment {
 public:
  Convert(const Kernels& kernels, const Buffer& in, const Buffer& out) : kernels_(kernels), in_(in), out_(out) {}
  const char* name() const override { return "convert"; }
  std::int64_t begin(const Step& step) override { return row_units(step.num_rows()); }
  void run(Step& step, std::int64_t unit, Scratch) override {
    for_rows(unit, step.num_rows(), [&](std::int64_t row) {
      kernels_.convert(in_.row<float>(row), in_.width, out_.row<bf16>(row));
    });
  }

 private:
  const Kernels& kernels_;
  const Buffer& in_;
  const Buffer& out_;
};

// The sampled rows of a buffer, one after the other.
class CopySampled : public Segment {
 public:
  CopySampled(const Buffer& in, const Buffer& out) : in_(in), out_(out) {}
  const char* name() const override { return "copy_sampled"; }
  std::int64_t begin(const Step& step) override { return row_units(step.num_samples()); }
  void run(Step& step, std::int64_t unit, Scratch) override {
    for_rows(unit, step.num_samples(), [&](std::int64_t i) {
      const std::size_t bytes = static_cast<std::size_t>(in_.width) * size_of(in_.type);
      std::memcpy(out_.bytes(i), in_.bytes(step.sample_rows[static_cast<std::size_t>(i)]), bytes);
    });
  }

 private:
  const Buffer& in_;
  const Buffer& out_;
};

class Linear : public Segment {
 public:
  Linear(Program& program, LinearArgs args, const Buffer& in, const Buffer& out, bool sampled_rows,
         std::int64_t first_column)
      : program_(program), kernels_(program.kernels()), args_(args), out_(out), sampled_rows_(sampled_rows),
        first_column_(first_column) {
    args_.in = in.fixed();
    args_.in_stride = in.stride;
    args_.out_stride = out.stride;
    args_.out_type = out.type;
    panels_ = num_panels(kernels_, args_.weight.rows, false);  // gated weights have as many
  }
  const char* name() const override { return sampled_rows_ ? "output_head" : "linear"; }
  std::int64_t rows(const Step& step) const { return sampled_rows_ ? step.num_samples() : step.num_rows(); }
  // Panels are cut no further than to give every thread several units: each unit reads its weights once.
  std::int64_t panels_at_once() const { return std::max<std::int64_t>(1, panels_ / kMostUnits); }
  std::int64_t begin(const Step& step) override {
    if (rows(step) == 0) return 0;
    args_.out = out_.data();  // a part of an exchange lies elsewhere each time
    if (sampled_rows_) begin_head(step);
    return (panels_ + panels_at_once() - 1) / panels_at_once();
  }
  bool reads_weights() const override { return true; }
  Ahead ahead(const Step& step, int thread, int threads) const override {
    if (rows(step) == 0 || rows(step) > kFewRows) return {};
    const std::int64_t units = (panels_ + panels_at_once() - 1) / panels_at_once();
    const std::int64_t first = units * thread / threads * panels_at_once();
    const std::int64_t last = units * (thread + 1) / threads * panels_at_once();
    const std::size_t bytes = panel_bytes(kernels_, args_.weight.cols, args_.weight.type);
    return {static_cast<const char*>(args_.weight.data) + static_cast<std::size_t>(first) * bytes,
            std::min(static_cast<std::size_t>(last - first) * bytes, kMostAhead)};
  }
  void run(Step& step, std::int64_t unit, Scratch scratch) override {
    const std::int64_t first = unit * panels_at_once();
    kernels_.linear(args_, first, std::min(panels_, first + panels_at_once()), 0, rows(step), scratch);
  }

 private:
  void begin_head(const Step& step) {
    if (out_.logits != nullptr) out_.logits->enter(step.cancelled);
    args_.out = out_.bank(step.bank) + first_column_ * static_cast<std::int64_t>(sizeof(float));
    choose_epilogue(step);
  }

  // Most requests are greedy: then the head's outputs, a hundred times its inputs, need not go to memory and back.
  void choose_epilogue(const Step& step) {
    BestLogits& best = program_.best_logits(step.bank);
    best.first_column = first_column_;
    best.num_columns = args_.num_columns;
    best.used = step.wants_best_tokens_only();
    args_.epilogue = best.used ? Epilogue::argmax : Epilogue::store;
    if (!best.used) return;
    best.num_panels = panels_;
    best.values.resize(static_cast<std::size_t>(rows(step) * panels_));
    best.ids.resize(best.values.size());
    args_.best = best.values.data();
    args_.best_index = best.ids.data();
  }

  static constexpr std::int64_t kMostUnits = 256;
  // A part of what the second-level cache holds; with more rows the processor, not memory, sets the pace.
  static constexpr std::size_t kMostAhead = 128 << 10;
  static constexpr std::int64_t kFewRows = 128;
  Program& program_;
  const Kernels& kernels_;
  LinearArgs args_;
  const Buffer& out_;
  bool sampled_rows_;
  std::int64_t first_column_;
  std::int64_t panels_;
};

class Tap : public Segment {
 public:
  Tap(std::string name, const Buffer& in, char* target) : name_(std::move(name)), in_(in), target_(target) {}
  const char* name() const override { return name_.c_str(); }
  std::int64_t begin(const Step& step) override { return row_units(step.num_rows()); }
  void run(Step& step, std::int64_t unit, Scratch) override {
    const std::size_t bytes = static_cast<std::size_t>(in_.width) * size_of(in_.type);
    for_rows(unit, step.num_rows(), [&](std::int64_t row) {
      std::memcpy(target_ + static_cast<std::size_t>(row) * bytes, in_.bytes(row), bytes);
    });
  }

 private:
  std::string name_;
  const Buffer& in_;
  char* target_;
};

class Callback : public Segment {
 public:
  Callback(std::string name, std::function<void(std::int64_t)> call) : name_(std::move(name)), call_(std::move(call)) {}
  const char* name() const override { return name_.c_str(); }
  std::int64_t begin(const Step&) override { return 0; }
  bool calls_back() const override { return true; }
  void run(Step& step, std::int64_t, Scratch) override { call_(step.num_rows()); }

 private:
  std::string name_;
  std::function<void(std::int64_t)> call_;
};

}  // namespace

std::unique_ptr<Segment> make_embedding(Program& program, const PackedMatrix& table, float scale, int out,
                                        std::int64_t first_row) {
  const Buffer& target = program.buffer(out, table.cols, DType::f32);
  check(first_row >= 0 && (first_row == 0 || target.group != nullptr), "only a part of an exchange is of some rows");
  check(target.group != nullptr || table.rows >= program.limits().vocab_size,
        "the embedding has fewer rows than there are token ids");
  return std::make_unique<Embedding>(program, table, scale, target, first_row);
}

std::unique_ptr<Segment> make_norm(Program& program, int in, const float* weight, float eps, int out,
                                   bool sampled_rows) {
  const Buffer& source = program.buffer(in);
  check(source.type == DType::f32, "norms read float32");
  check(program.buffer(out).width == source.width, "a norm keeps the width");
  return std::make_unique<Norm>(program.kernels(), source, weight, eps, program.buffer(out), sampled_rows);
}

std::unique_ptr<Segment> make_add_norm(Program& program, int x, int y, const float* weight, float eps) {
  const Buffer& sum = program.buffer(x);
  return std::make_unique<AddNorm>(program.kernels(), program.buffer(x, sum.width, DType::f32),
                                   program.buffer(y, sum.width, DType::f32), weight, eps);
}

std::unique_ptr<Segment> make_convert(Program& program, int in, int out) {
  const Buffer& source = program.buffer(in);
  check(source.type == DType::f32, "float32 is rounded to bfloat16");
  return std::make_unique<Convert>(program.kernels(), source, program.buffer(out, source.width, DType::bf16));
}

std::unique_ptr<Segment> make_copy_sampled(Program& program, int in, int out) {
  const Buffer& source = program.buffer(in);
  return std::make_unique<CopySampled>(source, program.buffer(out, source.width, source.type));
}

std::unique_ptr<Segment> make_linear(Program& program, const PackedMatrix& weight, const float* bias, int in, int out,
                                     Epilogue epilogue, bool sampled_rows, std::int64_t first_column) {
  const bool paired = program.kernels().pairs && weight.type == DType::bf16;
  const bool gated = epilogue == Epilogue::silu || epilogue == Epilogue::gelu_tanh;
  check(epilogue != Epilogue::argmax && (!sampled_rows || epilogue == Epilogue::store),
        "the output head stores its logits, and leaves that out where a step does not need them");
  check(!gated || weight.rows % 2 == 0, "gate and up have as many outputs");
  const Buffer& source = program.buffer(in, weight.cols, paired ? DType::bf16 : DType::f32);
  const Buffer& target = program.buffer(out);
  const bool is_part = target.logits != nullptr;
  check(!is_part || sampled_rows, "shared logits are written by an output head");
  check(first_column >= 0 && (is_part || first_column == 0), "only of shared logits a product writes some columns");
  const std::int64_t outputs = gated ? weight.rows / 2 : weight.rows;
  check(is_part ? first_column + outputs <= target.width : outputs == target.width,
        "a product's outputs do not fit its buffer");
  check(epilogue != Epilogue::add || target.type == DType::f32, "sums are kept in float32");
  check(in != out, "a product cannot replace its input");
  LinearArgs args{};
  args.weight = weight;
  args.bias = bias;
  args.epilogue = epilogue;
  args.num_columns = std::min(weight.rows, std::max<std::int64_t>(0, program.limits().vocab_size - first_column));
  return std::make_unique<Linear>(program, args, source, target, sampled_rows, first_column);
}

std::unique_ptr<Segment> make_tap(Program& program, std::string name, int in, char* target, std::size_t bytes) {
  const Buffer& source = program.buffer(in);
  const auto row = static_cast<std::size_t>(source.width) * size_of(source.type);
  check(bytes >= row * static_cast<std::size_t>(program.limits().max_rows), "a tap's target is too small");
  return std::make_unique<Tap>(std::move(name), source, target);
}

std::unique_ptr<Segment> make_callback(std::string name, std::function<void(std::int64_t)> call) {
  return std::make_unique<Callback>(std::move(name), std::move(call));
}

}  // namespace evensong
