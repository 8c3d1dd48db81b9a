// The engine, as Python sees it. A step is checked when it is submitted.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <optional>
#include <utility>

#include "bind_program.h"
#include "engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace evensong {

namespace {

using Bytes = Array<const std::uint8_t>;
using Masks = nb::ndarray<const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pairs = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The last steps may call back, and let go of what belongs to Python: both wait for the GIL. None waits for other ranks
// then: nobody would hear of what it gives.
class BoundEngine : public Engine {
 public:
  using Engine::Engine;
  ~BoundEngine() {
    nb::gil_scoped_release released;
    cancel();
    stop();
  }
};

template <typename T>
void copy_into(std::vector<T>& target, const Array<const T>& source) {
  target.assign(source.data(), source.data() + source.size());
}

using Table = nb::ndarray<const std::int32_t, nb::numpy, nb::device::cpu, nb::ndim<2>>;

// The used parts of the sequences' block tables, each [groups, blocks].
void copy_tables(Step& step, const std::vector<Table>& tables, const ProgramLimits& limits) {
  const std::size_t sequences = step.counts.size();
  check(tables.size() == sequences && step.starts.size() == sequences, "one entry for each sequence is needed");
  step.blocks.resize(static_cast<std::size_t>(limits.num_groups));
  step.first_block.assign(1, 0);
  for (std::size_t s = 0; s < sequences; ++s) {
    check(step.counts[s] > 0 && step.starts[s] >= 0, "a sequence without tokens");
    const std::int64_t end = std::int64_t{step.starts[s]} + step.counts[s];
    const std::int64_t used = (end + limits.block_size - 1) / limits.block_size;
    check(tables[s].shape(0) == step.blocks.size(), "a block table has another number of groups");
    check(used <= static_cast<std::int64_t>(tables[s].shape(1)), "a block table is too short");
    for (std::size_t group = 0; group < step.blocks.size(); ++group) {
      const std::int32_t* from = tables[s].data() + static_cast<std::int64_t>(group) * tables[s].stride(0);
      for (std::int64_t i = 0; i < used; ++i) step.blocks[group].push_back(from[i * tables[s].stride(1)]);
    }
    step.first_block.push_back(step.first_block.back() + used);
  }
}

nb::tuple results_of(Step& step) {
  SampleOutput& output = step.output;
  const std::size_t rows = output.tokens.size();
  std::vector<double> shifts(rows);
  std::vector<std::int64_t> ranks(rows), found(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    shifts[i] = output.logprobs[i].shift;
    ranks[i] = output.logprobs[i].rank;
    found[i] = output.logprobs[i].num_best;
  }
  const auto most = static_cast<std::size_t>(output.max_best);
  return nb::make_tuple(make_array(std::move(output.tokens), {rows}), make_array(std::move(shifts), {rows}),
                        make_array(std::move(ranks), {rows}), make_array(std::move(found), {rows}),
                        make_array(std::move(output.best_ids), {rows, most}),
                        make_array(std::move(output.best_values), {rows, most}));
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<BoundEngine> engine(m, "Engine");
  engine.def("__init__", [](BoundEngine* self, int threads, std::optional<std::vector<int>> processors) {
    check(!processors || !processors->empty(), "threads are bound to at least one processor");
    new (self) BoundEngine(threads, processors.value_or(std::vector<int>{}));
  }, "threads"_a, "processors"_a = nb::none());
  engine.def_prop_ro("threads", [](const BoundEngine& e) { return e.threads(); });
  engine.def("submit", [](BoundEngine& e, std::shared_ptr<Program> program, const Array<const std::int32_t>& counts,
                          const Array<const std::int32_t>& starts, const std::vector<Table>& tables,
                          const Array<const std::int64_t>& token_ids,
                          const Array<const std::int64_t>& sample_rows, const Bytes& samples, std::size_t first,
                          std::optional<std::size_t> last, const std::optional<Masks>& masks, std::int64_t bank,
                          std::int64_t step_id, std::int64_t feed_after, bool publishes,
                          const std::optional<Pairs>& copies) {
    auto step = std::make_shared<Step>();
    copy_into(step->counts, counts);
    copy_into(step->starts, starts);
    copy_into(step->token_ids, token_ids);
    copy_into(step->sample_rows, sample_rows);
    check(samples.size() == sample_rows.size() * sizeof(SampleRow), "one SampleRow for each sampled row is needed");
    step->samples.resize(sample_rows.size());
    if (samples.size() > 0) std::memcpy(step->samples.data(), samples.data(), samples.size());
    if (masks.has_value()) {
      step->mask_words = static_cast<std::int64_t>(masks->shape(1));
      step->masks.assign(masks->data(), masks->data() + masks->size());
    }
    if (copies.has_value()) {
      check(copies->shape(1) == 2, "copies are pairs of blocks, from and to");
      step->copies.assign(copies->data(), copies->data() + copies->size());
    }
    step->bank = bank;
    step->step_id = step_id;
    step->feed_after = feed_after;
    step->publishes = publishes;
    copy_tables(*step, tables, program->limits());
    const std::size_t end = last.value_or(program->num_segments());
    return e.submit(std::move(program), std::move(step), first, end);
  }, "program"_a, "counts"_a, "starts"_a, "tables"_a, "token_ids"_a, "sample_rows"_a, "samples"_a,
     "first"_a = 0, "last"_a = nb::none(), "masks"_a = nb::none(), nb::kw_only(), "bank"_a = 0, "step_id"_a = -1,
     "feed_after"_a = -1, "publishes"_a = false, "copies"_a = nb::none());
  engine.def("wait", [](BoundEngine& e, std::int64_t ticket) {
    std::shared_ptr<Step> step;
    {
      nb::gil_scoped_release released;
      step = e.wait(ticket);
    }
    return results_of(*step);
  }, "ticket"_a);
  engine.def("ready", [](BoundEngine& e, std::int64_t ticket) { return e.ready(ticket); }, "ticket"_a);
  engine.def("set_doorbell", [](BoundEngine& e, int fd) { e.set_doorbell(fd); }, "fd"_a);
  engine.def("cancel", [](BoundEngine& e) { e.cancel(); });
  engine.def("set_progress", [](BoundEngine& e, Array<std::uint64_t> words, std::size_t ticks, std::size_t last) {
    check(ticks < words.size() && last < words.size(), "no such word");
    e.set_progress({words.data() + ticks, words.data() + last});
  }, "words"_a, "ticks"_a, "last"_a, nb::keep_alive<1, 2>());
  engine.def("record_spans", [](BoundEngine& e, bool on) { e.record_spans(on); }, "on"_a);
  engine.def("take_spans", [](BoundEngine& e) {
    std::vector<std::int64_t> flat;
    const std::vector<Span> spans = e.take_spans();
    for (const Span& span : spans) flat.insert(flat.end(), {span.segment, span.thread, span.begin, span.end});
    return make_array(std::move(flat), {spans.size(), 4});
  });
  engine.def("take_steps", [](BoundEngine& e) {
    std::vector<std::int64_t> flat;
    const std::vector<StepSpan> steps = e.take_steps();
    for (const StepSpan& step : steps) flat.insert(flat.end(), {step.step_id, step.begin, step.end, step.rows});
    return make_array(std::move(flat), {steps.size(), 4});
  });
}

}  // namespace evensong
