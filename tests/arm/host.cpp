// Takes the place of the CPU backend in a build of the package for tests: hands every call to the process that
// PAGED_ATTN_ARM starts, the backend of an Arm processor (guest.cpp), by way of its standard input and output. Results
// are merged here: that has no kernel of Arm's own.
#include <fcntl.h>
#include <spawn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "../../paged_decode_cpu/merge.cpp"
#include "backend.h"
#include "wire.h"

extern char** environ;

namespace paged_attn {
namespace {

struct Guest {
  int calls, answers;  // pipes

  Guest() {
    const char* command = std::getenv("PAGED_ATTN_ARM");
    if (!command) throw std::runtime_error("PAGED_ATTN_ARM: expected the command of tests/arm/guest.cpp, got nothing");
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) throw std::runtime_error("no pipe");
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, in[0], 0);
    posix_spawn_file_actions_adddup2(&files, out[1], 1);
    const std::string line = std::string("exec ") + command;
    char shell[] = "sh", option[] = "-c";
    char* arguments[] = {shell, option, const_cast<char*>(line.c_str()), nullptr};
    pid_t child;
    if (posix_spawnp(&child, "sh", &files, nullptr, arguments, environ))
      throw std::runtime_error("cannot start " + line);
    posix_spawn_file_actions_destroy(&files);
    close(in[0]);
    close(out[1]);
    calls = in[1];
    answers = out[0];
  }
};

// The memory of all tensors, without overlaps.
std::vector<Range> ranges_of(Problem p) {
  std::vector<Range> all, ranges;
  each_tensor(p, [&](auto& data, int64_t bytes, bool written) {
    char* begin = const_cast<char*>(reinterpret_cast<const char*>(data));
    if (bytes > 0) all.push_back({begin, bytes, written});
  });
  std::sort(all.begin(), all.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (const Range& r : all) {
    if (ranges.empty() || r.begin >= ranges.back().begin + ranges.back().bytes) {
      ranges.push_back(r);
      continue;
    }
    Range& last = ranges.back();
    last.bytes = std::max<int64_t>(last.bytes, r.begin + r.bytes - last.begin);
    last.written |= r.written;
  }
  return ranges;
}

std::string call(Request request, const Problem& p) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  static const Guest guest;
  const std::vector<Range> ranges = ranges_of(p);
  const Call call = {request, sizeof(Problem), torch::stable::get_num_threads(), int64_t(ranges.size())};
  send(guest.calls, &call, sizeof call);
  send(guest.calls, &p, sizeof p);
  send(guest.calls, ranges.data(), ranges.size() * sizeof(Range));
  for (const Range& r : ranges) send(guest.calls, r.begin, r.bytes);

  Answer answer;
  receive(guest.answers, &answer, sizeof answer);
  std::string text(answer.text_bytes, '\0');
  receive(guest.answers, text.data(), answer.text_bytes);
  if (answer.failed) throw std::runtime_error(text);
  for (const Range& r : ranges)
    if (r.written) receive(guest.answers, r.begin, r.bytes);
  return text;
}

}  // namespace

std::string unsupported_reason(const Problem&) { return ""; }
void run_attention(const Problem& p) { call(Request::kAttend, p); }
std::string explain_attention(const Problem& p) { return call(Request::kExplain, p); }
void run_kv_write(const Problem& p) { call(Request::kWrite, p); }
std::string instruction_set() { return call(Request::kInstructionSet, Problem{}); }

}  // namespace paged_attn
