#include "links.h"

namespace evensong {

namespace {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kMostWidth = std::int64_t{1} << 31;
constexpr std::int64_t kMostRows = std::int64_t{1} << 24;

void check_memory(const char* data, std::size_t given, std::size_t needed) {
  check(given >= needed, "the memory that ranks share is too small: see `bytes`");
  check(reinterpret_cast<std::uintptr_t>(data) % kLine == 0, "the memory that ranks share is aligned to 64 bytes");
}

void check_sizes(std::int64_t rows, std::int64_t width) {
  check(rows > 0 && rows <= kMostRows && width > 0 && width < kMostWidth, "rows and width must be positive");
}

void check_members(int member, int size) {
  check(size >= 1 && size <= Group::kMostMembers && member >= 0 && member < size, "a group has 1 to 64 members");
}

std::int64_t float_row_bytes(std::int64_t width) { return padded_row_bytes(width, DType::f32); }

}  // namespace

// ---- Group: a line for each member, then [bank][member][max_rows, stride]

Group::Group(char* data, std::size_t given, int member, int size, std::int64_t max_rows, std::int64_t width)
    : data_(data), member_(member), size_(size), max_rows_(max_rows), width_(width) {
  check_members(member, size);
  check_memory(data, given, bytes(size, max_rows, width));
  stride_ = float_row_bytes(width) / 4;
}

std::size_t Group::bytes(int size, std::int64_t max_rows, std::int64_t width) {
  check_members(0, size);
  check_sizes(max_rows, width);
  return static_cast<std::size_t>(size * kLine + 2 * size * max_rows * float_row_bytes(width));
}

char* Group::part(int member, std::uint32_t bank) const {
  return data_ + size_ * kLine + (std::int64_t{bank} * size_ + member) * max_rows_ * stride_ * 4;
}

std::uint32_t Group::exchange(const std::atomic<bool>* cancelled) {
  const std::uint32_t bank = turn() % 2, target = turn() + 1;
  raise_to(arrived(member_), target);
  for (int member = 0; member < size_; ++member)
    wait_for(arrived(member), cancelled, [target](std::uint32_t value) { return reached(value, target); });
  return bank;
}

// ---- LogitsGroup: the reader's line, a line for each member, then [bank][member] Columns, [bank][member][max_samples]
// BestToken, and [bank][max_samples, stride]

LogitsGroup::LogitsGroup(char* data, std::size_t given, int member, int size, std::int64_t num_banks,
                         std::int64_t max_samples, std::int64_t width, int reader)
    : data_(data), member_(member), size_(size), reader_(reader), num_banks_(num_banks), max_samples_(max_samples),
      width_(width) {
  check_members(member, size);
  check_members(reader, size);
  check_memory(data, given, bytes(size, num_banks, max_samples, width));
  stride_ = float_row_bytes(width) / 4;
}

std::size_t LogitsGroup::bytes(int size, std::int64_t num_banks, std::int64_t max_samples, std::int64_t width) {
  check_members(0, size);
  check_sizes(max_samples, width);
  check(num_banks >= 1 && num_banks <= 64, "there are 1 to 64 banks");
  // Kernels may read a line beyond the last row.
  const std::int64_t rows = num_banks * max_samples * float_row_bytes(width) + kLine;
  return logits_begin(size, num_banks, max_samples) + static_cast<std::size_t>(rows);
}

std::size_t LogitsGroup::best_begin(int size, std::int64_t num_banks) {
  return columns_begin(size) + static_cast<std::size_t>(num_banks * size) * sizeof(ColumnsLine);
}

std::size_t LogitsGroup::logits_begin(int size, std::int64_t num_banks, std::int64_t max_samples) {
  const std::int64_t best = round_up(max_samples * static_cast<std::int64_t>(sizeof(BestToken)), kLine);
  return best_begin(size, num_banks) + static_cast<std::size_t>(num_banks * size * best);
}

LogitsGroup::Columns& LogitsGroup::columns(std::int64_t bank, int member) const {
  return reinterpret_cast<ColumnsLine*>(data_ + columns_begin(size_))[bank * size_ + member].columns;
}

BestToken* LogitsGroup::best(std::int64_t bank, int member) const {
  const std::int64_t bytes = round_up(max_samples_ * static_cast<std::int64_t>(sizeof(BestToken)), kLine);
  return reinterpret_cast<BestToken*>(data_ + best_begin(size_, num_banks_) + (bank * size_ + member) * bytes);
}

char* LogitsGroup::logits(std::int64_t bank) const {
  return data_ + logits_begin(size_, num_banks_, max_samples_) + bank * max_samples_ * stride_ * 4;
}

void LogitsGroup::enter(const std::atomic<bool>* cancelled) {
  const std::uint32_t target = turn() + 1;
  if (reads()) return raise_to(entered(), target);
  wait_for(entered(), cancelled, [target](std::uint32_t value) { return reached(value, target); });
}

void LogitsGroup::arrive(const std::atomic<bool>* cancelled) {
  const std::uint32_t target = turn() + 1;
  raise_to(arrived(member_), target);
  if (!reads()) return;
  for (int member = 0; member < size_; ++member)
    wait_for(arrived(member), cancelled, [target](std::uint32_t value) { return reached(value, target); });
}

// ---- Channel: the sender's line, the receiver's, then the places, each a line and [max_rows] rows

Channel::Channel(char* data, std::size_t given, std::int64_t num_places, std::int64_t max_rows, std::int64_t width)
    : data_(data), num_places_(num_places), max_rows_(max_rows), width_(width) {
  check_memory(data, given, bytes(num_places, max_rows, width));
  row_bytes_ = float_row_bytes(width);
}

std::size_t Channel::bytes(std::int64_t num_places, std::int64_t max_rows, std::int64_t width) {
  check(num_places >= 1 && num_places <= 64, "a channel has 1 to 64 places");
  check_sizes(max_rows, width);
  return static_cast<std::size_t>(2 * kLine + num_places * (kLine + max_rows * float_row_bytes(width)));
}

Channel::PlaceHead& Channel::head(std::uint64_t count) const {
  const auto index = static_cast<std::int64_t>(count % static_cast<std::uint64_t>(num_places_));
  return *reinterpret_cast<PlaceHead*>(data_ + 2 * kLine + index * (kLine + max_rows_ * row_bytes_));
}

Channel::Place Channel::place(std::uint64_t count) const {
  PlaceHead& found = head(count);
  return {found.rows, found.step_id, reinterpret_cast<char*>(&found) + kLine, row_bytes_};
}

Channel::Place Channel::next_free(const std::atomic<bool>* cancelled) {
  const auto target = static_cast<std::uint32_t>(sent().count + 1 - static_cast<std::uint64_t>(num_places_));
  wait_for(received().signal, cancelled, [target](std::uint32_t value) { return reached(value, target); });
  return place(sent().count);
}

void Channel::send(std::int64_t rows, std::int64_t step_id) {
  head(sent().count) = {rows, step_id};
  raise_to(sent().signal, static_cast<std::uint32_t>(++sent().count));
}

Channel::Place Channel::next_filled(const std::atomic<bool>* cancelled) {
  const auto target = static_cast<std::uint32_t>(received().count + 1);
  wait_for(sent().signal, cancelled, [target](std::uint32_t value) { return reached(value, target); });
  return place(received().count);
}

void Channel::release() { raise_to(received().signal, static_cast<std::uint32_t>(++received().count)); }

}  // namespace evensong
