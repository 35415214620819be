// What Apple's compiler rejects and C++ alone would not; every line with a fault says so.
#include <metal_stdlib>
using namespace metal;
inline void set(float* p) { p[0] = 1; }  // fault
kernel void f(device float4* a [[buffer(0)]], device bfloat* b [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  threadgroup float4 shared[32];
  shared[i] = a[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device float4* wrong = shared;  // fault
  thread float* first = (thread float*)0;
  first = (device float*)a;  // fault
  double d = 1.0;            // fault
  b[i] = exp(b[i]);          // fault
  int half = 2;              // fault
  half4 h = half4(float4(1.0f));
  float4 f = h;  // fault
  a[i] = float4(f.x) * float(d);
}
namespace inner {
template <int kValue>
[[kernel]] void fill(device int* out [[buffer(0)]]) {
  out[0] = kValue;
}
}  // namespace inner
using namespace inner;
template [[host_name("fill_1")]] [[kernel]] decltype(fill<1>) fill<1>;  // fault
