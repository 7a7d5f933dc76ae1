// Split-KV decode attention over paged bf16 KV: one query token a row, any mix of lengths, no host plan.
//
// The work is a line of tiles ordered by (row, group of KV heads, page); a tile is one page of 16 tokens. The
// line is cut into equal ranges, one a block of the grid, from the lengths in device memory: a captured launch
// stays right whatever the lengths are when it is replayed, and the balance is within one tile. A (row, head
// group) that crosses a cut is merged by the block that arrives last; its counter is left at zero again.
//
// Inside a block every warp streams its own tiles through its own ring in shared memory (cp.async, swizzled), so
// no barrier stands in the stream. S^T = K Q^T and O^T = V^T P^T run on the tensor cores with the query heads of
// one KV head (1..8) as the n8 side; the transposed score fragment is one movmatrix away from the second operand.
#include "decode_attention.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

using bf16 = __nv_bfloat16;
constexpr int kPage = 16;
constexpr int kMaxGroup = 8;
constexpr int kMaxRows = 1024;
constexpr float kInf = __builtin_huge_valf();
constexpr int32_t kInvalid = 1, kUnsupported = 2, kCuda = 1000;  // as in baton_kernels.h

struct Params {
  const bf16* q;
  const bf16* k;
  const bf16* v;
  bf16* out;
  const int32_t* pages;
  const int32_t* page_indptr;
  const int32_t* kv_len;
  float* partial;
  int32_t* counters;
  int64_t q_stride, out_stride, table_stride;
  int64_t stride_block, stride_head, stride_token;
  int32_t rows, kv_heads, group, window, least_pages;
  float scale_log2;
};

__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copies 16 bytes, or zeros where `valid` is false: what lies behind the last token must not reach a product.
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
__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// A walk over the (row, head group) pieces of one block's range of the line.
struct Walk {
  int pos, end;    // next piece begins at pos; the range ends before end
  int row, group;  // of the current piece
  int page, pages; // its first page within the row's pages, and how many of them are ours
  int unit_begin;  // where this (row, group) begins on the line
  int unit_pages;
};

// `first` of the rows: pages before row r. Empty rows have no tile and are stepped over.
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

// Online combination of partial results of one head: two or more come together, in f32 and base-2 exponents.
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

template <int HD, int WARPS, int STAGES, int HEADS>
__host__ __device__ constexpr int ring_bytes() {
  return WARPS * STAGES * 2 * kPage * HD * 2;
}

