// Which builds of the kernels run on this processor.
#include <array>

#include "kernels.h"

namespace evensong {

namespace portable {
const Kernels& table();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
namespace avx512_bf16 {
const Kernels& table();
}
#endif

namespace {

struct Build {
  const char* name;
  bool runs;
  const Kernels& (*table)();
};

// Best first.
const auto& builds() {
#if defined(__x86_64__)
  static const std::array<Build, 4> all = [] {
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool products = v4 && __builtin_cpu_supports("avx512bf16");
    return std::array<Build, 4>{{{"avx512_bf16", products, avx512_bf16::table},
                                 {"avx512", v4, avx512::table},
                                 {"avx2", v3, avx2::table},
                                 {"portable", true, portable::table}}};
  }();
#else
  static const std::array<Build, 1> all = {{{"portable", true, portable::table}}};
#endif
  return all;
}

}  // namespace

const Kernels& kernels_for(const std::string& name) {
  std::string known;
  for (const Build& build : builds()) {
    if (!build.runs) continue;
    if (name == build.name) return build.table();
    known += std::string(known.empty() ? "" : ", ") + build.name;
  }
  throw std::invalid_argument("the instruction set '" + name.substr(0, 40) + "' cannot be used here; usable: " + known);
}

const char* const* supported_isas(int* count) {
  static std::array<const char*, 4> names{};
  static const int found = [] {
    int n = 0;
    for (const Build& build : builds())
      if (build.runs) names[static_cast<std::size_t>(n++)] = build.name;
    return n;
  }();
  *count = found;
  return names.data();
}

}  // namespace evensong
