// What kernels use of the language, each in a few lines: the emulator's own test.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

constant bool add_bias [[function_constant(0)]];
constant int factor [[function_constant(1)]];
constant bool doubled = factor == 2 && !add_bias;

struct Shape {
  uint width;
  float scale;
};

// Row i of out is what function i gives each lane.
kernel void simd_functions(const device float* in [[buffer(0)]], device float* out [[buffer(1)]],
                           uint lane [[thread_index_in_simdgroup]]) {
  const float x = in[lane];
  out[lane] = simd_sum(x);
  out[32 + lane] = simd_max(x);
  out[64 + lane] = simd_shuffle(x, ushort(31 - lane));
  out[96 + lane] = simd_shuffle_xor(x, 5);
  out[128 + lane] = simd_shuffle_down(x, 3);
  out[160 + lane] = simd_broadcast(x, 7);
  out[192 + lane] = simd_prefix_exclusive_sum(x);
  if (lane >= 16) out[224 + lane] = simd_min(x);  // of the lanes that take part
}

kernel void function_constants(device int* out [[buffer(0)]],
                               const device int* bias [[buffer(1), function_constant(add_bias)]],
                               constant Shape& shape [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
  const uint i = at.y * shape.width + at.x;
  out[i] = int(i) * factor + (doubled ? 1000 : 0);
  if (add_bias) out[i] += bias[i];
}

template <typename T, int N>
[[kernel]] void reversed(const device T* in [[buffer(0)]], device T* out [[buffer(1)]],
                         threadgroup T* dynamic [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]],
                         uint group [[threadgroup_position_in_grid]]) {
  threadgroup T fixed[N];
  fixed[i] = in[group * N + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  dynamic[i] = fixed[N - 1 - i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[group * N + i] = dynamic[i];
}
template [[host_name("reversed_float_96")]] [[kernel]] decltype(reversed<float, 96>) reversed<float, 96>;
template [[host_name("reversed_bfloat_64")]] [[kernel]] decltype(reversed<bfloat, 64>) reversed<bfloat, 64>;

kernel void vectors(const device half4* in [[buffer(0)]], device float4* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  const float4 x = float4(in[i]);
  out[3 * i] = x.wzyx * 2.0f + float4(x.xy, 1.0f, -1.0f);
  out[3 * i + 1] = select(x, float4(0.0f), x < 0.0f);
  out[3 * i + 2] = float4(as_type<float>(as_type<uint>(x.x)), dot(x, x), fma(x.y, x.z, x.w), max(x.x, x.y));
}

// 16 x 16 products of two tiles, the second transposed
kernel void matrices(const device half* a [[buffer(0)]], const device half* b [[buffer(1)]],
                     device float* out [[buffer(2)]], constant uint& depth [[buffer(3)]],
                     uint tile [[simdgroup_index_in_threadgroup]]) {
  const uint row = tile / 2 * 8, column = tile % 2 * 8;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < depth; k += 8) {
    simdgroup_matrix<half, 8, 8> left, right;
    simdgroup_load(left, a + row * depth + k, depth);
    simdgroup_load(right, b + column * depth + k, depth, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
  }
  simdgroup_store(sum, out + row * 16 + column, 16);
}

kernel void histogram(const device uint* in [[buffer(0)]], device atomic_uint* bins [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(bins + in[i] % 4, 1u, memory_order_relaxed);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void small_threadgroups(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = 1;
}

namespace outer {
namespace inner {
[[kernel]] void in_a_namespace(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = 1; }
}  // namespace inner
[[host_name("named_for_the_host")]] [[kernel]] void another(device float* out [[buffer(0)]],
                                                            uint i [[thread_position_in_grid]]) {
  out[i] = 2;
}
}  // namespace outer
