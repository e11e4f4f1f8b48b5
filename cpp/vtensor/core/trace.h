// TraceWriter: what a manager does, as JSON lines in a file; TraceOp: one operation among them.
//
//   {"format":"flexinfer-trace","version":1,...}    the manager's configuration
//   {"k":"tokens",...} {"k":"op",...} {"k":"call",...} {"k":"label",...}      docs/tracing.md
//   {"k":"end","lines":N,...}                       without it the file was cut off
//
// Thread-safety: TraceWriter full; operations come in the order of the manager's mutex, driver
// calls as they end. A TraceOp belongs to one thread, which holds the manager's mutex at its ends.
//
// Cost while no file is open: a relaxed load and a branch. A file that cannot be written to never
// disturbs what it watches: the rest is dropped and close() says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "vtensor/core/core_state.h"
#include "vtensor/driver/call_scope.h"
#include "vtensor/driver/driver_call.h"
#include "vtensor/util/json_line.h"

namespace vtensor {

inline constexpr std::string_view kTraceFormat = "flexinfer-trace";
inline constexpr int kTraceVersion = 1;

class TraceWriter {
 public:
  TraceWriter() = default;
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // Replaces the file at `path`; `header` follows format and version. Throws DriverError when the
  // file cannot be made, std::invalid_argument while one is open.
  void open(const std::string& path, const JsonLine& header);
  bool is_open() const noexcept { return is_open_.load(std::memory_order_relaxed); }
  const std::atomic<bool>& open_flag() const noexcept { return is_open_; }
  // Writes the end. Throws DriverError when something could not be written. Without a file:
  // nothing.
  void close();

  void write(const JsonLine& line) noexcept;
  // One driver call, with the CallScope of this thread.
  void write_call(const DriverCall& call) noexcept;
  // The number by which lines name these tokens; their own line is written at the first sight.
  uint64_t number_of(std::span<const Token> tokens) noexcept;
  // Microseconds since open().
  double since_open_us(int64_t now_ns) const noexcept;

 private:
  void append(const std::string& line);
  void flush();

  std::atomic<bool> is_open_{false};
  std::atomic<int64_t> start_ns_{0};
  std::mutex mutex_;  // guards all below
  std::FILE* file_ = nullptr;
  std::string path_;
  std::string buffer_;
  size_t num_lines_ = 0;
  std::atomic<int> error_{0};                       // errno of the first write that failed
  std::unordered_map<uint64_t, uint64_t> numbers_;  // hash of tokens -> number
};

// Measures one operation and writes it when it ends, with the changes of the counters. With no file
// open it does nothing.
class TraceOp {
 public:
  TraceOp(TraceWriter& writer, const CoreState& state, std::string_view name,
          VTensorId vtensor = kNoVTensor) {
    if (writer.is_open()) [[unlikely]]
      begin(writer, state, name, vtensor);
  }
  ~TraceOp() {
    if (record_) [[unlikely]]
      end();
  }
  TraceOp(const TraceOp&) = delete;
  TraceOp& operator=(const TraceOp&) = delete;

  template <typename Value>
  TraceOp& put(std::string_view key, const Value& value) {
    if (record_) [[unlikely]]
      record_->line.put(key, value);
    return *this;
  }
  TraceOp& tokens(std::span<const Token> tokens) {
    if (record_) [[unlikely]]
      record_->line.put("tokens", record_->writer.number_of(tokens));
    return *this;
  }
  // Counts from here: others may have held the mutex since the start.
  void restart_counters() {
    if (record_) [[unlikely]]
      record_->before = record_->state.counters;
  }

 private:
  struct Record {
    TraceWriter& writer;
    const CoreState& state;
    CoreCounters before;
    int64_t start_ns;
    int num_exceptions;
    CallScope scope;
    JsonLine line;

    Record(TraceWriter& to, const CoreState& of, std::string_view name, VTensorId vtensor);
  };

  void begin(TraceWriter& writer, const CoreState& state, std::string_view name, VTensorId vtensor);
  void end() noexcept;

  std::optional<Record> record_;
};

}  // namespace vtensor
