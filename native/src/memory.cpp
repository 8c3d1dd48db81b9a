#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "common.h"

namespace evensong {

namespace {
#ifdef EVENSONG_SANITIZE
constexpr std::int64_t kLine = 64;
#else
constexpr std::size_t kHugePage = std::size_t{2} << 20;
#endif
}

Memory::Memory(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
#ifdef EVENSONG_SANITIZE
  data_ = static_cast<char*>(std::aligned_alloc(kLine, static_cast<std::size_t>(round_up(static_cast<std::int64_t>(bytes), kLine))));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, bytes);
#else
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(memory);
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
#endif
}

Memory::~Memory() {
#ifdef EVENSONG_SANITIZE
  std::free(data_);
#else
  if (data_ != nullptr) munmap(data_, size_);
#endif
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace evensong
