// What explain_attention (backend.h) says: which route a call takes, why none before it, and the numbers of its plan.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace [[gnu::visibility("hidden")]] paged_attn {

struct Explanation {
  std::string route;
  std::vector<std::pair<std::string, std::string>> why_not;  // routes tried before, in their order
  std::vector<std::pair<std::string, int64_t>> plan;

  std::string json() const {
    std::string text = "{\"route\": " + quoted(route) + ", \"why_not\": {";
    for (const auto& [name, reason] : why_not) text += separator(text) + quoted(name) + ": " + quoted(reason);
    text += "}, \"plan\": {";
    for (const auto& [name, number] : plan) text += separator(text) + quoted(name) + ": " + std::to_string(number);
    return text + "}}";
  }

 private:
  static std::string separator(const std::string& text) { return text.back() == '{' ? "" : ", "; }

  // Names and reasons are plain sentences of our own: only quotation marks and backslashes could break the text.
  static std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (char c : text) result += (c == '"' || c == '\\' ? std::string("\\") : std::string()) + c;
    return result + "\"";
  }
};

}  // namespace paged_attn
