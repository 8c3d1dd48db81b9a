#include "bindings.h"

namespace evensong {

void bind_linear(nanobind::module_&) {}

}  // namespace evensong