// HEADS: KV heads a block works on side by side; WARPS / HEADS warps share the pages of each.
template <int HD, int WARPS, int STAGES, int HEADS>
__global__ void __launch_bounds__(WARPS * 32) decode_attention_kernel(const __grid_constant__ Params p) {
  constexpr int SPLITS = WARPS / HEADS;
  constexpr int CHUNKS = HD / 8;             // 16-byte pieces of a token
  constexpr int TILE_BYTES = kPage * HD * 2;  // of K; V likewise
  constexpr int COPIES = kPage * CHUNKS / 32;
  constexpr int KS = HD / 16;
  constexpr int ROW_F = HD + 4;  // floats of a head in the merge area: O, m, l and padding
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int split = warp / HEADS, sub = warp % HEADS;
  const int groups = p.kv_heads / HEADS;
  const uint32_t ring = smem_addr(smem) + warp * (STAGES * 2 * TILE_BYTES);
  float* merge = reinterpret_cast<float*>(smem + ring_bytes<HD, WARPS, STAGES, HEADS>());
  int* first = reinterpret_cast<int*>(merge + WARPS * p.group * ROW_F);
  int* lens = first + p.rows + 1;
  int* last_flag = lens + p.rows;

  // Lengths are older than the preceding kernel (every kernel of a step lets its dependents start only after its
  // own wait), so all this may run before it has ended.
  if (warp == 0) {
    int sum = 0;
    for (int base = 0; base < p.rows; base += 128) {
      int len[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = base + i * 32 + lane;
        len[i] = r < p.rows ? p.kv_len[r] : 0;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = base + i * 32 + lane;
        int skip = p.window > 0 && len[i] > p.window ? (len[i] - p.window) / kPage : 0;
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
        }
        sum += __shfl_sync(~0u, x, 31);
      }
    }
    if (lane == 0) first[p.rows] = sum;
  }
  __syncthreads();

  const int total = first[p.rows] * groups;
  const int per_block = max((total + (int)gridDim.x - 1) / (int)gridDim.x, p.least_pages);
  Walk walk;
  walk.pos = min(total, (int)blockIdx.x * per_block);
  walk.end = min(total, walk.pos + per_block);
  walk.row = 0;
  if (walk.pos < walk.end) {
    int lo = 0, hi = p.rows - 1;  // last row whose first page is not behind pos
    int want = walk.pos / groups;
    while (lo < hi) {
      int mid = (lo + hi + 1) / 2;
      if (first[mid] <= want) lo = mid; else hi = mid - 1;
    }
    walk.row = lo;
  }

  // The producing walk runs STAGES tiles ahead of the consuming one.
  Walk ahead = walk;
  bool ahead_ok = next_piece(ahead, first, groups);
  int ahead_page = split, ahead_batch = 0, ahead_ids = 0;
  bool waited = false;
  auto row_pages = [&](int r) { return p.page_indptr ? (int64_t)p.page_indptr[r] : r * p.table_stride; };
  auto load_tile = [&](int stage) {
    while (ahead_ok && ahead_page >= ahead.pages) {
      ahead_ok = next_piece(ahead, first, groups);
      ahead_page = split;
      ahead_batch = 0;
    }
    if (ahead_ok) {
      int len = lens[ahead.row];
      int skip = p.window > 0 && len > p.window ? (len - p.window) / kPage : 0;
      if (ahead_batch == 0) {  // the ids of this warp's next 32 tiles, one a lane
        int pg = ahead_page + lane * SPLITS;
        ahead_ids = pg < ahead.pages ? p.pages[row_pages(ahead.row) + skip + ahead.page + pg] : 0;
      }
      int64_t block = __shfl_sync(~0u, ahead_ids, ahead_batch);
      int left = len - (skip + ahead.page + ahead_page) * kPage;
      if (left <= kPage && !waited) {  // the page that the preceding kernel may still be writing
        wait_for_producer();
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

  wait_for_producer();
  waited = true;
  let_dependents_start();

  // Rows without tokens (padding) get zeros.
  for (int r = blockIdx.x; r < p.rows; r += gridDim.x) {
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
  bool more = next_piece(walk, first, groups);
  if (more) load_q(walk);
  while (more) {
    const int len = lens[walk.row];
    const int lowest = p.window > 0 ? max(0, len - p.window) : 0;
    const int page0 = lowest / kPage + walk.page;
    float o[KS][4] = {};
    float m0 = -kInf, m1 = -kInf, l0 = 0.f, l1 = 0.f;
    for (int pg = split; pg < walk.pages; pg += SPLITS) {
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      const uint32_t kt = ring + stage * (2 * TILE_BYTES), vt = kt + TILE_BYTES;
      // All fragments are asked for before the first is used: the tile's latency is what bounds a short context.
      uint32_t kf[KS][4], vf[KS][4];
      const int t_k = ((quad & 1) << 3) + in_quad, t_v = ((quad >> 1) << 3) + in_quad;
#pragma unroll
      for (int i = 0; i < KS; ++i)
        ldmatrix4(kf[i], kt + t_k * (HD * 2) + (((2 * i + (quad >> 1)) ^ in_quad) << 4));
#pragma unroll
      for (int i = 0; i < KS; ++i)
        ldmatrix4_trans(vf[i], vt + t_v * (HD * 2) + (((2 * i + (quad & 1)) ^ in_quad) << 4));
      float s[2][4] = {};
#pragma unroll
      for (int i = 0; i < KS; ++i) mma(s[i & 1], kf[i], qf[i][0], qf[i][1]);
      __syncwarp();
      load_tile(stage);  // the tile is in registers, its place is free
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      const int t_lo = (page0 + pg) * kPage + g, t_hi = t_lo + 8;
      const bool ok_lo = t_lo < len && t_lo >= lowest, ok_hi = t_hi < len && t_hi >= lowest;
      float s0 = ok_lo ? (s[0][0] + s[1][0]) * p.scale_log2 : -kInf;
      float s1 = ok_lo ? (s[0][1] + s[1][1]) * p.scale_log2 : -kInf;
      float s2 = ok_hi ? (s[0][2] + s[1][2]) * p.scale_log2 : -kInf;
      float s3 = ok_hi ? (s[0][3] + s[1][3]) * p.scale_log2 : -kInf;
      float a0 = fmaxf(s0, s2), a1 = fmaxf(s1, s3);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        a0 = fmaxf(a0, __shfl_xor_sync(~0u, a0, d));
        a1 = fmaxf(a1, __shfl_xor_sync(~0u, a1, d));
      }
      if (__any_sync(~0u, a0 > m0 || a1 > m1)) {
        float n0 = fmaxf(m0, a0), n1 = fmaxf(m1, a1);
        float r0 = exp2f(m0 - n0), r1 = exp2f(m1 - n1);
        m0 = n0;
        m1 = n1;
        l0 *= r0;
        l1 *= r1;
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          o[i][0] *= r0;
          o[i][1] *= r1;
          o[i][2] *= r0;
          o[i][3] *= r1;
        }
      }
      float p0 = exp2f(s0 - m0), p1 = exp2f(s1 - m1), p2 = exp2f(s2 - m0), p3 = exp2f(s3 - m1);
      l0 += p0 + p2;
      l1 += p1 + p3;
      const uint32_t b0 = transpose8x8(pack(p0, p1)), b1 = transpose8x8(pack(p2, p3));
#pragma unroll
      for (int i = 0; i < KS; ++i) mma(o[i], vf[i], b0, b1);
    }
    const Walk done = walk;
    more = next_piece(walk, first, groups);
    if (more) load_q(walk);  // on its way while this piece is merged
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      l0 += __shfl_xor_sync(~0u, l0, d);
      l1 += __shfl_xor_sync(~0u, l1, d);
    }
    // Warp -> block: every warp lays its O, m and l down, then the block's threads add them up.
    {
      float* mine = merge + (warp * p.group + 2 * c) * ROW_F;
      if (2 * c < p.group) {
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          mine[16 * i + g] = o[i][0];
          mine[16 * i + g + 8] = o[i][2];
        }
        if (g == 0) {
          mine[HD] = m0;
          mine[HD + 1] = l0;
        }
      }
      if (2 * c + 1 < p.group) {
        mine += ROW_F;
#pragma unroll
        for (int i = 0; i < KS; ++i) {
          mine[16 * i + g] = o[i][1];
          mine[16 * i + g + 8] = o[i][3];
        }
        if (g == 0) {
          mine[HD] = m1;
          mine[HD + 1] = l1;
        }
      }
    }
    __syncthreads();
    const int items = HEADS * p.group * (HD / 4);
    const int unit_end = done.unit_begin + done.unit_pages;
    const int b_first = done.unit_begin / per_block, b_last = (unit_end - 1) / per_block;
    const int64_t part_floats = (int64_t)HEADS * p.group * ROW_F;
    // A block has at most one piece that began before it (slot 0) and one that goes on behind it (slot 1).
    float* part = p.partial + ((int64_t)blockIdx.x * 2 + (done.page == 0 ? 1 : 0)) * part_floats;
    for (int it = threadIdx.x; it < items; it += WARPS * 32) {
      int hg = it / (HD / 4), d = (it % (HD / 4)) * 4;
      int hs = hg / p.group, j = hg - hs * p.group;
      Merge acc;
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) {
        const float* src = merge + ((s * HEADS + hs) * p.group + j) * ROW_F;
        acc.add(src[HD], src[HD + 1], *reinterpret_cast<const float4*>(src + d));
      }
      if (b_first == b_last) {
        int qh = (done.group * HEADS + hs) * p.group + j;
        *reinterpret_cast<uint2*>(p.out + done.row * p.out_stride + (int64_t)qh * HD + d) = acc.bf16x4();
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
        for (int it = threadIdx.x; it < items; it += WARPS * 32) {
          int hg = it / (HD / 4), d = (it % (HD / 4)) * 4;
          Merge acc;
          constexpr int B = 8;
          for (int b = b_first; b <= b_last; b += B) {
            float2 ml[B];
            float4 ov[B];
#pragma unroll
            for (int i = 0; i < B; ++i) {
              ml[i] = make_float2(-kInf, 0.f);
              ov[i] = make_float4(0.f, 0.f, 0.f, 0.f);
              if (b + i <= b_last) {
                const float* src =
                    p.partial + ((int64_t)(b + i) * 2 + (b + i == b_first ? 1 : 0)) * part_floats + hg * ROW_F;
                ml[i] = __ldcg(reinterpret_cast<const float2*>(src + HD));
                ov[i] = __ldcg(reinterpret_cast<const float4*>(src + d));
              }
            }
#pragma unroll
            for (int i = 0; i < B; ++i) acc.add(ml[i].x, ml[i].y, ov[i]);
          }
          int qh = (done.group * HEADS + hg / p.group) * p.group + hg % p.group;
          *reinterpret_cast<uint2*>(p.out + done.row * p.out_stride + (int64_t)qh * HD + d) = acc.bf16x4();
        }
      }
    }
    __syncthreads();
  }
}

