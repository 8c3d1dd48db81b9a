#include "program.h"

namespace evensong {

namespace {
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kPage = 4096;
}  // namespace

Program::Program(const Kernels& kernels, const ProgramLimits& limits)
    : kernels_(kernels), limits_(limits), feed_(static_cast<std::size_t>(limits.num_feed_slots), 0) {
  check(limits.max_rows > 0 && limits.max_samples > 0 && limits.max_positions > 0 && limits.num_blocks > 0 &&
            limits.block_size > 0 && limits.num_groups > 0 && limits.num_feed_slots >= 0 && limits.vocab_size > 0,
        "the limits of a program must be positive");
}

int Program::add_buffer(std::int64_t width, DType type, bool sampled_rows) {
  check(width > 0 && width < (std::int64_t{1} << 31), "the width of a buffer must be positive");
  const std::int64_t rows = sampled_rows ? limits_.max_samples : limits_.max_rows;
  const auto size = static_cast<std::int64_t>(size_of(type));
  std::int64_t row = round_up(width * size, kLine);
  // Rows a whole number of pages apart would meet in the same few lines of the first cache.
  if (row % kPage == 0) row += kLine;
  // Kernels may read, not use, a line beyond the last row.
  auto buffer = std::make_unique<Buffer>();
  buffer->width = width;
  buffer->stride = row / size;
  buffer->type = type;
  buffer->memory = Memory(static_cast<std::size_t>(row * rows + kLine));
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

}  // namespace evensong
