// The sizes of an instance with what only the device knows: the number type, and where pieces lie in shared memory.
#pragma once

#include "../ptx.cuh"
#include "sizes.h"

namespace paged_attn {

template <typename Kv, int kHeadDim, int kRowTiles>
struct DecodeShape : DecodeSizes<Kv::kBytes, kHeadDim, kRowTiles> {
  using DecodeSizes<Kv::kBytes, kHeadDim, kRowTiles>::kPieces;
  static constexpr bool kBf16 = IsBf16<Kv>::value;
  static constexpr bool kFp8 = Kv::kBytes == 1;
  static constexpr bool kFp32 = Kv::kBytes == 4;
  static constexpr int kOutputBytes = kFp32 ? 4 : 2;

  // Who takes part in the end of a segment.
  static constexpr bool kCallsNothing = false;
  static PD_MEMBER int end_threads() { return blockDim.x; }
  static PD_MEMBER void end_sync() { __syncthreads(); }

  // Places of pieces in a row of shared memory, such that the 8 lanes that read at a time find them in different banks:
  // of keys, 4 pieces of rows g and g + 1; of values, 2 pieces of rows 2t. Rows of 64 bytes have too few for that.
  static PD_MEMBER int place_k(int row, int piece) { return kPieces < 8 ? piece : piece ^ (row % 2 * 4); }
  static PD_MEMBER int place_v(int row, int piece) { return kPieces < 8 ? piece : piece ^ (row / 2 % 4 * 2); }

  // The same for the pieces that lane (g, t) reads, with what is known when it is compiled apart: chunk * 4 + t of the
  // key of row g, and chunk * 8 + g of the values of row 2t.
  static PD_MEMBER int lane_place_k(int g, int t, int chunk) {
    return kPieces < 8 ? chunk * 4 + t : (chunk % 2 * 4 ^ g % 2 * 4) + t + chunk / 2 * 8;
  }
  static PD_MEMBER int lane_place_v(int g, int t, int chunk) { return (g ^ t * 2) + chunk * 8; }
};

}  // namespace paged_attn
