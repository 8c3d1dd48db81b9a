// Segments in which a rank waits for others, or hands them something: see links.h.
//
// `begin` waits, before any unit runs; what a rank says of what its units wrote stands in the `begin` of a segment after
// them. A wait ends by an exception once the engine was cancelled.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "program.h"
#include "rows_at_once.h"

namespace evensong {

namespace {

// Without units of its own: what one thread says once.
class Moment : public Segment {
 public:
  std::int64_t begin(const Step& step) final {
    pass(step);
    return 0;
  }
  void run(Step&, std::int64_t, Scratch) final {}
  virtual void pass(const Step& step) = 0;
};

// Every member adds up all parts, in the order of the members: the same bits everywhere.
class AllReduce : public Segment {
 public:
  AllReduce(const Kernels& kernels, Group& group, const Buffer& out, bool adds)
      : kernels_(kernels), group_(group), out_(out), adds_(adds) {}
  const char* name() const override { return "all_reduce"; }
  std::int64_t begin(const Step& step) override {
    if (step.num_rows() == 0) return 0;
    bank_ = group_.exchange(step.cancelled);
    return row_units(step.num_rows());
  }
  void run(Step& step, std::int64_t unit, Scratch) override {
    std::array<const float*, Group::kMostMembers> parts;
    for_rows(unit, step.num_rows(), [&](std::int64_t row) {
      for (int member = 0; member < group_.size(); ++member)
        parts[static_cast<std::size_t>(member)] =
            reinterpret_cast<const float*>(group_.part(member, bank_)) + row * group_.stride();
      kernels_.sum_rows(parts.data(), group_.size(), out_.width, adds_, out_.row<float>(row));
    });
  }

 private:
  const Kernels& kernels_;
  Group& group_;
  const Buffer& out_;
  bool adds_;
  std::uint32_t bank_ = 0;
};

// Where a step wants nothing but each row's best token, a member hands over that of its columns.
class GatherBest : public Segment {
 public:
  GatherBest(Program& program, LogitsGroup& group) : program_(program), group_(group) {}
  const char* name() const override { return "gather_best"; }
  std::int64_t begin(const Step& step) override {
    return program_.best_logits(step.bank).used ? row_units(step.num_samples()) : 0;
  }
  void run(Step& step, std::int64_t unit, Scratch) override {
    BestToken* found = group_.best(step.bank, group_.member());
    for_rows(unit, step.num_samples(),
             [&](std::int64_t row) { found[row] = program_.best_logits(step.bank).of_row(row); });
  }

 private:
  Program& program_;
  LogitsGroup& group_;
};

class GatherLogits : public Moment {
 public:
  GatherLogits(Program& program, LogitsGroup& group) : program_(program), group_(group) {}
  const char* name() const override { return "gather_logits"; }
  void pass(const Step& step) override {
    if (step.num_samples() == 0) return;
    const BestLogits& best = program_.best_logits(step.bank);
    group_.columns(step.bank, group_.member()) = {best.used ? 1u : 0u, best.first_column, best.num_columns};
    group_.arrive(step.cancelled);
  }

 private:
  Program& program_;
  LogitsGroup& group_;
};

// Rows of a buffer into a place of a channel, or out of it.
class Transfer : public Segment {
 public:
  Transfer(const Buffer& rows, Channel& channel, bool sends) : rows_(rows), channel_(channel), sends_(sends) {}
  const char* name() const override { return sends_ ? "send" : "receive"; }
  std::int64_t begin(const Step& step) override {
    place_ = sends_ ? channel_.next_free(step.cancelled) : channel_.next_filled(step.cancelled);
    if (!sends_ && (place_.rows != step.num_rows() || place_.step_id != step.step_id))
      throw std::runtime_error("the stage before has sent another step than the one that is wanted");
    return row_units(step.num_rows());
  }
  void run(Step& step, std::int64_t unit, Scratch) override {
    const std::size_t bytes = static_cast<std::size_t>(rows_.width) * sizeof(float);
    for_rows(unit, step.num_rows(), [&](std::int64_t row) {
      char* there = place_.data + row * place_.stride;
      std::memcpy(sends_ ? there : rows_.bytes(row), sends_ ? rows_.bytes(row) : there, bytes);
    });
  }

 private:
  const Buffer& rows_;
  Channel& channel_;
  bool sends_;
  Channel::Place place_{};
};

class Sent : public Moment {
 public:
  explicit Sent(Channel& channel) : channel_(channel) {}
  const char* name() const override { return "sent"; }
  void pass(const Step& step) override { channel_.send(step.num_rows(), step.step_id); }

 private:
  Channel& channel_;
};

class Received : public Moment {
 public:
  explicit Received(Channel& channel) : channel_(channel) {}
  const char* name() const override { return "received"; }
  void pass(const Step&) override { channel_.release(); }

 private:
  Channel& channel_;
};

const Buffer& rows_for(Program& program, int index, const Channel& channel) {
  const Buffer& rows = program.buffer(index, channel.width(), DType::f32);
  rows.fixed();
  check(channel.max_rows() >= program.limits().max_rows, "a channel has room for fewer rows than a step may have");
  return rows;
}

}  // namespace

BestToken BestLogits::of_row(std::int64_t row) const {
  const float* largest = values.data() + row * num_panels;
  std::int64_t place = 0;
  for (std::int64_t panel = 0; panel < num_panels; ++panel) {
    if (largest[panel] != largest[panel]) return {std::numeric_limits<float>::quiet_NaN(), -1};
    if (largest[panel] > largest[place]) place = panel;
  }
  const std::int32_t id = ids[static_cast<std::size_t>(row * num_panels + place)];
  return {largest[place], static_cast<std::int32_t>(first_column) + id};
}

void append_all_reduce(Program& program, int part, int out, bool adds) {
  const Buffer& source = program.buffer(part);
  check(source.group != nullptr, "all_reduce adds up the parts of an exchange");
  const Buffer& target = program.buffer(out, source.width, DType::f32);
  target.fixed();
  program.append(std::make_unique<AllReduce>(program.kernels(), *source.group, target, adds));
}

void append_gather_logits(Program& program, int logits) {
  const Buffer& shared = program.buffer(logits);
  check(shared.logits != nullptr, "gather_logits gathers shared logits");
  program.append(std::make_unique<GatherBest>(program, *shared.logits));
  program.append(std::make_unique<GatherLogits>(program, *shared.logits));
}

void append_send(Program& program, int in, Channel& channel) {
  program.append(std::make_unique<Transfer>(rows_for(program, in, channel), channel, true));
  program.append(std::make_unique<Sent>(channel));
}

void append_receive(Program& program, Channel& channel, int out) {
  program.append(std::make_unique<Transfer>(rows_for(program, out, channel), channel, false));
  program.append(std::make_unique<Received>(channel));
}

}  // namespace evensong