template <int HD, int WARPS, int STAGES, int HEADS>
int32_t launch(const Params& p, int grid, bool pdl, cudaStream_t stream) {
  auto kernel = decode_attention_kernel<HD, WARPS, STAGES, HEADS>;
  int smem = ring_bytes<HD, WARPS, STAGES, HEADS>() + WARPS * p.group * (HD + 4) * 4 + (2 * p.rows + 4) * 4;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (e != cudaSuccess) return kCuda + (int32_t)e;
  cudaLaunchConfig_t cfg = {};
  cfg.gridDim = dim3(grid);
  cfg.blockDim = dim3(WARPS * 32);
  cfg.dynamicSmemBytes = smem;
  cfg.stream = stream;
  cudaLaunchAttribute attr;
  attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attr.val.programmaticStreamSerializationAllowed = 1;
  cfg.attrs = &attr;
  cfg.numAttrs = pdl ? 1 : 0;
  e = cudaLaunchKernelEx(&cfg, kernel, p);
  return e == cudaSuccess ? 0 : kCuda + (int32_t)e;
}

template <int HD>
int32_t dispatch(const Params& p, int variant, int grid, bool pdl, cudaStream_t s) {
  switch (variant) {
    case 41: return launch<HD, 4, 3, 1>(p, grid, pdl, s);
    case 44: return launch<HD, 4, 3, 4>(p, grid, pdl, s);
    case 81: return launch<HD, 8, 3, 1>(p, grid, pdl, s);
    case 88: return launch<HD, 8, 3, 8>(p, grid, pdl, s);
    default: return kInvalid;
  }
}

}  // namespace

