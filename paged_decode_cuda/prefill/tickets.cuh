// The counter that all blocks share: whoever takes a ticket takes the tile of rows with that number.
#pragma once

#include "../hopper.cuh"

namespace paged_attn {

// The word that is counted up must be zero before, and nobody clears it before a launch: the first block writes it
// together with a number of this launch, the one that takes the last ticket clears it.
PD_DEVICE unsigned ticket_tag() { return static_cast<unsigned>(launch_number() >> 32) | 1u; }

PD_DEVICE void open_tickets(unsigned long long* tickets) {
  const unsigned long long word = static_cast<unsigned long long>(ticket_tag()) << 32;
  store_relaxed(tickets, word);
}

PD_DEVICE void await_tickets(const unsigned long long* tickets) {
  unsigned long long word;
  do {
    word = load_relaxed(tickets);
  } while (static_cast<unsigned>(word >> 32) != ticket_tag());
}

// Takes a ticket, after await_tickets().
PD_DEVICE unsigned next_ticket(unsigned long long* tickets) { return static_cast<unsigned>(atomicAdd(tickets, 1ull)); }

PD_DEVICE void close_tickets(unsigned long long* tickets) { store_relaxed(tickets, 0); }

}  // namespace paged_attn
