// What most Ops have alike: the policy classes of ops_*.h, which say how numbers are held while they are multiplied.
// Each overrides only what is different.
#pragma once

namespace paged_attn {
namespace {

struct OpsDefaults {
  // Where keys and values are laid out first (tile.h)
  static constexpr int kScoreRows = 24;  // rows whose scores are in scratch memory together
  static constexpr int kStepRows = 6;    // rows of one step of the matrix kernel
  static constexpr int kRowStep = 1;     // rows of a kv_head are padded to a multiple of it
  static constexpr int kValueKeys = 1;   // keys of the product with the values are padded to a multiple of it

  static constexpr int kLeftPieces = 1, kRightPieces = 1;  // numbers that one of either side is held as (ops_pieces.h)
  static constexpr bool kDeinterleaves = false;            // whether a chunk has its even elements before its odd ones
  static constexpr bool kTransposesKeys = false;           // whether eight rows take keys that registers transpose
  static constexpr float kUnit = 1.f;                      // what a loaded number is to be multiplied with

  // Who multiplies, if not the vectors of tile.h
  static constexpr bool kNeon = false;     // tile_neon.h
  static constexpr bool kTiles = false;    // Ops itself, where keys are packed
  static constexpr bool kFewRows = false;  // Ops itself, which reads the keys of few rows in place
};

}  // namespace
}  // namespace paged_attn