extern "C" int64_t baton_decode_attention_workspace(int32_t sms, int32_t kv_heads, int32_t group, int32_t head_dim) {
  int heads = kv_heads < 8 ? kv_heads : 8;
  return (int64_t)sms * 2 * 2 * heads * group * (head_dim + 4) * 4;
}

extern "C" int32_t baton_decode_attention(const void* q, int64_t q_stride, const void* k, const void* v,
                                          int64_t stride_block, int64_t stride_head, int64_t stride_token,
                                          const int32_t* pages, const int32_t* page_indptr, int64_t table_stride,
                                          const int32_t* kv_len, void* out, int64_t out_stride, int32_t rows,
                                          int32_t kv_heads, int32_t group, int32_t head_dim, int32_t window,
                                          float scale, void* partial, int32_t* counters, int32_t sms,
                                          int32_t least_pages, int32_t variant, int32_t pdl, void* stream) {
  if (rows < 0 || kv_heads < 1 || group < 1) return kInvalid;
  if (rows > kMaxRows || group > kMaxGroup || (head_dim != 64 && head_dim != 128)) return kUnsupported;
  if (rows == 0) return 0;
  if (sms <= 0) {
    int dev = 0;
    cudaError_t e = cudaGetDevice(&dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev);
    if (e != cudaSuccess) return kCuda + (int32_t)e;
  }
  if (variant == 0) variant = rows < 16 ? 81 : rows < 96 ? 41 : 44;
  if (kv_heads % (variant % 10) != 0) variant = variant / 10 * 10 + 1;
  const int grid = variant / 10 == 4 ? 2 * sms : sms;
  Params p;
  p.q = (const bf16*)q;
  p.k = (const bf16*)k;
  p.v = (const bf16*)v;
  p.out = (bf16*)out;
  p.pages = pages;
  p.page_indptr = page_indptr;
  p.kv_len = kv_len;
  p.partial = (float*)partial;
  p.counters = counters;
  p.q_stride = q_stride;
  p.out_stride = out_stride;
  p.table_stride = table_stride;
  p.stride_block = stride_block;
  p.stride_head = stride_head;
  p.stride_token = stride_token;
  p.rows = rows;
  p.kv_heads = kv_heads;
  p.group = group;
  p.window = window;
  p.least_pages = least_pages > 0 ? least_pages : variant / 10 * 4;
  p.scale_log2 = scale * 1.4426950408889634f;
  cudaStream_t s = (cudaStream_t)stream;
  return head_dim == 64 ? dispatch<64>(p, variant, grid, pdl != 0, s) : dispatch<128>(p, variant, grid, pdl != 0, s);
}