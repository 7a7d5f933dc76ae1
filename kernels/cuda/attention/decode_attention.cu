// Split-KV decode attention (Flash-Decoding) over paged bf16 KV: one query token per row, or a fixed number of query
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
// heads of one KV head (1..8) as the n8 side. One movmatrix turns the transposed score fragment into the
// second operand.
//
// A row with several query tokens has a column for each query token and query head, up to 16. The kernel splits more
// columns into parts and handles each part as a row. The parts of a row read the same KV at the same time, mostly from
// the L2 cache.
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int kPage = BATON_BLOCK_TOKENS;
constexpr int kMaxGroup = 8;
constexpr int kMaxRows = 1024;
// Maximum columns (query tokens times query heads) of one KV head, for a row with several query tokens.
constexpr int kMaxColumns = 16;
// With more than a few rows, a piece may exceed an equal share by one part in kPieceSlack.
constexpr int kPieceSlack = 5;
constexpr float kInf = __builtin_huge_valf();
constexpr float kLog2E = 1.4426950408889634f;
// Maximum of a column that has seen no token. Finite, so that a tile whose tokens are all masked yields no NaN.
constexpr float kNone = -1e30f;

struct Params {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  bf16* out;
  const int32_t* pages;
  const int32_t* page_indptr;
  const int32_t* kv_len;
  const int32_t* positions;
  const float* sinks;  // null: none
  float* partial;
  int32_t* counters;
  int64_t q_stride, out_stride;
  int64_t stride_block, stride_head, stride_token;
  int32_t rows, kv_heads, group, window;
  // Query tokens of a sequence; parts of a sequence, which are the rows, and query tokens of a part.
  int32_t tokens, parts, part_tokens;
  float scale_log2;
};

__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copies 16 bytes, or zeros where `valid` is false: data past the last token must not reach the MMA.
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
  int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&v);
}
// Iterator over the (row, head group) pieces of one CTA's tile range.
struct Walk {
  int pos, end;    // next piece begins at pos; the range ends before end
  int row, group;  // of the current piece
  int page, pages; // first page of the piece within the row, and pages of the piece
  int unit_begin;  // first tile of this (row, group) in the tile sequence
  int unit_pages;
};

// The piece of a CTA, if every CTA has one piece: its tile range, its row, and the first and last CTA of its
// (row, head group).
struct Piece {
  int begin = 0, end = 0, row = 0, first_block = 0, last_block = 0;
};
constexpr int kNoPieces = -1;  // as `first_block`: the CTAs have shares of the tile sequence

// Returns the number of pieces of at most `size` pages in all rows, for one head group. One warp calls it.
__device__ __forceinline__ int count_pieces(const int* first, int rows, int size) {
  int count = 0;
  for (int r = threadIdx.x; r < rows; r += WARP) count += (first[r + 1] - first[r] + size - 1) / size;
  return __reduce_add_sync(~0u, count);
}

// Splits every (row, head group) into equal pieces, one per CTA, and finds this CTA's piece. The pieces have the
// least size for which there are enough CTAs. With shares of the tile sequence, a CTA may end one (row, head group)
// and begin another, and wait for both merges. But shares are always equal, so shares are better for pieces above
// `size_max`. One warp calls it.
__device__ __forceinline__ Piece own_piece(const int* first, int rows, int groups, int size, int size_max) {
  const int lane = threadIdx.x, blocks = gridDim.x;
  while (count_pieces(first, rows, size) * groups > blocks) {
    size += (size + 7) / 8;
    if (size > size_max) return Piece{0, 0, 0, kNoPieces, 0};
  }
  int before = 0;
  for (int base = 0; base < rows; base += WARP) {
    const int row = base + lane;
    const int pages = row < rows ? first[row + 1] - first[row] : 0;
    const int pieces = (pages + size - 1) / size;
    int end = pieces * groups;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
      int y = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end += y;
    }
    const int at = (int)blockIdx.x - before - (end - pieces * groups);
    const bool is_mine = at >= 0 && at < pieces * groups;
    const unsigned who = __ballot_sync(~0u, is_mine);
    if (who) {
      Piece own;
      if (is_mine) {
        const int group = at / pieces, piece = at - group * pieces;
        const int from = (int)((int64_t)pages * piece / pieces), to = (int)((int64_t)pages * (piece + 1) / pieces);
        const int begin = first[row] * groups + group * pages;
        const int first_block = blockIdx.x - piece;
        own = Piece{begin + from, begin + to, row, first_block, first_block + pieces - 1};
      }
      const int source = __ffs(who) - 1;
      own.begin = __shfl_sync(~0u, own.begin, source);
      own.end = __shfl_sync(~0u, own.end, source);
      own.row = __shfl_sync(~0u, own.row, source);
      own.first_block = __shfl_sync(~0u, own.first_block, source);
      own.last_block = __shfl_sync(~0u, own.last_block, source);
      return own;
    }
    before += __shfl_sync(~0u, end, WARP - 1);
  }
  return Piece{};  // there are more CTAs than pieces
}

