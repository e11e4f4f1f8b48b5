#include "vtensor/core/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <stdexcept>

#include "vtensor/driver/work_clock.h"
#include "vtensor/util/error.h"
#include "vtensor/util/text.h"

namespace vtensor {
namespace {

constexpr size_t kBufferBytes = 256 * kKiB;

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1e3; }

// 64 bits over the tokens (multiply and fold, as in wyhash): enough to tell the sequences of one
// trace apart.
uint64_t hash_of(std::span<const Token> tokens) {
  uint64_t state = 0x9e3779b97f4a7c15u ^ tokens.size();
  for (const Token token : tokens) {
    const auto product =
        static_cast<unsigned __int128>(state ^ static_cast<uint32_t>(token)) * 0xd1342543de82ef95u;
    state = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    state += 0x9e3779b97f4a7c15u;
  }
  return state;
}

// Only what changed, so that a step without growth stays a short line.
void put_changes(JsonLine& line, const CoreCounters& before, const CoreCounters& after) {
#define X(name, trace_name)                               \
  if (*(trace_name) != '\0' && after.name != before.name) \
    line.put(trace_name, after.name - before.name);
  VTENSOR_COUNTERS(X)
#undef X
}

}  // namespace

TraceWriter::~TraceWriter() {
  try {
    close();
  } catch (const std::exception&) {
    return;
  }
}

void TraceWriter::open(const std::string& path, const JsonLine& header) {
  const std::lock_guard lock(mutex_);
  if (file_ != nullptr) throw std::invalid_argument("a trace is open already: " + path_);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) throw DriverError("open", errno, errno_text(errno), "path=" + path);
  file_ = ::fdopen(fd, "w");
  if (file_ == nullptr) {
    const int code = errno;
    ::close(fd);
    throw DriverError("fdopen", code, errno_text(code), "path=" + path);
  }
  path_ = path;
  error_ = 0;
  num_lines_ = 0;
  numbers_.clear();
  start_ns_ = steady_now_ns();
  JsonLine first;
  first.put("format", kTraceFormat).put("version", kTraceVersion).raw("manager", header.text());
  append(first.text());
  flush();
  is_open_ = true;
}

void TraceWriter::close() {
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr) return;
  is_open_ = false;
  JsonLine last;
  last.put("k", "end").put("lines", num_lines_ - 1).put("t", since_open_us(steady_now_ns()));
  append(last.text());
  flush();
  if (std::fclose(file_) != 0 && error_ == 0) error_ = errno;
  file_ = nullptr;
  if (error_ != 0) {
    throw DriverError("write", error_, errno_text(error_), "path=" + path_,
                      "the trace is incomplete");
  }
}

void TraceWriter::append(const std::string& line) {
  if (error_ != 0) return;
  buffer_ += line;
  buffer_ += '\n';
  ++num_lines_;
  if (buffer_.size() >= kBufferBytes) flush();
}

void TraceWriter::flush() {
  if (error_ == 0 && (std::fwrite(buffer_.data(), 1, buffer_.size(), file_) != buffer_.size() ||
                      std::fflush(file_) != 0)) {
    error_ = errno != 0 ? errno : EIO;
  }
  buffer_.clear();
}

void TraceWriter::write(const JsonLine& line) noexcept {
  try {
    const std::string text = line.text();
    const std::lock_guard lock(mutex_);
    if (file_ != nullptr) append(text);
  } catch (const std::exception&) {
    error_ = ENOMEM;
  }
}

void TraceWriter::write_call(const DriverCall& call) noexcept {
  try {
    JsonLine line;
    line.put("k", "call").put("call", call_name(call.kind));
    line.put("t", since_open_us(call.start_ns)).put("us", microseconds(call.duration_ns));
    line.put("bytes", call.size_bytes);
    if (CallScope::vtensor() != kNoVTensor) line.put("v", CallScope::vtensor());
    if (CallScope::is_worker()) line.put("worker", true);
    if (!call.ok) line.put("failed", true);
    write(line);
  } catch (const std::exception&) {
    error_ = ENOMEM;
  }
}

uint64_t TraceWriter::number_of(std::span<const Token> tokens) noexcept {
  try {
    const uint64_t hash = hash_of(tokens);
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = numbers_.try_emplace(hash, numbers_.size());
    if (is_new && file_ != nullptr) {
      append(JsonLine().put("k", "tokens").put("n", known->second).put("ids", tokens).text());
    }
    return known->second;
  } catch (const std::exception&) {
    error_ = ENOMEM;
    return 0;
  }
}

double TraceWriter::since_open_us(int64_t now_ns) const noexcept {
  return microseconds(now_ns - start_ns_);
}

TraceOp::Record::Record(TraceWriter& to, const CoreState& of, std::string_view name,
                        VTensorId vtensor)
    : writer(to),
      state(of),
      before(of.counters),
      start_ns(work_now_ns()),
      num_exceptions(std::uncaught_exceptions()),
      scope(vtensor) {
  line.put("k", "op").put("op", name);
  line.put("t", writer.since_open_us(start_ns));
  if (vtensor != kNoVTensor) line.put("id", vtensor);
}

void TraceOp::begin(TraceWriter& writer, const CoreState& state, std::string_view name,
                    VTensorId vtensor) {
  record_.emplace(writer, state, name, vtensor);
}

void TraceOp::end() noexcept {
  Record& record = *record_;
  try {
    JsonLine& line = record.line;
    line.put("us", microseconds(work_now_ns() - record.start_ns));
    put_changes(line, record.before, record.state.counters);
    line.put("created", record.state.pool.pset.num_created());
    if (CallScope::is_worker()) line.put("worker", true);
    if (std::uncaught_exceptions() > record.num_exceptions) line.put("failed", true);
    record.writer.write(line);
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace vtensor
