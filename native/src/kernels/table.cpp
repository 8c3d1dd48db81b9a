// The table of this build.
#include "ops.h"

#define EV_NAME_OF(isa) #isa
#define EV_NAME(isa) EV_NAME_OF(isa)

namespace evensong {
namespace EV_ISA {

const Kernels& table();

const Kernels& table() {
  static constexpr Kernels kernels = {
      EV_NAME(EV_ISA), kPanel,
#if defined(EV_AVX512_BF16)
      true,
#else
      false,
#endif
      pack,           gather,     linear,            rms_norm,    add_rms_norm, sum_rows, convert, rope,
      attention,      attention_split, merge_splits, kSplitKeys,  partial_size,   attention_scratch,
      kQueryBlock,    sample,     sample_scratch,    logprobs,    random_words,
      exp_row,        read,       checksum,    multiply};
  return kernels;
}

}  // namespace EV_ISA
}  // namespace evensong
