// What the host can tell of a call whose lengths it does not read, for the planner.
#pragma once

#include "../plan.h"

namespace paged_attn {

// Softcap or ALiBi, which half of the instances do without.
inline bool all_scores(const Problem& p) { return p.softcap != 0.f || p.alibi_slopes; }

// Products of 8 bits are of e4m3 alone.
bool in_8_bits(const Problem& p);

// Keys and values are widened to float16 in shared memory.
bool widens(const Problem& p);

// ---- Lengths ----

// Whether all requests have nearly as many tokens as the longest.
bool is_even(const Problem& p);

// Whether most requests have far fewer tokens than the longest, as decode steps beside a chunk of a prompt. Then some
// tiles of rows only read, though others compute.
bool is_mixed(const Problem& p);

// Whether requests are prompts with no more keys before them than they have themselves.
bool has_prompts(const Problem& p);

// Whether tiles of rows see few keys, whatever the lengths.
bool has_short_window(const Problem& p);

// ---- Tiles of rows of all requests and kv_heads ----

// At most.
int64_t most_tiles(const Problem& p, int rows);

// If every request is as long as the longest, but never more than there may be. With cu_seqlens_q the latter are about
// one more for every request, and a last round would seem to have few, or many, for tiles that are not there.
int64_t likely_tiles(const Problem& p, int rows);

// Where lengths differ: about half of the last tile of every request is empty.
int64_t usual_tiles(const Problem& p, int rows);

}  // namespace paged_attn
