#include "kernels/isa/choice.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace vtensor::kernels {
namespace {

#if defined(__x86_64__)
struct CpuId {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

// gcc 12's __builtin_cpu_supports does not know all of these names.
bool cpuid_bit(unsigned leaf, unsigned subleaf, unsigned CpuId::* word, int bit) {
  CpuId id;
  if (__get_cpuid_count(leaf, subleaf, &id.a, &id.b, &id.c, &id.d) == 0) return false;
  return ((id.*word >> bit) & 1) != 0;
}
#endif

bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// AMX's tiles are state that the kernel saves only for processes that have asked for it.
bool cpu_has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  if (!cpu_has_avx512() || amx_isa() == nullptr) return false;
  if (!cpuid_bit(7, 1, &CpuId::a, 5) || !cpuid_bit(7, 0, &CpuId::d, 22) ||
      !cpuid_bit(7, 0, &CpuId::d, 24)) {
    return false;  // avx512_bf16, amx_bf16, amx_tile
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool cpu_has_amx_bytes() {
#if defined(__x86_64__)
  return cpu_has_amx() && cpuid_bit(7, 0, &CpuId::d, 25);
#else
  return false;
#endif
}

bool cpu_has_vnni() {
#if defined(__x86_64__)
  return cpu_has_avx512() && cpuid_bit(7, 0, &CpuId::c, 11);
#else
  return false;
#endif
}

bool cpu_has_avx_vnni() {
#if defined(__x86_64__)
  return cpu_has_avx2() && cpuid_bit(7, 1, &CpuId::a, 4);
#else
  return false;
#endif
}

bool cpu_has_bf16() {
#if defined(__x86_64__)
  return cpu_has_avx512() && cpuid_bit(7, 1, &CpuId::a, 5);
#else
  return false;
#endif
}

std::vector<const QuantisedIsa*> find_available_quantised() {
  const std::pair<const QuantisedIsa*, bool> levels[] = {
      {portable_quantised(), true},
      {avx2_quantised(), cpu_has_avx2()},
      {avx_vnni_quantised(), cpu_has_avx_vnni()},
      {avx512_quantised(), cpu_has_avx512()},
      {avx512_vnni_quantised(), cpu_has_vnni()},
      {avx512_bf16_quantised(), cpu_has_vnni() && cpu_has_bf16()},
      {amx_quantised(), cpu_has_vnni() && cpu_has_bf16() && cpu_has_amx_bytes()},
  };
  std::vector<const QuantisedIsa*> found;
  for (const auto& [level, is_here] : levels) {
    if (level != nullptr && is_here) found.push_back(level);
  }
  return found;
}

std::vector<const Isa*> find_available() {
  std::vector<const Isa*> isas = {portable_isa()};
  if (avx2_isa() != nullptr && cpu_has_avx2()) isas.push_back(avx2_isa());
  if (avx512_isa() != nullptr && cpu_has_avx512()) isas.push_back(avx512_isa());
  if (avx512_vnni_isa() != nullptr && cpu_has_vnni()) isas.push_back(avx512_vnni_isa());
  // With products of bytes: a CPU with those of pairs has them.
  const bool has_bf16 = cpu_has_bf16() && cpu_has_vnni();
  if (avx512_bf16_isa() != nullptr && has_bf16) isas.push_back(avx512_bf16_isa());
  if (cpu_has_amx()) isas.push_back(amx_isa());
  return isas;
}

// The one called `name` among those that are here, best last.
template <class Level>
const Level& find(const std::vector<const Level*>& levels, const std::string& name) {
  const char* forced = std::getenv("FLEXINFER_SIMD");
  std::string wanted = !name.empty() ? name : forced != nullptr ? forced : "";
  // Only quantised weights have that level: the other kernels are those of AVX2 there.
  const bool is_for_quantised = name.empty() && wanted == "avx_vnni" && cpu_has_avx_vnni();
  if (std::is_same_v<Level, Isa> && is_for_quantised) wanted = "avx2";
  if (wanted.empty()) return *levels.back();
  std::string choices;
  for (const Level* level : levels) {
    if (wanted == level->name) return *level;
    choices += choices.empty() ? level->name : std::string(", ") + level->name;
  }
  throw std::invalid_argument("no instruction set '" + wanted +
                              "' on this machine; choose one of " + choices +
                              " (argument or FLEXINFER_SIMD)");
}

}  // namespace

// The larger one of what simd/softmax.h and simd/lane_softmax.h lay out.
size_t scratch_floats(int key_dim, int value_dim) {
  const size_t keys = static_cast<size_t>(key_dim), values = static_cast<size_t>(value_dim);
  const size_t widths = keys + values, tile = kTileTokens, lanes = kHeadDimStep;
  const size_t rows = kMaxSideBySide * kMaxFewRows, maxima_and_sums = 2 * rows * lanes;
  const size_t few = rows * (widths + tile) + maxima_and_sums;

  const auto parts = [](size_t numbers) { return numbers * 3 / 2; };  // of two bytes, on AMX
  const size_t many_rows = kMaxRows, block_rows = 32;
  // An output of a block goes through the scores when it is written.
  const size_t block_scores = block_rows * std::max(2 * tile, values);
  const size_t many = parts(many_rows * keys) + many_rows * values + 3 * many_rows +
                      parts(tile * widths) + block_scores + 2 * parts(block_rows * tile);
  return std::max(few, many);
}

const std::vector<const Isa*>& available_isas() {
  static const std::vector<const Isa*> isas = find_available();
  return isas;
}

const std::vector<const QuantisedIsa*>& available_quantised() {
  static const std::vector<const QuantisedIsa*> levels = find_available_quantised();
  return levels;
}

const Isa& find_isa(const std::string& name) { return find(available_isas(), name); }

const QuantisedIsa& find_quantised(const std::string& name) {
  return find(available_quantised(), name);
}

}  // namespace vtensor::kernels
