// A float16 number as the sum of two bfloat16 numbers, for a matrix unit that multiplies nothing larger: the first 8 of
// its 11 bits, and the other 3. The sum is exact. A product of two sums is the sum of the products of their
// pieces,
//
//   (a0 + a1)(b0 + b1) = a0 b0 + a0 b1 + a1 b0 + a1 b1
//
// An infinity has no second piece (inf - inf is NaN); attend_again repairs what becomes of it.
#pragma once

#include "ops_pairs.h"

namespace paged_attn {
namespace {

// As how many numbers of type `elem` one of type `type` is held.
constexpr int pieces_of(DType type, DType elem) { return type == DType::kFloat16 && elem != type ? 2 : 1; }

// x without the bits that bfloat16 has no room for.
inline f32v first_piece(f32v x) { return bit_cast<f32v>(bit_cast<u32v>(x) & 0xffff0000u); }

// How one piece of a float16 cache is read while keys and values are packed.
template <int kPiece>
struct PieceOps : OpsBf16<DType::kBFloat16> {
  static constexpr DType kCacheType = DType::kFloat16;
  static constexpr int kBytes = dtype_bytes(kCacheType);

  static f32v piece(f32v x) { return kPiece == 0 ? first_piece(x) : x - first_piece(x); }
  static Reg read(const char* row) {
    return narrowed(piece(load<kCacheType>(row)), piece(load<kCacheType>(row + kLanes * kBytes)));
  }
  static Reg read_tail(const char* row, int64_t n) {
    char padded[kChunk * kBytes] = {};
    memcpy(padded, row, n * kBytes);
    return read(padded);
  }

  static void load_keys(const char* row, Reg* r) { r[0] = read(row); }
  static void load_keys_tail(const char* row, int64_t n, Reg* r) { r[0] = read_tail(row, n); }
  static void load_values(const char* const* rows, int64_t offset, Reg* r) {
    interleave(read(rows[0] + offset), read(rows[1] + offset), r);
  }
  static void load_values_tail(const char* const* rows, int64_t offset, int64_t n, Reg* r) {
    interleave(read_tail(rows[0] + offset, n), read_tail(rows[1] + offset, n), r);
  }
};

template <DType kElem, DType kCacheType, int kPiece>
struct OpsOfPiece {
  using type = OpsPairs<kElem, kCacheType>;
};
template <int kPiece>
struct OpsOfPiece<DType::kBFloat16, DType::kFloat16, kPiece> {
  using type = PieceOps<kPiece>;
};

// Which pieces of the left and of the right are multiplied. The product of two second pieces is 2^-16 of that of the
// first ones; only with kSmallest it is among them.
template <int kLeft, int kRight, bool kSmallest>
struct PieceProducts {
  int count = 0;
  int left[kLeft * kRight] = {}, right[kLeft * kRight] = {};

  constexpr PieceProducts() {
    if (kLeft == 2) {
      if (kRight == 2 && kSmallest) add(1, 1);
      add(1, 0);
    }
    add(0, 0);
    if (kRight == 2) add(0, 1);
  }

 private:
  constexpr void add(int i, int j) {
    left[count] = i;
    right[count] = j;
    ++count;
  }
};

}  // namespace
}  // namespace paged_attn
