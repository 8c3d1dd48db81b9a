#include "program.h"

#include <cstring>

namespace evensong {

namespace {
constexpr std::int64_t kLine = 64;
}

Program::Program(const Kernels& kernels, const ProgramLimits& limits, char* feed, std::size_t feed_bytes)
    : kernels_(kernels), limits_(limits), copies_(limits.block_size) {
  check(limits.max_rows > 0 && limits.max_samples > 0 && limits.max_positions > 0 && limits.num_blocks > 0 &&
            limits.block_size > 0 && limits.num_groups > 0 && limits.num_feed_slots >= 0 && limits.vocab_size > 0 &&
            limits.num_banks > 0 && limits.num_banks <= 64,
        "the limits of a program must be positive");
  feed_ = feed == nullptr ? std::make_unique<FeedTable>(limits.num_feed_slots)
                          : std::make_unique<FeedTable>(feed, feed_bytes, limits.num_feed_slots);
  banks_.resize(static_cast<std::size_t>(limits.num_banks));
}

int Program::add_buffer(std::int64_t width, DType type, bool sampled_rows) {
  check(width > 0 && width < (std::int64_t{1} << 31), "the width of a buffer must be positive");
  const std::int64_t row = padded_row_bytes(width, type);
  auto buffer = std::make_unique<Buffer>();
  buffer->width = width;
  buffer->stride = row / static_cast<std::int64_t>(size_of(type));
  buffer->type = type;
  buffer->rows = sampled_rows ? limits_.max_samples : limits_.max_rows;
  buffer->banks = sampled_rows ? limits_.num_banks : 1;
  // Kernels may read, not use, a line beyond the last row.
  buffer->memory = Memory(static_cast<std::size_t>(row * buffer->rows * buffer->banks + kLine));
  buffer->base = buffer->memory.data();
  return add(std::move(buffer));
}

int Program::add_exchange(Group& group) {
  check(group.max_rows() >= limits_.max_rows, "a group has room for fewer rows than a step may have");
  auto buffer = std::make_unique<Buffer>();
  buffer->width = group.width();
  buffer->stride = group.stride();
  buffer->type = DType::f32;
  buffer->rows = limits_.max_rows;
  buffer->group = &group;
  return add(std::move(buffer));
}

int Program::add_shared_logits(LogitsGroup& group) {
  check(group.max_samples() == limits_.max_samples && group.num_banks() == limits_.num_banks,
        "shared logits have as many rows and banks as the program");
  auto buffer = std::make_unique<Buffer>();
  buffer->width = group.width();
  buffer->stride = group.stride();
  buffer->type = DType::f32;
  buffer->rows = limits_.max_samples;
  buffer->banks = limits_.num_banks;
  buffer->base = group.logits(0);
  buffer->logits = &group;
  return add(std::move(buffer));
}

int Program::add(std::unique_ptr<Buffer> buffer) {
  buffers_.push_back(std::move(buffer));
  return static_cast<int>(buffers_.size()) - 1;
}

const Buffer& Program::buffer(int index) const {
  check(index >= 0 && static_cast<std::size_t>(index) < buffers_.size(), "no such buffer");
  return *buffers_[static_cast<std::size_t>(index)];
}

const Buffer& Program::buffer(int index, std::int64_t width, DType type) const {
  const Buffer& found = buffer(index);
  check(found.width == width, "a buffer has another width than the op needs");
  check(found.type == type, "a buffer has another type than the op needs");
  return found;
}

void BlockCopies::add(const LayerCache& cache) {
  auto* data = static_cast<char*>(cache.data);
  for (const Array& known : arrays_)
    if (known.data == data) return;
  const auto elements = static_cast<std::size_t>(block_size_ * 2 * cache.num_kv_heads * cache.head_dim);
  arrays_.push_back({data, elements * size_of(cache.type)});
}

std::int64_t BlockCopies::begin(const Step& step) {
  return step.copies.empty() ? 0 : static_cast<std::int64_t>(arrays_.size());
}

void BlockCopies::run(Step& step, std::int64_t unit, Scratch) {
  const Array& array = arrays_[static_cast<std::size_t>(unit)];
  for (std::size_t i = 0; i < step.copies.size(); i += 2) {
    char* from = array.data + static_cast<std::size_t>(step.copies[i]) * array.block_bytes;
    char* to = array.data + static_cast<std::size_t>(step.copies[i + 1]) * array.block_bytes;
    if (from != to) std::memcpy(to, from, array.block_bytes);
  }
}

}  // namespace evensong