// Advances to the next piece. `first[r]` is the number of pages before row r. Empty rows have no tile and are
// skipped.
__device__ __forceinline__ bool next_piece(Walk& w, const int* first, int groups) {
  if (w.pos >= w.end) return false;
  while (first[w.row + 1] * groups <= w.pos) ++w.row;
  int base = first[w.row] * groups;
  int n = first[w.row + 1] - first[w.row];
  int off = w.pos - base;
  w.group = groups == 1 ? 0 : off / n;
  w.page = off - w.group * n;
  w.pages = min(n - w.page, w.end - w.pos);
  w.unit_begin = base + w.group * n;
  w.unit_pages = n;
  w.pos += w.pages;
  return true;
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
    return make_uint2(pack(o.x * r, o.y * r), pack(o.z * r, o.w * r));
  }
};

// Variants 41, 44 and 81 have one query token per row: warps per CTA times 10, plus KV heads per CTA. Variants of rows with
// several query tokens: one CTA of eight warps per SM, or two of four warps.
constexpr int kVerifyFew = 812;
constexpr int kVerifyMany = 422;

template <int HD, int WARPS, int STAGES, int HEADS>
__host__ __device__ constexpr int ring_bytes() {
  return WARPS * STAGES * 2 * kPage * HD * 2;
}

