#include "bindings.h"

namespace evensong {

void bind_attention(nanobind::module_&) {}

}  // namespace evensong
