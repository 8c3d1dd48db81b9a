// y = x W^T over packed panels: how rows, panels and K are cut into the tiles of tile.h.
//
// For each block of rows whose inputs stay in the second-level cache, each panel is cut along K into blocks that stay
// there too while all tiles of rows pass over them; the sums of a panel wait in scratch between its blocks.
#include "epilogue.h"
#include "ops.h"
#include "tile.h"

namespace evensong {
namespace EV_ISA {

namespace {

// Measured on Zen 5 (48 KB, 1 MB); larger blocks along K beat smaller ones although they do not fit the first level: a
// panel is read in order, which the second level does in time.
constexpr std::int64_t kInputBytes = 384 << 10;  // of a block of rows
constexpr std::int64_t kBlockBytes = 128 << 10;  // of a panel's block along K
constexpr std::int64_t kAheadBytes = 8 << 10;    // from what a lone tile reads to what it fetches
constexpr std::int64_t kSpreadTiles = 8;         // tiles of a panel that share in fetching the next one

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// `count` cut into `parts` that differ by one at most: where part `index` starts.
std::int64_t cut(std::int64_t count, std::int64_t parts, std::int64_t index) {
  return index * (count / parts) + at_most(index, count % parts);
}

template <class Products>
struct Blocking {
  std::int64_t steps;  // of a panel
  std::int64_t panel_bytes;
  std::int64_t num_tiles, num_blocks;  // of the rows of this block, of K

