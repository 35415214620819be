// What a backend implements, in paged_decode_cpu/paged_decode_cpu.cpp, paged_decode_cuda/backend.cu or
// paged_decode_metal/paged_decode_metal.mm. The build links exactly one, so these are plain functions.
#pragma once

#include <string>

#include "spec/merge.h"
#include "spec/problem.h"

namespace [[gnu::visibility("hidden")]] paged_attn {

// "" when this backend can run the problem, else one sentence with what it supports and what it got.
std::string unsupported_reason(const Problem& problem);

// Appends problem.append (if any), then attends. Throws before the first write when a value that
// the host can see (lengths, page numbers) is wrong.
void run_attention(const Problem& problem);

// How run_attention would run the problem, as JSON: {"route": its name, "why_not": {route: reason, ...} for every route
// that would be tried before it, "plan": {name: number, ...}} (explanation.h makes it). Nothing runs. Throws what
// run_attention would throw of values.
std::string explain_attention(const Problem& problem);

// Writes problem.append (if any) into problem.cache; nothing is attended. Throws what run_attention would throw of
// values.
void run_kv_write(const Problem& problem);

// Merges the parts of a result.
void run_merge(const MergeProblem& problem);

// Sends the part of this GPU to the others, and merges theirs with it. CUDA only.
void run_merge_with_peers(const PeerMergeProblem& problem);

// The instruction set that this process uses on the CPU; "" on other devices.
std::string instruction_set();

}  // namespace paged_attn
