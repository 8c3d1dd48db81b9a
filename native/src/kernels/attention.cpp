#include "ops.h"

namespace evensong {
namespace EV_ISA {

void attention(const AttentionArgs&, const AttentionSpan&, std::int32_t, Scratch) { __builtin_trap(); }
void attention_split(const AttentionArgs&, const AttentionSpan&, std::int32_t, std::int32_t, float*, Scratch) { __builtin_trap(); }
void merge_splits(const AttentionArgs&, const AttentionSpan&, std::int32_t, std::int32_t, const float*, Scratch) { __builtin_trap(); }
std::int64_t partial_size(const AttentionArgs&) { return 0; }
std::size_t attention_scratch(const AttentionArgs&, std::int32_t) { return 0; }

}  // namespace EV_ISA
}  // namespace evensong
