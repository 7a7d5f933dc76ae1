// Split-KV decode attention (Flash-Decoding) over paged KV: one query token per row, or a fixed number of query
// tokens per row that verify draft tokens. Lengths may be mixed, and the host makes no plan.
//
// The work is a sequence of tiles ordered by (row, group of KV heads, page); a tile is one page of 16 tokens. The
// tiles are split into equal ranges, one per CTA, by the lengths in device memory (as stream-K splits a GEMM). A
// captured launch stays valid for any lengths, and the ranges differ by at most one tile. With enough CTAs for every
// (row, head group), each (row, head group) is split into equal pieces, one per CTA, so that no CTA waits for two
// merges. If several CTAs share a (row, head group), the last CTA to finish merges their results and resets the
// counter to zero.
//
// Within a CTA every warp streams its own tiles through its own ring in shared memory (cp.async, swizzled),
// so the inner loop has no barrier. S^T = K Q^T and O^T = V^T P^T run on the tensor cores with the query
// heads of one KV head as the n8 side. One movmatrix turns the transposed score fragment into the
// second operand.
//
// A row with several query tokens has a column for each query token and query head, up to 16. The kernel splits more
// columns into parts and handles each part as a row. The parts of a row read the same KV at the same time, mostly from
// the L2 cache.
#pragma once

#include "formats.cuh"
#include "pieces.cuh"

