#include "vtensor/util/json_line.h"

#include <charconv>
#include <cstdio>

namespace vtensor {

void JsonLine::begin(std::string_view key) {
  text_ += text_.empty() ? '{' : ',';
  text_.append(1, '"').append(key).append("\":");
}

void JsonLine::quote(std::string_view text) {
  text_ += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      text_.append(1, '\\').append(1, c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[7];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      text_ += escaped;
    } else {
      text_ += c;
    }
  }
  text_ += '"';
}

JsonLine& JsonLine::put(std::string_view key, std::string_view text) {
  begin(key);
  quote(text);
  return *this;
}

JsonLine& JsonLine::put(std::string_view key, double value) {
  char digits[400];  // enough for every double
  const auto [end, error] =
      std::to_chars(digits, digits + sizeof(digits), value, std::chars_format::fixed, 3);
  return raw(key, std::string_view(digits, end));
}

JsonLine& JsonLine::put(std::string_view key, bool value) {
  return raw(key, value ? "true" : "false");
}

JsonLine& JsonLine::raw(std::string_view key, std::string_view json) {
  begin(key);
  text_ += json;
  return *this;
}

}  // namespace vtensor
