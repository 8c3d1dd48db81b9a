// What the ranks of a replica share: memory in which they hand each other activations, logits and hidden states.
//
// Every structure lies in memory that all concerned processes map, zeros in the beginning. Its counters only grow, and
// who owns one reads from it how far he is: nothing about the course of things is kept beside that memory, so that the
// programs of a process may share an object. One thread of a member waits at a time, between units of a step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common.h"
#include "waiting.h"

namespace evensong {

struct alignas(64) SignalLine {
  Signal signal;
  std::uint64_t count;  // how often it was raised; for its owner
};

// Members that add up what each has computed: every one writes a part, and reads those of all.
//
// There are two banks of parts, in turn: a member writes into one again after it has passed the next exchange, which no
// member reaches before it has read the bank.
class Group {
 public:
  static constexpr int kMostMembers = 64;
  Group(char* data, std::size_t bytes, int member, int size, std::int64_t max_rows, std::int64_t width);

  static std::size_t bytes(int size, std::int64_t max_rows, std::int64_t width);
  int size() const { return size_; }
  std::int64_t max_rows() const { return max_rows_; }
  std::int64_t width() const { return width_; }
  std::int64_t stride() const { return stride_; }  // elements from row to row

  // Where this member writes before its next exchange.
  char* part() const { return part(member_, turn() % 2); }
  char* part(int member, std::uint32_t bank) const;
  // This member's part is written: waits for those of all. Gives the bank that they are in.
  std::uint32_t exchange(const std::atomic<bool>* cancelled);

 private:
  Signal& arrived(int member) const { return reinterpret_cast<SignalLine*>(data_)[member].signal; }
  std::uint32_t turn() const { return arrived(member_).value.load(std::memory_order_relaxed); }

  char* data_;
  int member_, size_;
  std::int64_t max_rows_, width_, stride_;
};

// A row's best token among those of one member; NaN if it has one.
struct BestToken {
  float value;
  std::int32_t token;
};

// Members that write columns of the same logits; one of them, the reader, samples.
class LogitsGroup {
 public:
  LogitsGroup(char* data, std::size_t bytes, int member, int size, std::int64_t num_banks, std::int64_t max_samples,
              std::int64_t width, int reader);

  static std::size_t bytes(int size, std::int64_t num_banks, std::int64_t max_samples, std::int64_t width);
  bool reads() const { return member_ == reader_; }
  int member() const { return member_; }
  int size() const { return size_; }
  std::int64_t num_banks() const { return num_banks_; }
  std::int64_t max_samples() const { return max_samples_; }
  std::int64_t width() const { return width_; }
  std::int64_t stride() const { return stride_; }

  // What a member has left in a bank.
  struct Columns {
    std::uint32_t best_only;  // its best tokens; else its logits
    std::int64_t first, count;
  };
  Columns& columns(std::int64_t bank, int member) const;
  BestToken* best(std::int64_t bank, int member) const;  // [max_samples]
  char* logits(std::int64_t bank) const;

  // Before a member writes: waits until the reader has come so far too, and with it whoever read what it is to replace.
  void enter(const std::atomic<bool>* cancelled);
  // What this member writes is written. The reader waits for all; the others go on.
  void arrive(const std::atomic<bool>* cancelled);

 private:
  struct alignas(64) ColumnsLine {
    Columns columns;
  };
  Signal& line(int index) const { return reinterpret_cast<SignalLine*>(data_)[index].signal; }
  Signal& entered() const { return line(0); }
  Signal& arrived(int member) const { return line(1 + member); }
  std::uint32_t turn() const { return arrived(member_).value.load(std::memory_order_relaxed); }
  static std::size_t columns_begin(int size) { return static_cast<std::size_t>(1 + size) * sizeof(SignalLine); }
  static std::size_t best_begin(int size, std::int64_t num_banks);
  static std::size_t logits_begin(int size, std::int64_t num_banks, std::int64_t max_samples);

  char* data_;
  int member_, size_, reader_;
  std::int64_t num_banks_, max_samples_, width_, stride_;
};

// From one stage to the next: one sender, one receiver, and places for steps that are on the way.
class Channel {
 public:
  Channel(char* data, std::size_t bytes, std::int64_t num_places, std::int64_t max_rows, std::int64_t width);

  static std::size_t bytes(std::int64_t num_places, std::int64_t max_rows, std::int64_t width);
  std::int64_t max_rows() const { return max_rows_; }
  std::int64_t width() const { return width_; }

  struct Place {
    std::int64_t rows, step_id;  // what the sender says of it
    char* data;
    std::int64_t stride;  // bytes from row to row
  };
  // Waits for a place that is free; `send` hands it over.
  Place next_free(const std::atomic<bool>* cancelled);
  void send(std::int64_t rows, std::int64_t step_id);
  // Waits for a place that is filled; `release` gives it back.
  Place next_filled(const std::atomic<bool>* cancelled);
  void release();

 private:
  struct alignas(64) PlaceHead {
    std::int64_t rows, step_id;
  };
  SignalLine& sent() const { return reinterpret_cast<SignalLine*>(data_)[0]; }
  SignalLine& received() const { return reinterpret_cast<SignalLine*>(data_)[1]; }
  PlaceHead& head(std::uint64_t count) const;
  Place place(std::uint64_t count) const;

  char* data_;
  std::int64_t num_places_, max_rows_, width_, row_bytes_;
};

}  // namespace evensong
