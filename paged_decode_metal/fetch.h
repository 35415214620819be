// Copies a table of lengths or pages to where the host can read it. Only for PAGED_ATTN_CHECK.
#pragma once

#include "device.h"

[[kernel]] void fetch(constant Arguments& a [[buffer(kArgumentsBuffer)]],
                      const device int* table [[buffer(kTableBuffer)]], device int* copy [[buffer(kCopyBuffer)]],
                      uint index [[thread_position_in_grid]]) {
  if (index < a.total_words) copy[index] = table[index];
}
