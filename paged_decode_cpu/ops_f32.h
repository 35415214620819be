// How numbers are held while they are multiplied: as float32, whatever is stored in the cache.
#pragma once

#include "vec.h"

namespace paged_attn {
namespace {

template <DType kCacheType>
struct OpsF32 {
  using Elem = float;  // a query element or a probability in scratch memory
  using Reg = f32v;
  static constexpr int kDepth = 1;       // elements that one 32-bit lane multiplies at once
  static constexpr int kRegs = 1;        // registers that one load of a cache row fills
  static constexpr int kChunk = kLanes;  // elements of a row that one load reads
  static constexpr int kBytes = dtype_bytes(kCacheType);
  static constexpr int kMaxDotRows = 4;                          // rows that share what is loaded
  static constexpr int kMinPackedRows = kLanes == 16 ? 24 : 12;  // from here on laying out keys and values pays
  static constexpr int kScoreRows = 24;                          // rows whose scores are at hand together then
  static constexpr int kStepRows = 6;                            // rows of one step of the matrix kernel
  static constexpr int kRowStep = 1;                             // rows of a kv_head are filled to a multiple of it
  static constexpr int kValueKeys = 1;                           // and the keys that the values' product takes
  static constexpr int kLeftPieces = 1, kRightPieces = 1;        // numbers that one of the left or right is held as
  static constexpr bool kTiles = false;                          // whether Ops attends to packed keys in its own way
  static constexpr bool kFewRows = false;                        // whether those tiles read keys in place, for few rows
  static constexpr bool kNeon = false;                           // whether tile_neon.h multiplies
  static constexpr float kUnit = 1.f;                            // what a loaded number is to be multiplied with

  static f32v dot(f32v acc, Reg a, Reg b) { return acc + a * b; }
  static Reg broadcast(const Elem* p) { return splat(*p); }
  static Reg load_elems(const Elem* p) { return load<DType::kFloat32>(p); }
  static void store_elems(Elem* p, f32v x) { store<DType::kFloat32>(p, x); }

  static void load_keys(const char* row, Reg* r) { r[0] = load<kCacheType>(row); }
  static void load_keys_tail(const char* row, int64_t n, Reg* r) { r[0] = load_tail<kCacheType>(row, n); }

  // Values of kDepth keys, lane by lane, so that one dot() adds them weighted by kDepth probabilities.
  static void load_values(const char* const* rows, int64_t offset, Reg* r) {
    r[0] = load<kCacheType>(rows[0] + offset);
  }
  static void load_values_tail(const char* const* rows, int64_t offset, int64_t n, Reg* r) {
    r[0] = load_tail<kCacheType>(rows[0] + offset, n);
  }

  // The kRegs registers of a chunk of accumulators, in the order of the elements.
  static void in_order(f32v*) {}
};

}  // namespace
}  // namespace paged_attn