namespace baton {
namespace {

constexpr int kPage = BATON_BLOCK_TOKENS;
constexpr int kLine = 128;  // bytes of a cache line
// Maximum query heads of a KV head whose queries are in registers.
constexpr int kMaxGroup = 8;
// Maximum columns (query tokens times query heads) of one KV head.
constexpr int kMaxColumns = 16;
// With more than a few rows, a piece may exceed an equal share by one part in kPieceSlack.
constexpr int kPieceSlack = 5;
constexpr float kInf = __builtin_huge_valf();
constexpr float kLog2E = 1.4426950408889634f;
// Maximum of a column that has seen no token. Finite, so that a tile whose tokens are all masked yields no NaN.
constexpr float kNone = -1e30f;

struct Params {
  const bf16* q;
  const void* k;
  const void* v;
  bf16* out;
  const int32_t* pages;
  const int32_t* page_indptr;
  const int32_t* kv_len;
  const int32_t* positions;
  const float* sinks;  // null: none
  float* partial;
  int32_t* counters;
  int64_t q_stride, out_stride;
  int64_t block_bytes, head_bytes;  // strides of KV
  int32_t rows, kv_heads, group, window;
  // Query tokens of a sequence; parts of a sequence, which are the rows, and query tokens of a part.
  int32_t tokens, parts, part_tokens;
  float scale_log2;
};

// Returns the offset in bytes of a 16-byte piece of a tile. The pieces of eight tokens' equal dimensions are in different
// banks.
template <int CHUNKS>
__device__ __forceinline__ int slot_offset(int token, int chunk) {
  return (token * CHUNKS + (chunk ^ (token & 7))) * 16;
}
// Returns the offset of a slot of KV with scales. A head of such KV starts at any multiple of 16 bytes. Its first slot is
// chosen such that two pieces in one 32-byte sector of global memory are also in one sector here. Otherwise, cp.async
// writes shared memory at half the speed.
template <int CHUNKS>
__device__ __forceinline__ int slot_offset(unsigned slot) {
  const unsigned line = slot / 8;
  const unsigned turn = CHUNKS >= 8 ? line * 8 / CHUNKS & 7 : line & 3;
  return (line * 8 + (slot % 8 ^ turn)) * 16;
}

// Online merge of partial results of one head, in f32 with base-2 exponents.
struct Merge {
  float m = -kInf, l = 0.f;
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
  __device__ __forceinline__ void add(float m2, float l2, float4 o2) {
    float mn = fmaxf(m, m2);
    if (mn == -kInf) return;
    float a = exp2f(m - mn), b = exp2f(m2 - mn);
    o.x = o.x * a + o2.x * b;
    o.y = o.y * a + o2.y * b;
    o.z = o.z * a + o2.z * b;
    o.w = o.w * a + o2.w * b;
    l = l * a + l2 * b;
    m = mn;
  }
  __device__ __forceinline__ uint2 bf16x4() const {
    float r = l > 0.f ? 1.f / l : 0.f;
    return make_uint2(Bf16Kv::pack(o.x * r, o.y * r), Bf16Kv::pack(o.z * r, o.w * r));
  }
};

// Bytes of a half (K or V) of a tile. With scales, there is a line more for them and for the shift of the slots.
template <class KV, int HD>
__host__ __device__ constexpr int half_bytes() {
  return kPage * HD * static_cast<int>(sizeof(typename KV::Element)) + (KV::HAS_SCALES ? kLine : 0);
}
template <class KV, int HD, int WARPS, int STAGES>
__host__ __device__ constexpr int ring_bytes() {
  return WARPS * STAGES * 2 * half_bytes<KV, HD>();
}

// HEADS: KV heads per CTA; WARPS / HEADS warps share the pages of each head. TILES: tiles of eight columns of a row,
// whose queries are in shared memory; 0: one query token per row and up to kMaxGroup query heads, whose queries are in
// registers.
template <class KV, int HD, int WARPS, int STAGES, int HEADS, int TILES>
__global__ void __launch_bounds__(WARPS * 32, 8 / WARPS) decode_attention_kernel(const __grid_constant__ Params p) {
  static_assert(TILES == 0 || HEADS == 1, "the queries in shared memory belong to one KV head");
  constexpr int NT = TILES == 0 ? 1 : TILES;
  using Element = typename KV::Element;
  constexpr int Q_ROW = HD + KV::QUERY_PAD;
  constexpr int SPLITS = WARPS / HEADS;
  constexpr int CHUNKS = HD * sizeof(Element) / 16;  // 16-byte pieces of a token
  constexpr int PIECES = kPage * CHUNKS;             // of K in a tile, followed by the scales; V likewise
  constexpr int HALF_BYTES = half_bytes<KV, HD>(), STAGE_BYTES = 2 * HALF_BYTES;
  constexpr int KS = HD / 16;             // steps of 16 dimensions
  constexpr int RAWS = KS / KV::STEPS;    // raw fragments
  constexpr int LEAST_PAGES = WARPS * 4;  // minimum pages of a share, if an average row has as many
  constexpr int ROW_F = HD + 4;  // floats of a head in the merge area: O, m, l and padding
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int split = warp / HEADS, sub = warp % HEADS;
  const int groups = p.kv_heads / HEADS;
  const uint32_t ring = smem_addr(smem) + warp * (STAGES * STAGE_BYTES);
  const int columns = TILES == 0 ? p.group : p.group * p.part_tokens;
  float* merge = reinterpret_cast<float*>(smem + ring_bytes<KV, HD, WARPS, STAGES>());
  bf16* queries = reinterpret_cast<bf16*>(merge + WARPS * columns * ROW_F);
  int* first = reinterpret_cast<int*>(queries + TILES * 8 * Q_ROW);
  int* lens = first + p.rows + 1;
  int* last_flag = lens + p.rows;
  Piece* own = reinterpret_cast<Piece*>(last_flag + 1);
  // For each row, the tokens that the first query token sees; for each column of the current piece, the tokens that it
  // sees.
  int* bases = TILES == 0 ? lens : reinterpret_cast<int*>(own + 1);
  int* limits = bases + p.rows;
  auto sequence_of = [&](int row) { return TILES == 0 ? row : row / p.parts; };
  // Query tokens of the row's sequence before those of the row.
  auto tokens_before = [&](int row) { return TILES == 0 ? 0 : row % p.parts * p.part_tokens; };

  // No kernel that may still run writes the lengths: every kernel of a step releases its successors only
  // after its own wait. So this code may run before the preceding kernel has completed.
  if (warp == 0) {
    int sum = 0;
    for (int base = 0; base < p.rows; base += 128) {
      int len[4], seen[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = base + i * 32 + lane;
        seen[i] = len[i] = r < p.rows ? p.kv_len[sequence_of(r)] : 0;
        if (TILES > 0 && p.tokens > 1 && r < p.rows) {
          seen[i] = p.positions[sequence_of(r) * p.tokens + tokens_before(r)] + 1;
          len[i] = min(len[i], seen[i] + p.part_tokens - 1);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = base + i * 32 + lane;
        int skip = p.window > 0 && seen[i] > p.window ? (seen[i] - p.window) / kPage : 0;
        int n = (len[i] + kPage - 1) / kPage - skip;
        int x = n;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          int y = __shfl_up_sync(~0u, x, d);
          if (lane >= d) x += y;
        }
        if (r < p.rows) {
          first[r] = sum + x - n;
          lens[r] = len[i];
          if (TILES > 0) bases[r] = seen[i];
        }
        sum += __shfl_sync(~0u, x, 31);
      }
    }
    if (lane == 0) first[p.rows] = sum;
    __syncwarp();
    Piece piece{0, 0, 0, kNoPieces, 0};
    if (sum > 0 && p.rows * groups <= (int)gridDim.x) {
      const int share = (sum * groups + (int)gridDim.x - 1) / (int)gridDim.x;
      const int least = min(LEAST_PAGES, (sum + p.rows - 1) / p.rows);
      // With few rows, pieces may have any size: each row takes long compared with a merge, or all rows are short.
      const int size_max = p.rows <= WARP ? 0x7fffffff : share + share / kPieceSlack;
      piece = own_piece(first, p.rows, groups, max(max(share, least), 1), size_max);
    }
    if (lane == 0) *own = piece;
  }
  __syncthreads();

  const bool has_pieces = own->first_block != kNoPieces;
  const int total = first[p.rows] * groups;
  // A share has at least LEAST_PAGES pages, or the pages of an average row if these are fewer. Smaller shares would
  // split a short row between CTAs, which then wait to merge their results.
  const int least = min(LEAST_PAGES, (first[p.rows] + p.rows - 1) / p.rows);
  const int per_block = max(max((total + (int)gridDim.x - 1) / (int)gridDim.x, least), 1);
  Walk walk;
  walk.pos = min(total, (int)blockIdx.x * per_block);
  walk.end = min(total, walk.pos + per_block);
  walk.row = 0;
  if (has_pieces) {
    walk.pos = own->begin;
    walk.end = own->end;
    walk.row = own->row;
  } else if (walk.pos < walk.end) {
    int lo = 0, hi = p.rows - 1;  // last row whose first page is not after pos
    int want = walk.pos / groups;
    while (lo < hi) {
      int mid = (lo + hi + 1) / 2;
      if (first[mid] <= want) lo = mid; else hi = mid - 1;
    }
    walk.row = lo;
  }

  // The loading iterator runs STAGES tiles ahead of the computing iterator.
  Walk ahead = walk;
  bool ahead_ok = next_piece(ahead, first, groups);
  int ahead_page = split, ahead_batch = 0, ahead_ids = 0;
  bool waited = false;
  // Slots that stay free before the first piece of a half, so that slots are aligned as in the cache lines of block 0.
  auto shift_of = [&](const void* half, int head) {
    if constexpr (!KV::HAS_SCALES) return 0;
    return static_cast<int>((static_cast<uint32_t>(reinterpret_cast<uintptr_t>(half)) + head * static_cast<uint32_t>(p.head_bytes)) /
                            16 % (kLine / 16));
  };
  auto row_pages = [&](int r) { return (int64_t)p.page_indptr[sequence_of(r)]; };
  auto load_tile = [&](int stage) {
    while (ahead_ok && ahead_page >= ahead.pages) {
      ahead_ok = next_piece(ahead, first, groups);
      ahead_page = split;
      ahead_batch = 0;
    }
    if (ahead_ok) {
      int len = lens[ahead.row], base = bases[ahead.row];
      int skip = p.window > 0 && base > p.window ? (base - p.window) / kPage : 0;
      if (ahead_batch == 0) {  // the page ids of this warp's next 32 tiles, one per lane
        int pg = ahead_page + lane * SPLITS;
        ahead_ids = pg < ahead.pages ? p.pages[row_pages(ahead.row) + skip + ahead.page + pg] : 0;
      }
      int64_t block = __shfl_sync(~0u, ahead_ids, ahead_batch);
      int page_begin = (skip + ahead.page + ahead_page) * kPage;
      int left = len - page_begin;
      // The preceding kernel may still be writing pages from that of the sequence's first query token on.
      if (!waited && base - tokens_before(ahead.row) - page_begin <= kPage) {
        pdl_wait();
        waited = true;
      }
      int head = ahead.group * HEADS + sub;
      const int tokens = min(left, kPage);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const void* of_layer = half == 0 ? p.k : p.v;
        const int shift = shift_of(of_layer, head);
        const char* from = static_cast<const char*>(of_layer) + block * p.block_bytes + head * p.head_bytes + (lane - shift) * 16;
        const uint32_t to = ring + stage * STAGE_BYTES + half * HALF_BYTES;
        const int tokens_end = shift + tokens * CHUNKS, pieces_end = shift + PIECES;
#pragma unroll
        for (int i = 0; i < PIECES / 32; ++i) {
          const int slot = lane + 32 * i;
          const bool is_read = i > 0 || !KV::HAS_SCALES || slot >= shift;
          const int at = KV::HAS_SCALES ? slot_offset<CHUNKS>(slot) : slot_offset<CHUNKS>(slot / CHUNKS, slot % CHUNKS);
          if (is_read) cp_async16(to + at, from + 512 * i, slot < tokens_end ? 16 : 0);
        }
        const int slot = lane + PIECES;  // the last pieces and the scales
        if (KV::HAS_SCALES && slot <= pieces_end) {
          const int bytes = slot == pieces_end ? tokens : slot < tokens_end ? 16 : 0;
          cp_async16(to + slot_offset<CHUNKS>(slot), from + 16 * PIECES, bytes);
        }
      }
      ahead_page += SPLITS;
      ahead_batch = (ahead_batch + 1) & 31;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) load_tile(s);

  pdl_wait();
  waited = true;
  pdl_release();

  // Zeroes the output of rows without KV (padding). The output of padding that verifies draft tokens is undefined.
  for (int r = blockIdx.x; p.tokens == 1 && r < p.rows; r += gridDim.x) {
    if (lens[r] > 0) continue;
    for (int i = threadIdx.x; i < p.kv_heads * p.group * HD / 8; i += WARPS * 32)
      reinterpret_cast<uint4*>(p.out + r * p.out_stride)[i] = make_uint4(0, 0, 0, 0);
  }

  const int g = lane >> 2, c = lane & 3;
  const int quad = lane >> 3, in_quad = lane & 7;
  int stage = 0;
  uint32_t qf[KS][2];
  auto load_q = [&](const Walk& w) {
    const bf16* q = p.q + w.row * p.q_stride + (int64_t)((w.group * HEADS + sub) * p.group + g) * HD;
#pragma unroll
    for (int i = 0; i < KS; ++i) {
      qf[i][0] = qf[i][1] = 0;
      if (g < p.group) KV::queries(qf[i], q + 16 * i, c);
    }
  };
  auto share_queries = [&](const Walk& w) {
    for (int i = threadIdx.x; i < TILES * 8 * (HD / 8); i += WARPS * 32) {
      const int column = i / (HD / 8), d = i % (HD / 8) * 8;
      const int token = tokens_before(w.row) + column / p.group;
      uint4 q = make_uint4(0, 0, 0, 0);
      if (column < columns && token < p.tokens) {
        const int64_t row = (int64_t)sequence_of(w.row) * p.tokens + token;
        const int head = w.group * p.group + column % p.group;
        q = *reinterpret_cast<const uint4*>(p.q + row * p.q_stride + (int64_t)head * HD + d);
      }
      *reinterpret_cast<uint4*>(queries + column * Q_ROW + d) = KV::stored_queries(q);
    }
    for (int i = threadIdx.x; i < TILES * 8; i += WARPS * 32) {
      limits[i] = i < columns ? min(bases[w.row] + i / p.group, lens[w.row]) : 0;
    }
    __syncthreads();
  };
  bool more = next_piece(walk, first, groups);
  if (TILES == 0 && more) load_q(walk);
  while (more) {
    if constexpr (TILES > 0) share_queries(walk);
    const int len = lens[walk.row];
    const int page0 = (p.window > 0 ? max(0, bases[walk.row] - p.window) : 0) / kPage + walk.page;
    const int head = walk.group * HEADS + sub, key_shift = shift_of(p.k, head), value_shift = shift_of(p.v, head);
    float o[NT][KS][4] = {};
    float m0[NT], m1[NT], l0[NT] = {}, l1[NT] = {};
#pragma unroll
    for (int n = 0; n < NT; ++n) m0[n] = m1[n] = TILES == 0 ? -kInf : kNone;
    for (int pg = split; pg < walk.pages; pg += SPLITS) {
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      const uint32_t kt = ring + stage * STAGE_BYTES, vt = kt + HALF_BYTES;
      auto piece_offset = [&](int shift, int token, int chunk) {
        if constexpr (!KV::HAS_SCALES) return slot_offset<CHUNKS>(token, chunk);
        return slot_offset<CHUNKS>(shift + token * CHUNKS + chunk);
      };
      auto load_keys = [&](uint32_t (&raw)[4], int i) {
        ldmatrix4(raw, kt + piece_offset(key_shift, (quad & 1) * 8 + in_quad, 2 * i + (quad >> 1)));
      };
      auto load_values = [&](uint32_t (&raw)[4], int i) {
        ldmatrix4_trans(raw, vt + piece_offset(value_shift, (quad >> 1) * 8 + in_quad, 2 * i + (quad & 1)));
      };
      // Factors of the scores of tokens g and g + 8, and of their probabilities.
      float key_factors[2] = {p.scale_log2, p.scale_log2}, value_factors[2] = {1.f, 1.f};
      if constexpr (KV::HAS_SCALES) {
        const char* tile = smem + (warp * STAGES + stage) * STAGE_BYTES + g;
        const char* keys = tile + slot_offset<CHUNKS>(key_shift + PIECES);
        const char* values = tile + HALF_BYTES + slot_offset<CHUNKS>(value_shift + PIECES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          key_factors[half] *= KV::key_scale(static_cast<uint8_t>(keys[8 * half]));
          value_factors[half] = KV::value_scale(static_cast<uint8_t>(values[8 * half]));
        }
      }
      float scores[NT][4] = {};
      uint32_t vf[RAWS][4];
      if constexpr (TILES == 0) {
        // All fragments are loaded before the first is used: for short contexts, a tile's latency is the bound.
        uint32_t kf[RAWS][4];
#pragma unroll
        for (int i = 0; i < RAWS; ++i) load_keys(kf[i], i);
#pragma unroll
        for (int i = 0; i < RAWS; ++i) load_values(vf[i], i);
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          uint32_t keys[4];
          KV::keys(keys, kf[i / KV::STEPS], i % KV::STEPS);
          KV::mma(s[i & 1], keys, qf[i]);
        }
        __syncwarp();
        load_tile(stage);  // the tile is in registers, so its stage is free
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[0][j] = s[0][j] + s[1][j];
      } else {
        uint32_t kf[4];
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          uint32_t keys[4];
          if (i % KV::STEPS == 0) load_keys(kf, i / KV::STEPS);
          KV::keys(keys, kf, i % KV::STEPS);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            uint32_t q[2];
            KV::shared_queries(q, queries + (8 * n + g) * Q_ROW + 16 * i, c);
            KV::mma(scores[n], keys, q);
          }
        }
      }
      const int t_lo = (page0 + pg) * kPage + g, t_hi = t_lo + 8;
      // Each phase runs for all column tiles, so that their latencies overlap.
      float a0[NT], a1[NT];
      bool is_greater = false;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float* s = scores[n];
        const int end0 = TILES == 0 ? len : limits[8 * n + 2 * c], end1 = TILES == 0 ? len : limits[8 * n + 2 * c + 1];
        const int begin0 = p.window > 0 ? end0 - p.window : 0, begin1 = p.window > 0 ? end1 - p.window : 0;
        s[0] = t_lo < end0 && t_lo >= begin0 ? s[0] * key_factors[0] : -kInf;
        s[1] = t_lo < end1 && t_lo >= begin1 ? s[1] * key_factors[0] : -kInf;
        s[2] = t_hi < end0 && t_hi >= begin0 ? s[2] * key_factors[1] : -kInf;
        s[3] = t_hi < end1 && t_hi >= begin1 ? s[3] * key_factors[1] : -kInf;
        a0[n] = fmaxf(s[0], s[2]);
        a1[n] = fmaxf(s[1], s[3]);
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          a0[n] = fmaxf(a0[n], __shfl_xor_sync(~0u, a0[n], d));
          a1[n] = fmaxf(a1[n], __shfl_xor_sync(~0u, a1[n], d));
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) is_greater = is_greater || a0[n] > m0[n] || a1[n] > m1[n];
      if (__any_sync(~0u, is_greater)) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          float n0 = fmaxf(m0[n], a0[n]), n1 = fmaxf(m1[n], a1[n]);
          float r0 = exp2f(m0[n] - n0), r1 = exp2f(m1[n] - n1);
          m0[n] = n0;
          m1[n] = n1;
          l0[n] *= r0;
          l1[n] *= r1;
#pragma unroll
          for (int i = 0; i < KS; ++i) {
            o[n][i][0] *= r0;
            o[n][i][1] *= r1;
            o[n][i][2] *= r0;
            o[n][i][3] *= r1;
          }
        }
      }
      uint32_t probabilities[NT][2];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float* s = scores[n];
        float p0 = exp2f(s[0] - m0[n]), p1 = exp2f(s[1] - m1[n]), p2 = exp2f(s[2] - m0[n]), p3 = exp2f(s[3] - m1[n]);
        l0[n] += p0 + p2;
        l1[n] += p1 + p3;
        if constexpr (KV::HAS_SCALES) {
          p0 *= value_factors[0], p1 *= value_factors[0];
          p2 *= value_factors[1], p3 *= value_factors[1];
        }
        probabilities[n][0] = transpose8x8(KV::pack(p0, p1));
        probabilities[n][1] = transpose8x8(KV::pack(p2, p3));
      }
