#include "amx_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged_attn {
namespace {

bool bit(unsigned x, int i) { return x >> i & 1; }

bool processor_has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return false;  // OSXSAVE: xgetbv may be used
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return bit(d, 24) && bit(d, 22);  // AMX-TILE, AMX-BF16
}

bool tiles_may_be_float16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && bit(a, 21);  // AMX-FP16
}

// What the operating system saves when threads change (XCR0).
[[gnu::target("xsave")]] unsigned saved_state() { return static_cast<unsigned>(_xgetbv(0)); }

}  // namespace

AmxPermission request_amx() {
  if (!processor_has_tiles()) return {false, ""};
  const unsigned saved = saved_state();
  if (!bit(saved, 17) || !bit(saved, 18)) return {false, "the operating system does not save tiles"};
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
    return {false, "the operating system refused the permission to use tiles"};
#endif
  return {true, "", tiles_may_be_float16()};
}

}  // namespace paged_attn
#else
namespace paged_attn {
AmxPermission request_amx() { return {false, ""}; }
}  // namespace paged_attn
#endif
