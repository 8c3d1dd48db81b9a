// What ranks share, as Python sees it; and the segments that use it.
#include <memory>
#include <utility>

#include "bind_program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace evensong {

void hold(Program& program, nb::handle object) {
  auto* kept = new nb::object(nb::borrow(object));
  program.hold(std::shared_ptr<void>(kept, [](void* owner) {
    nb::gil_scoped_acquire gil;
    delete static_cast<nb::object*>(owner);
  }));
}

namespace {

char* bytes_of(const SharedBytes& memory) { return reinterpret_cast<char*>(memory.data()); }

// What a program was handed, kept as long as it.
template <typename T>
T& held(Program& program, nb::handle object) {
  if (!nb::isinstance<T>(object)) throw nb::type_error("what ranks share is a Group, a LogitsGroup or a Channel");
  T& found = nb::cast<T&>(object);
  hold(program, object);
  return found;
}

bool adds(const std::string& mode) {
  check(mode == "add" || mode == "store", "mode must be 'add' or 'store'");
  return mode == "add";
}

void bind_classes(nb::module_& m) {
  nb::class_<Group>(m, "Group")
      .def("__init__", [](Group* self, const SharedBytes& memory, int member, int size, std::int64_t max_rows,
                          std::int64_t width) {
        new (self) Group(bytes_of(memory), memory.size(), member, size, max_rows, width);
      }, "memory"_a.noconvert(), "member"_a, "size"_a, "max_rows"_a, "width"_a, nb::keep_alive<1, 2>())
      .def_static("bytes", &Group::bytes, "size"_a, "max_rows"_a, "width"_a);
  nb::class_<LogitsGroup>(m, "LogitsGroup")
      .def("__init__", [](LogitsGroup* self, const SharedBytes& memory, int member, int size, std::int64_t num_banks,
                          std::int64_t max_samples, std::int64_t width, int reader) {
        new (self) LogitsGroup(bytes_of(memory), memory.size(), member, size, num_banks, max_samples, width, reader);
      }, "memory"_a.noconvert(), "member"_a, "size"_a, "num_banks"_a, "max_samples"_a, "width"_a, "reader"_a = 0,
         nb::keep_alive<1, 2>())
      .def_static("bytes", &LogitsGroup::bytes, "size"_a, "num_banks"_a, "max_samples"_a, "width"_a);
  nb::class_<Channel>(m, "Channel")
      .def("__init__", [](Channel* self, const SharedBytes& memory, std::int64_t num_places, std::int64_t max_rows,
                          std::int64_t width) {
        new (self) Channel(bytes_of(memory), memory.size(), num_places, max_rows, width);
      }, "memory"_a.noconvert(), "num_places"_a, "max_rows"_a, "width"_a, nb::keep_alive<1, 2>())
      .def_static("bytes", &Channel::bytes, "num_places"_a, "max_rows"_a, "width"_a);
}

}  // namespace

void bind_links(nb::module_& m, nb::class_<Program>& program) {
  bind_classes(m);
  program.def("exchange", [](Program& p, nb::handle group) { return p.add_exchange(held<Group>(p, group)); }, "group"_a);
  program.def("all_reduce", [](Program& p, int part, int out, const std::string& mode) {
    append_all_reduce(p, part, out, adds(mode));
  }, "part"_a, "out"_a, "mode"_a);
  program.def("shared_logits", [](Program& p, nb::handle group) {
    return p.add_shared_logits(held<LogitsGroup>(p, group));
  }, "group"_a);
  program.def("gather_logits", [](Program& p, int logits) { append_gather_logits(p, logits); }, "logits"_a);
  program.def("send", [](Program& p, int x, nb::handle channel) {
    append_send(p, x, held<Channel>(p, channel));
  }, "x"_a, "channel"_a);
  program.def("receive", [](Program& p, nb::handle channel, int x) {
    append_receive(p, held<Channel>(p, channel), x);
  }, "channel"_a, "x"_a);
}

}  // namespace evensong