  Blocking(const LinearArgs& args, std::int64_t rows) {
    steps = (args.weight.cols + 1) / 2 * 2 / Products::kInputs;
    panel_bytes = steps * Products::kBytes;
    num_tiles = ceil_div(rows, kTileRows);
    num_blocks = num_tiles == 1 ? 1 : ceil_div(panel_bytes, kBlockBytes);
  }
};

// Tells a tile what to fetch while it computes. A lone tile reads memory itself and fetches the stream a little ahead;
// where several read a panel from the cache, each fetches a part of the same block of the next panel, and the inputs of
// the next tile, which lie behind its own.
template <class Products>
RunTile plan_ahead(const Blocking<Products>& cuts, bool has_next, std::int64_t index, std::int64_t rows, Tile* tile) {
  if (cuts.num_tiles == 1) {
    tile->ahead = tile->weight + kAheadBytes;
    tile->ahead_bytes = Products::kBytes;
    return tile_of<Products, Fetch::stream>(rows);
  }
  const std::int64_t in_bytes = rows * tile->in_stride * static_cast<std::int64_t>(sizeof(typename Products::In));
  tile->next_in = static_cast<const char*>(tile->in) + in_bytes;
  tile->next_in_bytes = at_most(ceil_div(in_bytes, cuts.steps), 64);
  const std::int64_t sharers = at_most(cuts.num_tiles, kSpreadTiles);
  if (!has_next || index >= sharers) return tile_of<Products, Fetch::inputs>(rows);
  tile->ahead = tile->weight + cuts.panel_bytes + tile->steps * Products::kBytes / sharers * index;
  tile->ahead_bytes = ceil_div(Products::kBytes, sharers);
  return tile_of<Products, Fetch::share>(rows);
}

void end_in_outputs(const LinearArgs& args, std::int64_t panel, std::int64_t row, Tile* tile) {
  tile->out = static_cast<float*>(args.out) + row * args.out_stride + panel * kPanel;
  tile->out_stride = args.out_stride;
  tile->adds = args.epilogue == Epilogue::add;
}

template <class Products>
void panel_rows(const LinearArgs& args, std::int64_t panel, std::int64_t begin, std::int64_t rows,
                const Blocking<Products>& cuts, float* sums) {
  const auto* in = static_cast<const typename Products::In*>(args.in) + begin * args.in_stride;
  const char* weight = static_cast<const char*>(args.weight.data) + panel * cuts.panel_bytes;
  const bool has_next = (panel + 1) * kPanel < args.weight.rows;
  const bool direct = sums_are_outputs(args, panel);
  for (std::int64_t block = 0; block < cuts.num_blocks; ++block) {
    const std::int64_t step = cut(cuts.steps, cuts.num_blocks, block);
    const std::int64_t steps = cut(cuts.steps, cuts.num_blocks, block + 1) - step;
    for (std::int64_t index = 0; index < cuts.num_tiles; ++index) {
      const std::int64_t row = cut(rows, cuts.num_tiles, index);
      const std::int64_t count = cut(rows, cuts.num_tiles, index + 1) - row;
      Tile tile = {};
      tile.weight = weight + step * Products::kBytes;
      tile.in = in + row * args.in_stride + step * Products::kInputs;
      tile.in_stride = args.in_stride;
      tile.steps = steps;
      tile.sums = sums + (cuts.num_blocks > 1 ? row * kPanel : 0);
      tile.fresh = block == 0;
      tile.out = tile.sums;
      tile.out_stride = kPanel;
      const bool last = block + 1 == cuts.num_blocks;
      if (last) fetch_outputs(args, panel, begin + row, count);
      if (last && direct) end_in_outputs(args, panel, begin + row, &tile);
      plan_ahead(cuts, has_next, index, count, &tile)(tile);
      if (last && !direct) finish(args, panel, begin + row, count, tile.sums);
    }
  }
}

template <class Products>
void linear_of(const LinearArgs& args, std::int64_t first_panel, std::int64_t last_panel, std::int64_t begin,
               std::int64_t end, Scratch scratch) {
  if (begin >= end) return;
  constexpr auto kInSize = static_cast<std::int64_t>(sizeof(typename Products::In));
  const std::int64_t row_bytes = (args.weight.cols + 1) / 2 * 2 * kInSize;
  const std::int64_t fits = static_cast<std::int64_t>(scratch.size / (kPanel * sizeof(float)));
  std::int64_t most = at_most(at_most(ceil_div(kInputBytes, row_bytes), fits) / kTileRows * kTileRows, end - begin);
  if (most < kTileRows) most = at_most(kTileRows, end - begin);
  const std::int64_t num_blocks = ceil_div(end - begin, most);
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const std::int64_t row = begin + cut(end - begin, num_blocks, block);
    const std::int64_t rows = begin + cut(end - begin, num_blocks, block + 1) - row;
    const Blocking<Products> cuts(args, rows);
    for (std::int64_t panel = first_panel; panel < last_panel; ++panel)
      panel_rows<Products>(args, panel, row, rows, cuts, reinterpret_cast<float*>(scratch.data));
  }
}

// The largest tile over and over on what the first-level cache holds.
template <class Products>
double multiply_of(std::int64_t times) {
  constexpr std::int64_t kSteps = 96;
  constexpr std::int64_t kStride = kSteps * Products::kInputs;
  alignas(64) static const char weight[kSteps * Products::kBytes + 64] = {};
  alignas(64) static const typename Products::In in[kTileRows * kStride + 64] = {};
  alignas(64) float sums[kTileRows * kPanel] = {};
  Tile tile = {};
  tile.weight = tile.ahead = weight;
  tile.in = in;
  tile.next_in = reinterpret_cast<const char*>(in);
  tile.in_stride = kStride;
  tile.steps = kSteps;
  tile.sums = tile.out = sums;
  tile.out_stride = kPanel;
  const RunTile run = tile_of<Products, Fetch::inputs>(kTileRows);
  for (std::int64_t i = 0; i < times; ++i) run(tile);
  return 2.0 * kTileRows * kPanel * static_cast<double>(kStride * times);
}

#if defined(EV_AVX512_BF16)
using HalfProducts = PairProducts;
#else
using HalfProducts = WidenedProducts;
#endif

}  // namespace

void linear(const LinearArgs& args, std::int64_t first_panel, std::int64_t last_panel, std::int64_t begin,
            std::int64_t end, Scratch scratch) {
  if (args.weight.type == DType::f32)
    linear_of<FloatProducts>(args, first_panel, last_panel, begin, end, scratch);
  else
    linear_of<HalfProducts>(args, first_panel, last_panel, begin, end, scratch);
}

double multiply(DType type, std::int64_t times) {
  return type == DType::f32 ? multiply_of<FloatProducts>(times) : multiply_of<HalfProducts>(times);
}

}  // namespace EV_ISA
}  // namespace evensong
