// The CPU backend as a program without torch: reads calls from standard input, runs them, writes the answers.
// Memory that a tensor does not cover is not there: reading past the end of one ends the process.
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "wire.h"

namespace paged_attn {
namespace {

int64_t threads = 1;

// A range of the sender, here. It ends where a page ends, and the next page cannot be read.
struct Copy {
  Range range;
  char *pages, *data;
  int64_t page_bytes;

  explicit Copy(const Range& r) : range(r) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    page_bytes = (r.bytes + page - 1) / page * page + page;
    void* memory = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    pages = static_cast<char*>(memory);
    mprotect(pages + page_bytes - page, page, PROT_NONE);
    data = pages + page_bytes - page - r.bytes;
    receive(0, data, r.bytes);
  }
  ~Copy() { munmap(pages, page_bytes); }
  Copy(const Copy&) = delete;
};

void relocate(Problem& p, const std::vector<std::unique_ptr<Copy>>& copies) {
  each_tensor(p, [&](auto& data, int64_t, bool) {
    const char* there = reinterpret_cast<const char*>(data);
    for (const auto& copy : copies) {
      const Range& r = copy->range;
      if (there < r.begin || there >= r.begin + r.bytes) continue;
      data = reinterpret_cast<std::remove_reference_t<decltype(data)>>(copy->data + (there - r.begin));
      return;
    }
  });
}

std::string run(Request request, const Problem& p) {
  switch (request) {
    case Request::kAttend: return run_attention(p), "";
    case Request::kExplain: return explain_attention(p);
    case Request::kWrite: return run_kv_write(p), "";
    case Request::kInstructionSet: return instruction_set();
  }
  throw std::runtime_error("an unknown request");
}

void serve(const Call& call) {
  if (call.problem_bytes != sizeof(Problem)) throw std::runtime_error("the two sides know different problems");
  Problem p;
  receive(0, &p, sizeof p);
  std::vector<Range> ranges(call.ranges);
  receive(0, ranges.data(), ranges.size() * sizeof(Range));
  std::vector<std::unique_ptr<Copy>> copies;
  for (const Range& r : ranges) copies.push_back(std::make_unique<Copy>(r));
  relocate(p, copies);
  threads = call.threads;

  Answer answer = {};
  std::string text;
  try {
    text = run(call.request, p);
  } catch (const std::exception& error) {
    answer.failed = 1;
    text = error.what();
  }
  answer.text_bytes = text.size();
  send(1, &answer, sizeof answer);
  send(1, text.data(), answer.text_bytes);
  if (answer.failed) return;
  for (const auto& copy : copies)
    if (copy->range.written) send(1, copy->data, copy->range.bytes);
}

}  // namespace
}  // namespace paged_attn

namespace torch::stable {
uint32_t get_num_threads() { return paged_attn::threads; }
}  // namespace torch::stable

int main() {
  paged_attn::Call call;
  while (read(0, &call, sizeof call) == sizeof call) paged_attn::serve(call);
}
