// libgcc 12 lacks __truncsfbf2/__truncdfbf2
#include <cstdint>
#include <cstring>
typedef __bf16 bf;
static inline bf rne(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t r =
      (u & 0x7fffffff) > 0x7f800000 ? uint16_t((u >> 16) | 0x40) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  bf b;
  memcpy(&b, &r, 2);
  return b;
}
extern "C" __attribute__((weak, visibility("hidden"))) bf __truncsfbf2(float f) { return rne(f); }
extern "C" __attribute__((weak, visibility("hidden"))) bf
__truncdfbf2(double d) {  // round to odd first: one rounding in all
  float f = (float)d;
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((double)f != d && d == d && !(u & 1)) {
    bool up = (d > (double)f) == (d > 0);
    u = up ? u | 1 : (u - 1) | 1;
    memcpy(&f, &u, 4);
  }
  return rne(f);
}
