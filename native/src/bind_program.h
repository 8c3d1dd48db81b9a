// What the files that bind programs share.
#pragma once

#include "bindings.h"
#include "program.h"

namespace evensong {

// Keeps a Python object for as long as the program lives, whichever thread lets go of it.
void hold(Program& program, nanobind::handle object);

// Memory that others may write too.
using SharedBytes = Array<std::uint8_t>;

// Group, LogitsGroup and Channel, and the segments that use them.
void bind_links(nanobind::module_& m, nanobind::class_<Program>& program);

}  // namespace evensong
