#include "ops.h"

namespace evensong {
namespace EV_ISA {

void rms_norm(const float*, const float*, float, std::int64_t, void*, DType) { __builtin_trap(); }
void add_rms_norm(float*, const float*, const float*, float, std::int64_t) { __builtin_trap(); }
void convert(const float*, std::int64_t, bf16*) { __builtin_trap(); }
void rope(const RopeArgs&, std::int64_t, std::int64_t, std::int64_t) { __builtin_trap(); }

}  // namespace EV_ISA
}  // namespace evensong
