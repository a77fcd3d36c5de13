// Attention over codes, and what makes them: which kernel, and in how many parts codes are cut.

#include "kvcache_attention/kvcache_codes.cuh"

#include "attention/attention_launch.h"
#include "kvcache_attention/kvcache_attention_launch.h"

namespace flexops::attention {
namespace {

/// For heads of D columns, in blocks of kKeys tokens; N: those of the ring's part. What few models
/// have is compiled when it is called.
template <int D, int kBits, int kValueGroup, int kWarps, int kKeys, int N>
constexpr Tiling<CodesParams> coded_tiling() {
  using Shape = Coded<D, kBits, kValueGroup, kWarps, kKeys>;
  using Ring = Decode<bf16, D, D, kWarps, N, Shape::kMost>;
#define FLEXOPS_CODES(which, ...) \
  FLEXOPS_PER_TYPE(which, codes_attend, D, kBits, kValueGroup, kWarps, kKeys, N, __VA_ARGS__)
  return {D,
          D,
          Shape::kM,
          Shape::kKeys,
          Shape::kThreads,
          Shape::kBytes > Ring::kBytes ? Shape::kBytes : Ring::kBytes,
          {{kValueGroup == 64 && D <= 128 ? PerType<CodesParams> FLEXOPS_CODES(kernel, Plain)
                                          : PerType<CodesParams>
                                                FLEXOPS_CODES(rare_kernel, Plain),
            FLEXOPS_CODES(rare_kernel, Modified<true, false, false>),
            FLEXOPS_CODES(rare_kernel, Modified<false, true, false>),
            {},
            FLEXOPS_CODES(rare_kernel, Modified<true, true, false>),
            {}}}};
#undef FLEXOPS_CODES
}
struct Choice {
  int64_t bits, value_group;
  Tiling<CodesParams> tiling;
};
template <int D, int kBits, int kValueGroup>
constexpr Choice choice() {
  // A group of tokens at once where shared memory suffices.
  constexpr int kKeys = kBits * D <= 512 && kValueGroup >= 64 ? 64 : 32;
  return {kBits, kValueGroup,
          coded_tiling<D, kBits, kValueGroup, D == 256 ? 2 : 4, kKeys, D == 64 ? 32 : 16>()};
}
constexpr Choice kChoices[] = {
    choice<64, 8, 64>(),   choice<64, 4, 64>(),   choice<64, 8, 32>(),  choice<64, 4, 32>(),
    choice<128, 8, 64>(),  choice<128, 4, 64>(),  choice<128, 8, 32>(), choice<128, 4, 32>(),
    choice<128, 8, 128>(), choice<128, 4, 128>(), choice<256, 8, 64>(), choice<256, 4, 64>(),
    choice<256, 8, 128>(), choice<256, 4, 128>(),
};
constexpr PerType<CodesParams> kCombine = FLEXOPS_PER_TYPE(kernel, codes_combine),
                               kCompress = FLEXOPS_PER_TYPE(kernel, compress);

const Tiling<CodesParams>* tiling_of(const CodesAttention& c) {
  for (const Choice& one : kChoices) {
    if (one.bits == c.bits && one.value_group == c.value_group &&
        one.tiling.dim == c.cache.attend.problem.head_dim)
      return &one.tiling;
  }
  return nullptr;
}

int64_t splits_of(const CodesAttention& c, const Tiling<CodesParams>& tiling) {
  Attention a = c.cache.attend.problem;
  // Three blocks of threads share a multiprocessor, and even out over more than one wave: on an
  // H200, four parts of 1000 tokens or more took 98 us where three took 104 and one 113.
  const int64_t wanted = least(4, a.length_k / 1024), most = kMostKeyParts - 1;  // and the ring
  if (c.cache.splits > 0) return least(c.cache.splits, most);
  a.length_k = a.length_k * c.bits / 16;  // as long as so many tokens of 16 bits take
  const int64_t chosen =
      choose_splits(a, decode_tiles(a, tiling.rows), tiling.threads, tiling.bytes);
  return least(most, chosen > wanted ? chosen : wanted);
}

CodesParams make_codes(const CodesAttention& c, const CacheParams& cache) {
  CodesParams p = {};
  p.cache = cache;
  p.k_codes = static_cast<u8*>(c.k_codes), p.v_codes = static_cast<u8*>(c.v_codes);
  p.k_steps = static_cast<f16*>(c.k_steps), p.v_steps = static_cast<f16*>(c.v_steps);
  p.residual = static_cast<int>(c.residual), p.group = static_cast<int>(c.group),
  p.value_group = static_cast<int>(c.value_group), p.bits = static_cast<int>(c.bits);
  return p;
}

constexpr const char* kNone = "no kernel takes codes of this head_dim, group_size and bits";

}  // namespace
}  // namespace flexops::attention

namespace flexops {

using namespace attention;

int64_t kvcache_codes_workspace(const CodesAttention& c) {
  const Tiling<CodesParams>* tiling = tiling_of(c);
  return tiling ? decode_workspace_of(c.cache.attend.problem, splits_of(c, *tiling) + 1) : 0;
}

const char* kvcache_codes_cuda(const CodesAttention& c, void* workspace, void* stream) {
  const Attention& a = c.cache.attend.problem;
  if (is_empty(a) || a.length_q == 0) return nullptr;
  const Tiling<CodesParams>* tiling = tiling_of(c);
  if (!tiling) return kNone;
  CacheParams cache = make_cache(c.cache, *tiling, splits_of(c, *tiling), workspace);
  const int64_t parts = cache.decode.splits + 1,
                all = a.batch * a.heads_k * cache.decode.call.tiles * parts;
  cache.decode.parts_sums = cache.decode.parts + parts * rows_of(a) * a.head_dim_v;
  cache.ring = true, cache.fused = c.cache.added > 0;
  cache.overlaps = overlaps(c.cache, c.bits), cache.early = c.cache.early && cache.overlaps;
  if (!fits_grid(all, 1, 1) || !fits_grid(rows_of(a), 1, 1)) return kTooMany;
  const CodesParams p = make_codes(c, cache);
  launch_tiles(*tiling, a, all, stream, p, cache.overlaps);
  launch_combine(kCombine, a, stream, cache.overlaps, p);
  return last_error();
}

const char* kvcache_compress_cuda(const CodesAttention& c, int64_t first, void* stream) {
  const Attention& a = c.cache.attend.problem;
  const int64_t groups = c.cache.added / c.group;
  if (a.batch * a.heads_k * groups == 0) return nullptr;
  const Tiling<CodesParams>* tiling = tiling_of(c);
  if (!tiling) return kNone;
  if (!fits_grid(a.batch, a.heads_k, groups)) return kTooMany;
  CodesParams p = make_codes(c, make_cache(c.cache, *tiling, 1, nullptr));
  p.from_k = make_tensor(c.cache.new_k), p.from_v = make_tensor(c.cache.new_v);
  p.first = static_cast<int>(first), p.groups = static_cast<int>(groups);
  launch(kCompress.of(a), {blocks(a.batch * a.heads_k * groups), {128}, stream}, p);
  return last_error();
}

}  // namespace flexops
