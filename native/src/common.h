// Types and checks that every file of the extension shares. Free of instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace evensong {

using bf16 = std::uint16_t;  // the upper half of a float's bits

enum class DType : std::uint8_t { f32, bf16 };

inline std::size_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// Raises std::invalid_argument, which Python sees as ValueError.
inline void check(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Bytes from row to row where rows of `width` elements lie together: whole lines, and never a whole number of pages, which
// would meet in the same few lines of the first cache.
inline std::int64_t padded_row_bytes(std::int64_t width, DType type) {
  constexpr std::int64_t kLine = 64, kPage = 4096;
  const std::int64_t bytes = round_up(width * static_cast<std::int64_t>(size_of(type)), kLine);
  return bytes % kPage == 0 ? bytes + kLine : bytes;
}

// Zeros, in pages that nobody has touched; in huge pages where there are many and the system has them. A build with
// sanitizers takes exactly the bytes that were asked for, so that it sees what reaches beyond.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace evensong
