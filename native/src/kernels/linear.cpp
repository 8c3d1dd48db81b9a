#include "ops.h"

namespace evensong {
namespace EV_ISA {

void pack(const void*, DType, std::int64_t, std::int64_t, bool, std::int64_t, DType, void*) { __builtin_trap(); }
void gather(const PackedMatrix&, std::int64_t, float, float*) { __builtin_trap(); }
void linear(const LinearArgs&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, Scratch) { __builtin_trap(); }

}  // namespace EV_ISA
}  // namespace evensong
