#include "ops.h"

namespace evensong {
namespace EV_ISA {

SampleResult sample(const float*, std::int64_t, const SampleParams&, Scratch) { __builtin_trap(); }
std::size_t sample_scratch(std::int64_t) { return 0; }
LogprobResult logprobs(const LogprobArgs&, Scratch) { __builtin_trap(); }

}  // namespace EV_ISA
}  // namespace evensong