#pragma unroll
      for (int i = 0; i < KS; ++i) {
        uint32_t values[4];
        if (TILES > 0 && i % KV::STEPS == 0) load_values(vf[i / KV::STEPS], i / KV::STEPS);
        KV::values(values, vf[i / KV::STEPS], i % KV::STEPS);
#pragma unroll
        for (int n = 0; n < NT; ++n) KV::mma(o[n][i], values, probabilities[n]);
      }
      if constexpr (TILES > 0) {
        __syncwarp();
        load_tile(stage);
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    const Walk done = walk;
    more = next_piece(walk, first, groups);
    if (TILES == 0 && more) load_q(walk);  // the loads are in flight while this piece is merged
    // Every warp stores its O, m and l, then the CTA's threads merge them.
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        l0[n] += __shfl_xor_sync(~0u, l0[n], d);
        l1[n] += __shfl_xor_sync(~0u, l1[n], d);
      }
      const int column = 8 * n + 2 * c;
      float* mine = merge + (warp * columns + column) * ROW_F;
      if (column < columns) {
#pragma unroll
        for (int i = 0; i < KS; ++i) KV::store(mine + 16 * i, g, o[n][i][0], o[n][i][2]);
        if (g == 0) {
          mine[HD] = m0[n];
          mine[HD + 1] = l0[n];
        }
      }
      if (column + 1 < columns) {
        mine += ROW_F;
#pragma unroll
        for (int i = 0; i < KS; ++i) KV::store(mine + 16 * i, g, o[n][i][1], o[n][i][3]);
        if (g == 0) {
          mine[HD] = m1[n];
          mine[HD + 1] = l1[n];
        }
      }
    }
    __syncthreads();
    const int items = HEADS * columns * (HD / 4);
    auto head_of = [&](int hg) {
      return TILES == 0 ? done.group * HEADS * p.group + hg : done.group * p.group + hg % p.group;
    };
    auto store = [&](int hg, int d, const Merge& acc) {
      const int token = TILES == 0 ? 0 : tokens_before(done.row) + hg / p.group;
      if (TILES > 0 && token >= p.tokens) return;  // the last part of a sequence may have fewer tokens
      const int64_t row = TILES == 0 ? done.row : (int64_t)sequence_of(done.row) * p.tokens + token;
      *reinterpret_cast<uint2*>(p.out + row * p.out_stride + (int64_t)head_of(hg) * HD + d) = acc.bf16x4();
    };
    // The sink counts once: in the merge of all results of a (row, head).
    auto add_sink = [&](Merge& acc, int hg) {
      if (p.sinks) acc.add(p.sinks[head_of(hg)] * kLog2E, 1.f, make_float4(0.f, 0.f, 0.f, 0.f));
    };
    const int unit_end = done.unit_begin + done.unit_pages;
    const int b_first = has_pieces ? own->first_block : done.unit_begin / per_block;
    const int b_last = has_pieces ? own->last_block : (unit_end - 1) / per_block;
    const int64_t part_floats = (int64_t)HEADS * columns * ROW_F;
    // A CTA has at most one piece that began in an earlier CTA (slot 0), and one that continues in a later
    // CTA (slot 1).
    float* part = p.partial + ((int64_t)blockIdx.x * 2 + (done.page == 0 ? 1 : 0)) * part_floats;
    for (int it = threadIdx.x; it < items; it += WARPS * 32) {
      int hg = it / (HD / 4), d = (it % (HD / 4)) * 4;
      int hs = hg / columns, j = hg - hs * columns;
      Merge acc;
      if (b_first == b_last) add_sink(acc, hg);
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) {
        const float* src = merge + ((s * HEADS + hs) * columns + j) * ROW_F;
        acc.add(src[HD], src[HD + 1], *reinterpret_cast<const float4*>(src + d));
      }
      if (b_first == b_last) {
        store(hg, d, acc);
      } else {
        *reinterpret_cast<float4*>(part + hg * ROW_F + d) = acc.o;
        if (d == 0) *reinterpret_cast<float2*>(part + hg * ROW_F + HD) = make_float2(acc.m, acc.l);
      }
    }
    if (b_first != b_last) {
      __threadfence();
      __syncthreads();
      int32_t* counter = p.counters + done.row * groups + done.group;
      if (threadIdx.x == 0) {
        int arrived = atomicAdd(counter, 1);
        *last_flag = arrived == b_last - b_first;
      }
      __syncthreads();
      if (*last_flag) {
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        // The loads of several results and parts are in flight together.
        constexpr int B = TILES == 0 ? 8 : 4, U = TILES == 0 ? 1 : 3;
        for (int base = threadIdx.x; base < items; base += U * WARPS * 32) {
          Merge acc[U];
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const int it = base + u * WARPS * 32;
            if (it < items) add_sink(acc[u], it / (HD / 4));
          }
          for (int b = b_first; b <= b_last; b += B) {
            float2 ml[U][B];
            float4 ov[U][B];
#pragma unroll
            for (int u = 0; u < U; ++u) {
              const int it = base + u * WARPS * 32, hg = it / (HD / 4), d = (it % (HD / 4)) * 4;
#pragma unroll
              for (int i = 0; i < B; ++i) {
                ml[u][i] = make_float2(-kInf, 0.f);
                ov[u][i] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (b + i <= b_last && it < items) {
                  const float* src =
                      p.partial + ((int64_t)(b + i) * 2 + (b + i == b_first ? 1 : 0)) * part_floats + hg * ROW_F;
                  ml[u][i] = __ldcg(reinterpret_cast<const float2*>(src + HD));
                  ov[u][i] = __ldcg(reinterpret_cast<const float4*>(src + d));
                }
              }
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
#pragma unroll
              for (int i = 0; i < B; ++i) acc[u].add(ml[u][i].x, ml[u][i].y, ov[u][i]);
            }
          }
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const int it = base + u * WARPS * 32;
            if (it < items) store(it / (HD / 4), (it % (HD / 4)) * 4, acc[u]);
          }
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace baton