// HEADS: KV heads per CTA; WARPS / HEADS warps share the pages of each head. TILES: tiles of eight columns of a row
// with several query tokens, whose queries are in shared memory; 0: one query token per row, whose queries are in
// registers.
template <int HD, int WARPS, int STAGES, int HEADS, int TILES>
__global__ void __launch_bounds__(WARPS * 32) decode_attention_kernel(const __grid_constant__ Params p) {
  static_assert(TILES == 0 || HEADS == 1, "the queries in shared memory belong to one KV head");
  constexpr int NT = TILES == 0 ? 1 : TILES;
  constexpr int Q_ROW = HD + 8;  // padded, so that the lanes of a warp read different banks
  constexpr int SPLITS = WARPS / HEADS;
  constexpr int CHUNKS = HD / 8;             // 16-byte pieces of a token
  constexpr int TILE_BYTES = kPage * HD * 2;  // of K; V likewise
  constexpr int COPIES = kPage * CHUNKS / 32;
  constexpr int KS = HD / 16;
  constexpr int LEAST_PAGES = WARPS * 4;  // minimum pages of a share, if an average row has as many
  constexpr int ROW_F = HD + 4;  // floats of a head in the merge area: O, m, l and padding
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int split = warp / HEADS, sub = warp % HEADS;
  const int groups = p.kv_heads / HEADS;
  const uint32_t ring = smem_addr(smem) + warp * (STAGES * 2 * TILE_BYTES);
  const int columns = TILES == 0 ? p.group : p.group * p.part_tokens;
  float* merge = reinterpret_cast<float*>(smem + ring_bytes<HD, WARPS, STAGES, HEADS>());
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
        if (TILES > 0 && r < p.rows) {
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
      if (base - page_begin <= kPage && !waited) {  // a page that the preceding kernel may still be writing
        pdl_wait();
        waited = true;
      }
      int head = ahead.group * HEADS + sub;
      const int t0 = lane / CHUNKS, ch = lane % CHUNKS;
      int64_t off = block * p.stride_block + head * p.stride_head + t0 * p.stride_token + ch * 8;
      const bf16* k = p.k + off;
      const bf16* v = p.v + off;
      uint32_t dst = ring + stage * (2 * TILE_BYTES);
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        int t = t0 + i * (32 / CHUNKS);
        uint32_t d = dst + t * (HD * 2) + ((ch ^ (t & 7)) << 4);
        int64_t o = (int64_t)(i * (32 / CHUNKS)) * p.stride_token;
        cp_async16(d, k + o, t < left);
        cp_async16(d + TILE_BYTES, v + o, t < left);
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
  for (int r = blockIdx.x; TILES == 0 && r < p.rows; r += gridDim.x) {
    if (lens[r] > 0) continue;
    for (int i = threadIdx.x; i < p.kv_heads * p.group * HD / 8; i += WARPS * 32)
      reinterpret_cast<uint4*>(p.out + r * p.out_stride)[i] = make_uint4(0, 0, 0, 0);
  }

  const int g = lane >> 2, c = lane & 3;
  const int quad = lane >> 3, in_quad = lane & 7;
  int stage = 0;
  uint32_t qf[KS][2];
  auto load_q = [&](const Walk& w) {
    const bf16* q = p.q + w.row * p.q_stride + (int64_t)((w.group * HEADS + sub) * p.group + g) * HD + 2 * c;
#pragma unroll
    for (int i = 0; i < KS; ++i) {
      qf[i][0] = g < p.group ? *reinterpret_cast<const uint32_t*>(q + 16 * i) : 0u;
      qf[i][1] = g < p.group ? *reinterpret_cast<const uint32_t*>(q + 16 * i + 8) : 0u;
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
      *reinterpret_cast<uint4*>(queries + column * Q_ROW + d) = q;
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
    float o[NT][KS][4] = {};
    float m0[NT], m1[NT], l0[NT] = {}, l1[NT] = {};
#pragma unroll
    for (int n = 0; n < NT; ++n) m0[n] = m1[n] = TILES == 0 ? -kInf : kNone;
    for (int pg = split; pg < walk.pages; pg += SPLITS) {
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      const uint32_t kt = ring + stage * (2 * TILE_BYTES), vt = kt + TILE_BYTES;
      const int t_k = ((quad & 1) << 3) + in_quad, t_v = ((quad >> 1) << 3) + in_quad;
      auto load_keys = [&](uint32_t (&kf)[4], int i) {
        ldmatrix4(kf, kt + t_k * (HD * 2) + (((2 * i + (quad >> 1)) ^ in_quad) << 4));
      };
      auto load_values = [&](uint32_t (&vf)[4], int i) {
        ldmatrix4_trans(vf, vt + t_v * (HD * 2) + (((2 * i + (quad & 1)) ^ in_quad) << 4));
      };
      float scores[NT][4] = {};
      uint32_t vf[KS][4];
      if constexpr (TILES == 0) {
        // All fragments are loaded before the first is used: for short contexts, a tile's latency is the bound.
        uint32_t kf[KS][4];
#pragma unroll
        for (int i = 0; i < KS; ++i) load_keys(kf[i], i);
#pragma unroll
        for (int i = 0; i < KS; ++i) load_values(vf[i], i);
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < KS; ++i) mma(s[i & 1], kf[i], qf[i][0], qf[i][1]);
        __syncwarp();
        load_tile(stage);  // the tile is in registers, so its stage is free
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[0][j] = s[0][j] + s[1][j];
      } else {
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          uint32_t kf[4];
          load_keys(kf, i);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const bf16* q = queries + (8 * n + g) * Q_ROW + 16 * i + 2 * c;
            mma(scores[n], kf, *reinterpret_cast<const uint32_t*>(q), *reinterpret_cast<const uint32_t*>(q + 8));
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
        s[0] = t_lo < end0 && t_lo >= begin0 ? s[0] * p.scale_log2 : -kInf;
        s[1] = t_lo < end1 && t_lo >= begin1 ? s[1] * p.scale_log2 : -kInf;
        s[2] = t_hi < end0 && t_hi >= begin0 ? s[2] * p.scale_log2 : -kInf;
        s[3] = t_hi < end1 && t_hi >= begin1 ? s[3] * p.scale_log2 : -kInf;
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
      uint32_t b0[NT], b1[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float* s = scores[n];
        float p0 = exp2f(s[0] - m0[n]), p1 = exp2f(s[1] - m1[n]), p2 = exp2f(s[2] - m0[n]), p3 = exp2f(s[3] - m1[n]);
        l0[n] += p0 + p2;
        l1[n] += p1 + p3;
        b0[n] = transpose8x8(pack(p0, p1));
        b1[n] = transpose8x8(pack(p2, p3));
      }
#pragma unroll
      for (int i = 0; i < KS; ++i) {
        if constexpr (TILES > 0) load_values(vf[i], i);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma(o[n][i], vf[i], b0[n], b1[n]);
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
        for (int i = 0; i < KS; ++i) {
          mine[16 * i + g] = o[n][i][0];
          mine[16 * i + g + 8] = o[n][i][2];
        }
        if (g == 0) {
          mine[HD] = m0[n];
          mine[HD + 1] = l0[n];
        }
      }
      if (column + 1 < columns) {
        mine += ROW_F;
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          mine[16 * i + g] = o[n][i][1];
          mine[16 * i + g + 8] = o[n][i][3];
        }
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

template <int HD, int WARPS, int STAGES, int HEADS, int TILES>
int shared_bytes(int columns, int rows) {
  const int queries = TILES * 8 * (HD + 8) * 2 + (TILES > 0 ? (rows + TILES * 8) * 4 : 0);
  return ring_bytes<HD, WARPS, STAGES, HEADS>() + WARPS * columns * (HD + 4) * 4 + queries + (2 * rows + 8) * 4;
}

// Calls body(kernel, shared bytes for these columns and rows) for a variant.
template <int HD, class Body>
void with_variant(int variant, int columns, int rows, Body&& body) {
  switch (variant) {
    case 41: return body(decode_attention_kernel<HD, 4, 3, 1, 0>, shared_bytes<HD, 4, 3, 1, 0>(columns, rows));
    case 44: return body(decode_attention_kernel<HD, 4, 3, 4, 0>, shared_bytes<HD, 4, 3, 4, 0>(columns, rows));
    case 81: return body(decode_attention_kernel<HD, 8, 3, 1, 0>, shared_bytes<HD, 8, 3, 1, 0>(columns, rows));
    case kVerifyFew: return body(decode_attention_kernel<HD, 8, 2, 1, 2>, shared_bytes<HD, 8, 2, 1, 2>(columns, rows));
    case kVerifyMany: return body(decode_attention_kernel<HD, 4, 2, 1, 2>, shared_bytes<HD, 4, 2, 1, 2>(columns, rows));
  }
}

int32_t check_shape(int kv_heads, int group, int head_dim) {
  BATON_REQUIRE(kv_heads > 0, "kv_heads is %d; expected 1 or more", kv_heads);
  BATON_REQUIRE(group > 0, "group is %d; expected 1 to %d", group, kMaxGroup);
  if (group > kMaxGroup) return fail(BATON_UNSUPPORTED, "group is %d; expected 1 to %d", group, kMaxGroup);
  if (head_dim != 64 && head_dim != 128) {
    return fail(BATON_UNSUPPORTED, "head_dim is %d; expected 64 or 128", head_dim);
  }
  return BATON_OK;
}

int32_t check_arguments(const baton_decode_attention_args& in) {
  BATON_REQUIRE(in.rows >= 0, "rows is %d; expected 0 to %d", in.rows, kMaxRows);
  if (in.rows > kMaxRows) return fail(BATON_UNSUPPORTED, "rows is %d; expected 0 to %d", in.rows, kMaxRows);
  BATON_TRY(check_shape(in.kv_heads, in.group, in.head_dim));
  const long long width = static_cast<long long>(in.kv_heads) * in.group * in.head_dim;
  auto stride = [](const char* name, long long value, long long least) {
    BATON_REQUIRE(value >= least && value % 8 == 0, "%s is %lld; expected multiples of 8 from %lld on", name, value,
                  least);
    return static_cast<int32_t>(BATON_OK);
  };
  BATON_TRY(stride("q_stride", in.q_stride, width));
  BATON_TRY(stride("out_stride", in.out_stride, width));
  BATON_TRY(stride("stride_token", in.stride_token, in.head_dim));
  BATON_TRY(stride("stride_head", in.stride_head, 0));
  BATON_TRY(stride("stride_block", in.stride_block, 0));
  BATON_REQUIRE(in.tokens >= 0 && (in.tokens <= 1 || in.positions), "tokens is %d; more than 1 need positions", in.tokens);
  if (in.tokens > 1 && in.rows > kMaxRows / in.tokens) {
    return fail(BATON_UNSUPPORTED, "rows is %d with %d tokens each; their product is at most %d", in.rows, in.tokens,
                kMaxRows);
  }
  BATON_REQUIRE(in.window >= 0, "window is %d; expected 0 or more", in.window);
  BATON_REQUIRE(in.sms >= 0, "sms is %d; expected 0 or more", in.sms);
  BATON_REQUIRE(in.q && in.k && in.v && in.pages && in.page_indptr && in.kv_len && in.out && in.partial && in.counters,
                "an address is null");
  return BATON_OK;
}

}  // namespace

int32_t load_decode_attention() {
  const Device* device;
  BATON_TRY(any_device(device));
  auto all = [&](auto dim) {
    int32_t code = BATON_OK;
    for (int variant : {41, 44, 81, kVerifyFew, kVerifyMany}) {
      const int columns = variant == kVerifyFew || variant == kVerifyMany ? kMaxColumns : kMaxGroup;
      with_variant<decltype(dim)::value>(variant, columns, kMaxRows, [&](auto* kernel, int most) {
        // The largest group and the most rows together exceed the shared memory of a Hopper CTA; each alone fits.
        if (code == BATON_OK) code = load(kernel, most < device->shared_bytes ? most : device->shared_bytes);
      });
    }
    return code;
  };
  BATON_TRY(all(std::integral_constant<int, 64>()));
  return all(std::integral_constant<int, 128>());
}

}  // namespace baton

using namespace baton;

BATON_API int64_t baton_decode_attention_workspace(int32_t sms, int32_t kv_heads, int32_t group, int32_t head_dim) {
  int64_t bytes = 0;
  guarded([&]() -> int32_t {
    BATON_REQUIRE(sms >= 0, "sms is %d; expected 0 or more", sms);
    BATON_TRY(check_shape(kv_heads, group, head_dim));
    const Device* device;
    if (sms == 0) {
      BATON_TRY(any_device(device));
      sms = device->sm_count;
    }
    // Two pieces per CTA, and per SM two CTAs of four heads or of the columns of draft tokens.
    const int64_t heads = (kv_heads < 4 ? kv_heads : 4) * group;
    bytes = int64_t{sms} * 2 * 2 * (heads < kMaxColumns ? kMaxColumns : heads) * (head_dim + 4) * 4;
    return BATON_OK;
  });
  return bytes;
}

BATON_API int32_t baton_decode_attention(const baton_decode_attention_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_decode_attention_args& in = *args;
    BATON_TRY(check_arguments(in));
    if (in.rows == 0) return BATON_OK;
    const Device* device;
    BATON_TRY(any_device(device));
    const int sms = in.sms > 0 ? in.sms : device->sm_count;
    Params p;
    p.tokens = p.parts = p.part_tokens = 1;
    if (in.tokens > 1) {
      p.tokens = in.tokens;
      p.parts = divide_up(in.tokens, kMaxColumns / in.group);
      p.part_tokens = divide_up(in.tokens, p.parts);
    }
    const int columns = p.part_tokens * in.group, rows = in.rows * p.parts;
    // Four heads of every row per CTA where that just fits: rows of equal length then need no merge.
    const int blocks_of_four = in.rows * (in.kv_heads / 4);
    const bool fits_four = in.kv_heads % 4 == 0 && blocks_of_four <= 2 * sms && blocks_of_four * 9 >= 2 * sms * 8;
    int variant = in.rows < 16 ? 81 : fits_four && in.rows > WARP ? 44 : 41;
    if (in.tokens > 1) {
      variant = kVerifyMany;
      if (rows * in.kv_heads <= sms) {
        with_variant<128>(kVerifyFew, columns, rows, [&](auto*, int bytes) {
          if (bytes <= device->shared_bytes) variant = kVerifyFew;
        });
      }
    }
    p.q = static_cast<const bf16*>(in.q);
    p.k = static_cast<const bf16*>(in.k);
    p.v = static_cast<const bf16*>(in.v);
    p.out = static_cast<bf16*>(in.out);
    p.pages = in.pages;
    p.page_indptr = in.page_indptr;
    p.kv_len = in.kv_len;
    p.positions = in.positions;
    p.sinks = in.sinks;
    p.partial = static_cast<float*>(in.partial);
    p.counters = in.counters;
    p.q_stride = in.q_stride;
    p.out_stride = in.out_stride;
    p.stride_block = in.stride_block;
    p.stride_head = in.stride_head;
    p.stride_token = in.stride_token;
    p.rows = rows;
    p.kv_heads = in.kv_heads;
    p.group = in.group;
    p.window = in.window;
    const int warps = variant == 81 || variant == kVerifyFew ? 8 : 4;
    p.scale_log2 = in.scale * kLog2E;
    int32_t code = BATON_OK;
    auto start = [&](auto* kernel, int bytes) {
      if (bytes > device->shared_bytes) {
        code = fail(BATON_UNSUPPORTED, "variant %d, %d columns and %d rows need %d bytes of shared memory; a CTA has at most %d",
                    variant, columns, rows, bytes, device->shared_bytes);
        return;
      }
      const int ctas = warps == 4 ? 2 * sms : sms;
      code = launch_as(in.pdl != 0, "decode attention", kernel, dim3(ctas), dim3(warps * WARP),
                       bytes, as_stream(stream), p);
    };
    if (in.head_dim == 64) {
      with_variant<64>(variant, columns, rows, start);
    } else {
      with_variant<128>(variant, columns, rows, start);
    }
    return code;
  });
}
