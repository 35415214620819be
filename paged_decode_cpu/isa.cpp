#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace paged_attn {
namespace {

#if defined(__aarch64__)
// What an Arm processor has beyond the instructions that all have, as its operating system says.
struct ArmFeatures {
  bool fhm = false, bf16 = false;
};

#if defined(__APPLE__)
bool feature(const char* name) {
  int has = 0;
  size_t bytes = sizeof has;
  return sysctlbyname(name, &has, &bytes, nullptr, 0) == 0 && has;
}
#endif

ArmFeatures arm_features() {
  ArmFeatures features;
#if defined(__linux__)
  features.fhm = getauxval(AT_HWCAP) & HWCAP_ASIMDFHM;
  features.bf16 = getauxval(AT_HWCAP2) & HWCAP2_BF16;
#elif defined(__APPLE__)
  features.fhm = feature("hw.optional.arm.FEAT_FHM");
  features.bf16 = feature("hw.optional.arm.FEAT_BF16");
#endif
  return features;
}
#endif

#if defined(__x86_64__)
// Whether this is Intel's Granite Rapids or a later one. A hypervisor may give another model number, so an instruction
// tells that the ones before do not have (PREFETCHIT0).
bool is_granite_rapids() {
  unsigned a, b, c, d;
  return __builtin_cpu_is("intel") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (d >> 14 & 1);
}

// Whether this is AMD's Zen 5 or a later one: the first of AMD's with AVX-VNNI.
bool is_zen5() {
  unsigned a, b, c, d;
  return __builtin_cpu_is("amd") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

const AmxPermission& amx() {
  static const AmxPermission permission = request_amx();
  return permission;
}

std::vector<const Kernel*> kernels_of_this_cpu() {
  std::vector<const Kernel*> kernels;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
    const bool granite_rapids = is_granite_rapids();
    const Kernel* const widening = granite_rapids ? &kGraniteRapidsKernel : &kAvx512IntelKernel;
    if (amx().granted && amx().multiplies_float16) kernels.push_back(&kAvx512AmxFp16Kernel);
    if (amx().granted) kernels.push_back(granite_rapids ? &kGraniteRapidsAmxKernel : &kAvx512AmxKernel);
    // On Intel's processors vdpbf16ps is slower than the float32 instructions that do the same.
    const bool intel = __builtin_cpu_is("intel"), zen5 = is_zen5();
    if (intel) kernels.push_back(widening);
    kernels.push_back(zen5 ? &kAvx512Zen5Kernel : &kAvx512Bf16Kernel);
    kernels.push_back(zen5 ? &kAvx512Bf16Kernel : &kAvx512Zen5Kernel);
    if (!intel) kernels.push_back(widening);
  }
  if (avx512) kernels.push_back(&kAvx512Kernel);
  if (avx2) kernels.push_back(&kAvx2Kernel);
#elif defined(__aarch64__)
  const ArmFeatures has = arm_features();
  if (has.fhm && has.bf16) kernels.push_back(&kNeonBf16Kernel);
  if (has.fhm) kernels.push_back(&kNeonFp16Kernel);
  kernels.push_back(&kNeonKernel);
#endif
  kernels.push_back(&kPortableKernel);
  return kernels;
}

const Kernel& choose() {
  const std::vector<const Kernel*> kernels = kernels_of_this_cpu();
  const char* wanted = std::getenv("PAGED_ATTN_CPU_ISA");
  if (!wanted || !*wanted) return *kernels[0];
  std::string names;
  for (const Kernel* kernel : kernels) {
    if (std::string(wanted) == kernel->name) return *kernel;
    names += (names.empty() ? "" : ", ") + std::string(kernel->name);
  }
  throw std::runtime_error("PAGED_ATTN_CPU_ISA: expected one of " + names + " (what this processor runs), got " +
                           wanted);
}

}  // namespace

const Kernel& kernel_of_this_cpu() {
  static const Kernel& kernel = choose();
  return kernel;
}

const char* amx_refusal() { return amx().refusal; }

}  // namespace paged_attn
