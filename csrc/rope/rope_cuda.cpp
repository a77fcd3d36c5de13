// Rotary embedding's launcher: by vectors or by elements, and the grid.

#include "rope/rope.h"

#include "common/launch.h"
#include "rope/rope.cuh"

namespace flexops {
namespace {

constexpr int64_t kMostInY = 65535;  // blocks of a grid

/// Whether all of these, of dimensions that have more than one entry, are multiples of n, and 32
/// bits can count the vectors up to the last.
bool in_vectors(const int64_t (&strides)[4], const int64_t (&sizes)[4], int64_t n) {
  int64_t last = sizes[3];
  for (int d = 0; d < 3; ++d) {
    if (sizes[d] > 1 && strides[d] % n != 0) return false;
    last += (sizes[d] - 1) * strides[d];
  }
  return (sizes[3] <= 1 || strides[3] == 1) && last / n < int64_t{1} << 32;
}

bool takes_vectors(const Rope& c) {
  const int64_t n = 16 / element_size(c.type);
  // cos and sin are read as many at a time as there are pairs in a vector, or elements
  if (c.half % n != 0 || c.head_dim % n != 0 || !aligned(c.cos) || !aligned(c.sin) ||
      c.cos_stride % 8 != 0 || c.sin_stride % 8 != 0 || c.cos_batch % 8 != 0 ||
      c.sin_batch % 8 != 0) {
    return false;
  }
  for (const RopeTensor& t : c.tensors) {
    if (t.heads == 0) continue;
    const int64_t sizes[4] = {c.batch, t.heads, c.length, c.head_dim};
    if (!aligned(t.in) || !aligned(t.out) || !in_vectors(t.in_strides, sizes, n) ||
        !in_vectors(t.out_strides, sizes, n))
      return false;
  }
  return true;
}

/// Strides in units of n elements.
rope::Side side_of(const RopeTensor& t, int64_t n) {
  const int64_t *in = t.in_strides, *out = t.out_strides;
  return {t.in,
          t.out,
          in[0] / n,
          in[1] / n,
          in[2] / n,
          in[3],
          out[0] / n,
          out[1] / n,
          out[2] / n,
          out[3],
          static_cast<u32>(t.heads)};
}

/// Moves everything on by so many batches and positions, of strides in units of `size` bytes.
void move(rope::Params& p, int64_t batches, int64_t positions, int64_t size) {
  for (rope::Side& s : p.side) {
    s.in = static_cast<const char*>(s.in) + (batches * s.in_batch + positions * s.in_length) * size;
    s.out = static_cast<char*>(s.out) + (batches * s.out_batch + positions * s.out_length) * size;
  }
  const int64_t of_table = element_size(p.table_type);
  p.cos = static_cast<const char*>(p.cos) + batches * p.cos_batch * of_table;
  p.sin = static_cast<const char*>(p.sin) + batches * p.sin_batch * of_table;
  if (p.positions) {
    const int64_t entries = batches * p.position_batch + positions * p.position_length;
    p.positions = static_cast<const char*>(p.positions) + entries * (p.wide_positions ? 8 : 4);
  } else {
    p.first_position += static_cast<u32>(positions);
  }
}

/// How many groups of heads. Fewer heads a group make more threads; more share the wait for a
/// position that has to be fetched.
int64_t plan_groups(rope::Params& p, int64_t lines) {
  const int64_t blocks = ceil_div(lines * p.items.by, rope::kThreads),
                enough = 4 * int64_t{gpu_facts().processors};
  const int64_t query = p.side[0].heads, key = p.side[1].heads, most = query > key ? query : key;
  int64_t each = least(p.positions ? rope::kHeads : 1, most);
  while (each > 1 && blocks * ceil_div(query + key, each) < enough) each = ceil_div(each, 2);
  p.per_group = static_cast<u32>(each), p.query_groups = static_cast<u32>(ceil_div(query, each));
  return p.query_groups + ceil_div(key, each);
}

void launch_part(const KernelOf<rope::Params>& kernel, rope::Params p, int64_t batches,
                 int64_t length, int64_t groups, void* stream) {
  const int64_t items = length * p.items.by;
  // Batches by themselves unless they would leave threads idle: what runs at the same time then
  // lies together in memory.
  const bool apart = !p.heads_first && items >= 8 * rope::kThreads && batches <= kMostInY;
  p.length = make_divisor(length);
  p.total = static_cast<u32>(apart ? items : batches * items);
  const int64_t count = ceil_div(p.total, rope::kThreads);
  launch(kernel,
         {p.heads_first ? blocks(groups, count) : blocks(count, groups, apart ? batches : 1),
          {rope::kThreads},
          stream},
         p);
}

}  // namespace

const char* rope_cuda(const Rope& c, void* stream) {
  if (c.tensors[0].heads + c.tensors[1].heads == 0 || c.batch * c.length * c.head_dim == 0)
    return nullptr;
  const bool vectors = takes_vectors(c);
  const int64_t n = vectors ? 16 / element_size(c.type) : 1, size = n * element_size(c.type);
  rope::Params p;
  for (int s = 0; s < 2; ++s) p.side[s] = side_of(c.tensors[s], n);
  p.cos = c.cos, p.sin = c.sin, p.positions = c.positions;
  p.cos_stride = c.cos_stride, p.sin_stride = c.sin_stride, p.max_positions = c.max_positions;
  p.cos_batch = c.cos_batch, p.sin_batch = c.sin_batch;
  p.position_batch = c.position_strides[0], p.position_length = c.position_strides[1],
  p.first_position = 0;
  p.rotated = static_cast<u32>(c.half / n), p.vectors = static_cast<u32>(c.head_dim / n);
  p.copied = static_cast<u32>(ceil_div(p.vectors - 2 * p.rotated, 2));
  p.table_type = c.table_type;
  p.interleaved = c.interleaved, p.inverse = c.inverse, p.wide_positions = c.wide_positions;
  const int64_t items = p.rotated + (c.in_place ? 0 : p.copied);
  if (items == 0) return nullptr;
  p.items = make_divisor(items);
  const int64_t groups = plan_groups(p, c.batch * c.length);
  p.heads_first = c.tensors[0].in_strides[1] < c.tensors[0].in_strides[2] || groups > kMostInY;
  static const KernelOf<rope::Params> kVectors[] = FLEXOPS_EACH_TYPE(kernel, rope::rotate),
                                      kElements[] =
                                          FLEXOPS_EACH_TYPE(rare_kernel, rope::rotate_elements);
  const KernelOf<rope::Params>& chosen = (vectors ? kVectors : kElements)[static_cast<int>(c.type)];
  // In pieces whose items 31 bits can count, and whose blocks the grid can.
  const int64_t most = (p.heads_first ? kMostInY * rope::kThreads : int64_t{1} << 30) / items;
  const int64_t positions = most < 1 ? 1 : least(c.length, most),
                batches = most < positions ? 1 : least(c.batch, most / positions);
  for (int64_t batch = 0; batch < c.batch; batch += batches) {
    for (int64_t position = 0; position < c.length; position += positions) {
      rope::Params part = p;
      move(part, batch, position, size);
      launch_part(chosen, part, least(batches, c.batch - batch),
                  least(positions, c.length - position), groups, stream);
    }
  }
  return last_error();
}

}  // namespace flexops
