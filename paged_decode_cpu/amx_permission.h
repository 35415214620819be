// Whether this process may use the matrix unit of an Intel processor (AMX): Linux saves 8 KiB more per thread from the
// first use on, and wants to be asked first.
#pragma once

namespace paged_attn {

struct AmxPermission {
  bool granted;
  const char* refusal;              // why not; empty where the processor has no such unit
  bool multiplies_float16 = false;  // as well as bfloat16
};

// For all threads of the process.
AmxPermission request_amx();

}  // namespace paged_attn
