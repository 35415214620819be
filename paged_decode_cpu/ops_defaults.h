// What most of the ways to hold numbers (ops_*.h) have alike. Each names only what is different.
#pragma once

namespace paged_attn {
namespace {

struct OpsDefaults {
  // Where keys and values are laid out first (tile.h)
  static constexpr int kScoreRows = 24;  // rows whose scores are at hand together
  static constexpr int kStepRows = 6;    // rows of one step of the matrix kernel
  static constexpr int kRowStep = 1;     // rows of a kv_head are filled to a multiple of it
  static constexpr int kValueKeys = 1;   // and the keys that the values' product takes

  static constexpr int kLeftPieces = 1, kRightPieces = 1;  // numbers that one of the left or right is held as
  static constexpr bool kDealt = false;                    // whether a chunk has its even elements before its odd ones
  static constexpr bool kTransposesKeys = false;           // whether eight rows take keys that registers transpose
  static constexpr float kUnit = 1.f;                      // what a loaded number is to be multiplied with

  // Who multiplies, if not the vectors of tile.h
  static constexpr bool kNeon = false;     // tile_neon.h
  static constexpr bool kTiles = false;    // Ops itself, where keys are packed
  static constexpr bool kFewRows = false;  // Ops itself, which reads the keys of few rows in place
};

}  // namespace
}  // namespace paged_attn
