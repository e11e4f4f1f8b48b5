// JsonLine: one JSON object on one line, written from front to back. No nesting but through raw().
//
// Thread-safety: none; a value. Strings are taken as UTF-8; control characters are escaped, so that
// a line stays a line.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace vtensor {

class JsonLine {
 public:
  JsonLine& put(std::string_view key, std::string_view text);
  JsonLine& put(std::string_view key, const char* text) { return put(key, std::string_view(text)); }
  JsonLine& put(std::string_view key, double value);  // three decimals
  JsonLine& put(std::string_view key, bool value);
  template <std::integral Int>
  JsonLine& put(std::string_view key, Int value) {
    return raw(key, std::to_string(value));
  }
  template <std::integral Int>
  JsonLine& put(std::string_view key, std::span<const Int> values) {
    begin(key);
    text_ += '[';
    for (const Int value : values) text_.append(std::to_string(value)).append(1, ',');
    if (values.empty()) {
      text_ += ']';
    } else {
      text_.back() = ']';
    }
    return *this;
  }
  // `json` is a JSON value already.
  JsonLine& raw(std::string_view key, std::string_view json);

  // The object, without a line end.
  std::string text() const { return (text_.empty() ? "{" : text_) + "}"; }

 private:
  void begin(std::string_view key);
  void quote(std::string_view text);

  std::string text_;
};

}  // namespace vtensor
