#include "bindings.h"

namespace evensong {

void bind_sampling(nanobind::module_&) {}

}  // namespace evensong
