// The Python module evensong._native.
#include "bindings.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  // What still lives when the interpreter ends goes with the process; nothing is to be said of it.
  nb::set_leak_warnings(false);
  m.attr("BUILD") = EVENSONG_BUILD;
  m.def("supported_isas", [] {
    int count = 0;
    const char* const* names = evensong::supported_isas(&count);
    return std::vector<std::string>(names, names + count);
  });
  evensong::bind_linear(m);
  evensong::bind_attention(m);
  evensong::bind_sampling(m);
  evensong::bind_program(m);
  evensong::bind_engine(m);
}
