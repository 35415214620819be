// One fault each: what the emulator refuses to run, or what a sanitizer finds.
#include <metal_stdlib>
using namespace metal;

kernel void divergent_barrier(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 40) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = i;
}
kernel void barrier_after_return(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 5) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = i;
}
kernel void divergent_simd(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float x = i;
  if (i % 2)
    x = simd_sum(x);
  else
    x = simd_max(x);
  out[i] = x;
}
kernel void too_much_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float memory[9000];
  memory[i] = i;
  out[i] = memory[i];
}
kernel void uninitialised_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float memory[64];
  if (i < 32) memory[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = memory[i];
}
kernel void aliased(const device float* in [[buffer(1)]], device float* out [[buffer(0)]],
                    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i];
}
kernel void unordered_threadgroups(device float* out [[buffer(0)]], uint group [[threadgroup_position_in_grid]]) {
  out[0] = group;
}
// AddressSanitizer
kernel void past_the_buffer(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[i + 1] = i;  // line of past_the_buffer
}
kernel void past_the_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float memory[64];
  memory[i + 1] = i;  // line of past_the_memory
  out[i] = memory[0];
}
// UndefinedBehaviorSanitizer
kernel void shifted_too_far(device int* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = 1 << (i + 1);  // line of shifted_too_far
}
// ThreadSanitizer: no barrier between a write and another thread's read
kernel void lockstep(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float memory[64];
  memory[i] = i;           // line of lockstep
  out[i] = memory[i ^ 1];  // line of lockstep
}
