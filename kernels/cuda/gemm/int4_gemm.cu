// y[rows][n] = x[rows][k] W[n][k]^T for up to 128 rows, with W in INT4, and the widening of W to bf16 for more rows.
//
// The GEMM is that of skinny_gemm.cu with another inner loop: every warp of a CTA streams its own slices of k through
// its own ring in shared memory. Here weight rows are the rows of the result of mma, and rows of x are its columns, so
// that 8 rows of x need half of the instructions. A stage has 16 weight rows: a chunk of 8 rows for each half of the
// result. A lane multiplies the 32 numbers of each chunk that it has loaded, without exchange between lanes.
//
// A number q becomes the bf16 number 128 + q by two logic instructions, because the last bits of 128 count ones. The
// subtraction of 128 + zero point is exact. The products are added in f32 for each scale, and their sum is multiplied
// by the f32 scale, so no product is rounded.
//
// More than 32 rows take one launch for every 32 rows, and every launch reads the weight again.
#include <algorithm>

#include "int4.h"
#include "skinny_tile.h"

namespace baton {
namespace {

struct Int4Weight {
  static constexpr int kHelperWarps = 0;
  static constexpr bool kHasRowScales = false;
};

constexpr int kThreads = kWarps * WARP;
constexpr int kRowsMax = 32;                     // rows of x of a launch
constexpr int kNumberBytes = 8 * kSlice / 2;     // numbers of a chunk
constexpr int kSmem = 224 * 1024;
constexpr int kStagesMost = 24;
constexpr int kInt4Tiles[] = {128, 64, 32, 16};
// SETS: scales of a weight row in a chunk. A scale is an f32 number whose last four bits are the zero point.
template <int SETS>
constexpr int kChunkBytes = kNumberBytes + SETS * 8 * 4;

// NT: groups of 8 weight rows of a tile; MT: groups of 8 rows of x.
template <int SETS, int NT, int MT>
struct Shape {
  static constexpr int kSumFloats = kWarps * MT * 8 * (NT * 8 + 4);
  static constexpr int kSumBytes = (kSumFloats + MT * 8) * 4;
  static constexpr int kStageBytes = 2 * kChunkBytes<SETS>;
  static constexpr int kFit = (kSmem - kSumBytes) / (kWarps * kStageBytes);
  static constexpr int kStages = kFit < kStagesMost ? kFit : kStagesMost;
  // Whether x of the next slice is loaded ahead: there are registers for it.
  static constexpr bool kAhead = NT * MT <= 16 && SETS * MT < 16;
};

__device__ __forceinline__ void copy_async(uint32_t to, const char* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}

// Returns (word & MASK) | BITS by one instruction. The compiler takes two.
template <uint32_t MASK, uint32_t BITS>
__device__ __forceinline__ uint32_t select_bits(uint32_t word) {
  uint32_t selected;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(selected) : "r"(word), "n"(MASK), "n"(BITS));
  return selected;
}
// Returns numbers 2 * pair and 2 * pair + 1 of a word, plus 128, in bf16.
__device__ __forceinline__ uint32_t pair_of(uint32_t word, int pair) {
  return select_bits<0x000f000f, 0x43004300>(word >> (4 * pair));
}
// Returns 128 plus the zero point of a scale, twice, in bf16.
__device__ __forceinline__ uint32_t zero_pair(uint32_t scale) { return select_bits<15, 0x4300>(scale) * 0x00010001u; }
__device__ __forceinline__ float scale_of(uint32_t scale) { return __uint_as_float(scale & ~15u); }

__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  const __nv_bfloat162 difference =
      __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// A lane's part of a stage: numbers and scales of one row of each chunk.
template <int SETS>
struct OwnWeights {
  uint4 numbers[2];
  uint32_t scales[2][SETS];

  __device__ __forceinline__ explicit OwnWeights(const char* stage) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* chunk = stage + half * kChunkBytes<SETS>;
      numbers[half] = reinterpret_cast<const uint4*>(chunk)[lane];
#pragma unroll
      for (int set = 0; set < SETS; ++set) {
        scales[half][set] = reinterpret_cast<const uint32_t*>(chunk + kNumberBytes)[set * 8 + (lane >> 2)];
      }
    }
  }

  // Adds the products with a slice of x. acc[m]: a row of the first chunk by rows 2c and 2c + 1 of the group m of x,
  // then a row of the second chunk, where c is the lane in its group of four.
  template <int MT>
  __device__ __forceinline__ void add(const uint4 (&x)[4][MT], float (&acc)[MT][4]) const {
    // Independent sums hide the latency of mma.
    constexpr int kParts = SETS > 1 ? SETS : MT > 2 ? 1 : 2, kWords = 4 / kParts;
    float sum[kParts][MT][4] = {};
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int i = part * kWords + j, set = part * SETS / kParts;
        const uint32_t zeros[2] = {zero_pair(scales[0][set]), zero_pair(scales[1][set])};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t a[4];
#pragma unroll
          for (int at = 0; at < 4; ++at) {
            const int half = at % 2, pair = 2 * step + at / 2;
            a[at] = subtract_pair(pair_of(word_of(numbers[half], i), pair), zeros[half]);
          }
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            const uint4 piece = x[i][m];
            mma(sum[part][m], a[0], a[1], a[2], a[3], step ? piece.z : piece.x, step ? piece.w : piece.y);
          }
        }
        if (j + 1 < kWords) continue;
        const float low = scale_of(scales[0][set]), high = scale_of(scales[1][set]);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          acc[m][0] = fmaf(low, sum[part][m][0], acc[m][0]);
          acc[m][1] = fmaf(low, sum[part][m][1], acc[m][1]);
          acc[m][2] = fmaf(high, sum[part][m][2], acc[m][2]);
          acc[m][3] = fmaf(high, sum[part][m][3], acc[m][3]);
        }
      }
    }
  }
};

// Stores a warp's part of a tile's sums.
template <int NT, int MT>
__device__ __forceinline__ void store_sums(float* sums, const float (&acc)[NT / 2][MT][4]) {
  constexpr int kHalf = NT * 4, kPitch = NT * 8 + 4;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int t = 0; t < NT / 2; ++t) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float* at = sums + (warp * MT * 8 + m * 8 + 2 * (lane & 3)) * kPitch + t * 8 + (lane >> 2);
      at[0] = acc[t][m][0], at[kPitch] = acc[t][m][1];
      at[kHalf] = acc[t][m][2], at[kPitch + kHalf] = acc[t][m][3];
    }
  }
}

template <int SETS, int NT, int MT, int EPI>
__global__ void __launch_bounds__(kThreads, 1)
    int4_gemm_kernel(const __grid_constant__ GemmArgs<false> args, int tiles) {
  const baton_skinny_gemm_args& p = args.get();
  using S = Shape<SETS, NT, MT>;
  constexpr int R = NT * 8, kChunk = kChunkBytes<SETS>;
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const char* mine = smem + warp * (S::kStages * S::kStageBytes);
  float* sums = reinterpret_cast<float*>(smem + kWarps * S::kStages * S::kStageBytes);
  float* scales = sums + S::kSumFloats;
  const int slices = (p.depth + kSlice - 1) / kSlice;

  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  // A stage has the chunks of rows a_row and a_row + apart. Rows behind the weight are not loaded and not stored.
  const int64_t unit_bytes = static_cast<int64_t>(slices) * kChunk;
  const int apart = EPI == BATON_SKINNY_SILU ? p.n / 2 : EPI == BATON_SKINNY_QKV ? p.head_dim / 2 : R / 2;
  const int64_t second = apart / 8 * unit_bytes;
  const uint32_t to = smem_addr(mine) + lane * 16;
  // The first lanes load scales: half of them those of the second chunk. Places relative to the lane's numbers.
  const bool loads_second = lane >= 2 * SETS;
  const int scales_apart = loads_second ? apart : 0;
  const int64_t scales_from = kNumberBytes + (loads_second ? second - 2 * SETS * 16 : 0);
  const int scales_to = kNumberBytes + (loads_second ? kChunk - 2 * SETS * 16 : 0);
  int a_tile = warp < slices ? blockIdx.x : tiles, a_slice = warp, a_t = 0, a_row;
  const char* from;
  auto begin_tile = [&] {
    a_row = tile_rows<R, EPI>(p, a_tile).x;
    from = static_cast<const char*>(p.weight) + a_row / 8 * unit_bytes + a_slice * kChunk + lane * 16;
  };
  begin_tile();
  auto load = [&](int offset) {
    if (a_tile < tiles) {
      const uint32_t at = to + offset;
      if (a_row < p.n) copy_async(at, from, policy);
      if (a_row + apart < p.n) copy_async(at + kChunk, from + second, policy);
      if (lane < 4 * SETS && a_row + scales_apart < p.n) copy_async(at + scales_to, from + scales_from, policy);
      a_row += 8;
      from += unit_bytes;
      if (++a_t == NT / 2) {
        a_t = 0;
        a_slice += kWarps;
        a_row -= R / 2;
        from += kWarps * kChunk - NT / 2 * unit_bytes;
        if (a_slice >= slices) {
          a_slice = warp;
          a_tile += gridDim.x;
          begin_tile();
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int i = 0; i < S::kStages; ++i) load(i * S::kStageBytes);
  pdl_wait_and_release();
  store_scales(p, MT * 8, scales);

  const bf16* first_x = static_cast<const bf16*>(p.x) + g * p.x_stride + c * 8;
  uint4 next[4][MT];
  auto fetch_x = [&](int slice) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = slice * kSlice + i * 32;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const bool is_inside = k + c * 8 < p.depth && g + m * 8 < p.rows;
        const bf16* from = first_x + m * 8 * p.x_stride + k;
        next[i][m] = is_inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  if (S::kAhead && blockIdx.x < tiles) fetch_x(warp);
  int stage = 0;  // offset in the ring
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[NT / 2][MT][4] = {};
    for (int slice = warp; slice < slices; slice += kWarps) {
      uint4 x[4][MT];
      if (!S::kAhead) fetch_x(slice);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < MT; ++m) x[i][m] = next[i][m];
      if (S::kAhead) fetch_x(slice + kWarps < slices ? slice + kWarps : warp);
#pragma unroll
      for (int t = 0; t < NT / 2; ++t) {
        asm volatile("cp.async.wait_group %0;" ::"n"(S::kStages - 1) : "memory");
        __syncwarp();
        const OwnWeights<SETS> own(mine + stage);
        __syncwarp();
        load(stage);
        stage = stage + S::kStageBytes == S::kStages * S::kStageBytes ? 0 : stage + S::kStageBytes;
        own.add(x, acc[t]);
      }
    }
    store_sums<NT, MT>(sums, acc);
    __syncthreads();
    finish_tile<Int4Weight, NT, MT, EPI>(p, tile, tiles, sums, scales);
    __syncthreads();
  }
}

// Widens W to bf16. A warp widens a chunk at a time.
template <int SETS>
__global__ void __launch_bounds__(256) widen_kernel(const char* weight, int n, int depth, bf16* out) {
  const int slices = (depth + kSlice - 1) / kSlice;
  const int64_t chunks = static_cast<int64_t>((n + 7) / 8) * slices;
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, warps = blockDim.x / WARP;
  // The preceding kernel may read `out`.
  pdl_wait_and_release();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / WARP;
  for (int64_t at = first; at < chunks; at += gridDim.x * warps) {
    const char* chunk = weight + at * kChunkBytes<SETS>;
    const uint4 numbers = reinterpret_cast<const uint4*>(chunk)[lane];
    const int row = static_cast<int>(at / slices) * 8 + g;
    if (row >= n) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = static_cast<int>(at % slices) * kSlice + i * 32 + c * 8;
      if (k >= depth) continue;
      const uint32_t scale = reinterpret_cast<const uint32_t*>(chunk + kNumberBytes)[i * SETS / 4 * 8 + g];
      const uint32_t word = word_of(numbers, i);
      __nv_bfloat162 pairs[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        auto value = [&](int shift) {
          const int number = word >> shift & 15, zero = scale & 15;
          return static_cast<float>(number - zero) * scale_of(scale);
        };
        pairs[pair] = __floats2bfloat162_rn(value(4 * pair), value(4 * pair + 16));
      }
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * depth + k) = *reinterpret_cast<const uint4*>(pairs);
    }
  }
}

// Calls body(kernel) for a tile of NT * 8 weight rows.
template <int SETS, int NT, int MT, class Body>
int32_t with_epilogue(int epilogue, Body&& body) {
  switch (epilogue) {
    case BATON_SKINNY_PLAIN: return body(int4_gemm_kernel<SETS, NT, MT, BATON_SKINNY_PLAIN>);
    case BATON_SKINNY_RESIDUAL:
      // finish_tile adds the squares of up to 64 weight rows.
      if constexpr (NT <= 8) return body(int4_gemm_kernel<SETS, NT, MT, BATON_SKINNY_RESIDUAL>);
      else return fail(BATON_INVALID, "tile is %d; expected 0, 16, 32 or 64 with RESIDUAL", NT * 8);
    case BATON_SKINNY_SILU: return body(int4_gemm_kernel<SETS, NT, MT, BATON_SKINNY_SILU>);
    case BATON_SKINNY_QKV: return body(int4_gemm_kernel<SETS, NT, MT, BATON_SKINNY_QKV>);
    default: return fail(BATON_UNSUPPORTED, "epilogue is %d; expected 0, 1, 2 or 4 with a weight in INT4", epilogue);
  }
}
template <int SETS, int NT, class Body>
int32_t with_rows(int rows, int epilogue, Body&& body) {
  if (rows <= 8) return with_epilogue<SETS, NT, 1>(epilogue, body);
  if (rows <= 16) return with_epilogue<SETS, NT, 2>(epilogue, body);
  return with_epilogue<SETS, NT, 4>(epilogue, body);
}
template <int SETS, class Body>
int32_t with_tile(int tile, int rows, int epilogue, Body&& body) {
  switch (tile) {
    case 16: return with_rows<SETS, 2>(rows, epilogue, body);
    case 32: return with_rows<SETS, 4>(rows, epilogue, body);
    case 64: return with_rows<SETS, 8>(rows, epilogue, body);
    default: return with_rows<SETS, 16>(rows, epilogue, body);
  }
}
template <class Body>
int32_t with_kernel(int weight_block, int tile, int rows, int epilogue, Body&& body) {
  switch (weight_block) {
    case 32: return with_tile<4>(tile, rows, epilogue, body);
    case 64: return with_tile<2>(tile, rows, epilogue, body);
    default: return with_tile<1>(tile, rows, epilogue, body);
  }
}

int32_t check_block(int weight_block) {
  BATON_REQUIRE(weight_block == 32 || weight_block == 64 || weight_block == kSlice,
                "weight_block is %d; expected 32, 64 or 128", weight_block);
  return BATON_OK;
}

int32_t check_int4(const baton_skinny_gemm_args& p) {
  BATON_TRY(check_block(p.weight_block));
  baton_skinny_gemm_args others = p;
  others.weight_block = 0;
  BATON_TRY(check_shape(others));
  BATON_REQUIRE(!p.weight_scales && !p.parts, "weight_scales or parts is set; a weight in INT4 has none");
  BATON_REQUIRE(!p.low_rank.shrunk, "low_rank.shrunk is set; no update of a weight in INT4");
  BATON_REQUIRE(p.epilogue != BATON_SKINNY_SILU || p.n % 16 == 0, "n is %d; expected multiples of 16 with SILU", p.n);
  return BATON_OK;
}

bool is_served(const baton_skinny_gemm_args& p, const Device& device) {
  if (device.major != 9 || device.minor != 0 || p.epilogue == BATON_SKINNY_F32) return false;
  return p.tile <= 64 || (p.tile == 128 && p.epilogue != BATON_SKINNY_RESIDUAL);
}

int ctas_max(const baton_skinny_gemm_args& p, const Device& device) { return p.grid > 0 ? p.grid : device.sm_count; }

// Chooses the tile of a valid call.
int choose_tile(const baton_skinny_gemm_args& p, int grid) {
  if (p.tile != 0) return p.tile;
  const int rows = p.rows < kRowsMax ? p.rows : kRowsMax;
  int best = 0, least = 1 << 30;
  for (int tile : kInt4Tiles) {
    if (p.epilogue == BATON_SKINNY_QKV && p.head_dim % tile != 0) continue;
    if (p.epilogue == BATON_SKINNY_RESIDUAL && tile > 64) continue;
    // Cost of the busiest CTA in weight rows. A row of x has the bytes of four weight rows. x comes from the L2 cache,
    // at about twice the rate of the weight.
    const int read = tile > 4 * rows ? tile : (tile + 4 * rows) / 2;
    const int cost = divide_up(divide_up(p.n, tile), grid) * (read + 4);
    if (cost < least) least = cost, best = tile;
  }
  return best;
}

// Returns the arguments of up to kRowsMax rows from row `first` on.
baton_skinny_gemm_args part_of(const baton_skinny_gemm_args& p, int first, int tiles) {
  baton_skinny_gemm_args part = p;
  auto move = [](auto& address, int64_t bytes) {
    using Pointer = std::decay_t<decltype(address)>;
    if (address) address = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(address) + bytes);
  };
  part.rows = p.rows - first < kRowsMax ? p.rows - first : kRowsMax;
  const int64_t rows = first;
  move(part.x, rows * p.x_stride * 2);
  move(part.squares, rows * p.squares_count * 4);
  move(part.out, rows * p.out_stride * 2);
  move(part.residual, rows * p.n * 4);
  move(part.mirror, rows * p.n * 2);
  move(part.squares_out, rows * tiles * 4);
  move(part.positions, rows * 4);
  move(part.destinations, rows * 4);
  return part;
}

}  // namespace

int32_t load_int4_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
  for (int weight_block : {32, 64, kSlice}) {
    for (int tile : kInt4Tiles) {
      for (int rows : {8, 16, kRowsMax}) {
        for (int epilogue : {BATON_SKINNY_PLAIN, BATON_SKINNY_RESIDUAL, BATON_SKINNY_SILU, BATON_SKINNY_QKV}) {
          if (epilogue == BATON_SKINNY_RESIDUAL && tile > 64) continue;
          BATON_TRY(with_kernel(weight_block, tile, rows, epilogue, [](auto* kernel) { return load(kernel, kSmem); }));
        }
      }
    }
  }
  BATON_TRY(load(widen_kernel<1>));
  BATON_TRY(load(widen_kernel<2>));
  return load(widen_kernel<4>);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_int4_gemm_tile(const baton_skinny_gemm_args* args) {
  int32_t tile = 0;
  guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    BATON_TRY(check_int4(*args));
    const Device* device;
    BATON_TRY(any_device(device));
    if (is_served(*args, *device)) tile = choose_tile(*args, ctas_max(*args, *device));
    return BATON_OK;
  });
  return tile;
}

BATON_API int32_t baton_int4_gemm(const baton_skinny_gemm_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_skinny_gemm_args& p = *args;
    BATON_TRY(check_int4(p));
    if (p.rows == 0) return BATON_OK;
    BATON_TRY(check_operands(p));
    const Device* device;
    BATON_TRY(any_device(device));
    if (!is_served(p, *device)) {
      return fail(BATON_UNSUPPORTED, "no INT4 GEMM for epilogue %d, tile %d and compute capability %d.%d", p.epilogue,
                  p.tile, device->major, device->minor);
    }
    const int grid = ctas_max(p, *device), tile = choose_tile(p, grid), tiles = divide_up(p.n, tile);
    for (int first = 0; first < p.rows; first += kRowsMax) {
      const baton_skinny_gemm_args part = part_of(p, first, tiles);
      BATON_TRY(with_kernel(p.weight_block, tile, part.rows, p.epilogue, [&](auto* kernel) {
        return launch_as(p.pdl != 0, "INT4 GEMM", kernel, dim3(tiles < grid ? tiles : grid), dim3(kThreads), kSmem,
                         as_stream(stream), GemmArgs<false>(part), tiles);
      }));
    }
    return BATON_OK;
  });
}

BATON_API int32_t baton_int4_widen(const void* weight, int32_t weight_block, int32_t n, int32_t depth, void* out,
                                   void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(weight && out, "weight or out is null");
    BATON_TRY(check_block(weight_block));
    BATON_REQUIRE(n > 0 && depth > 0 && depth % 8 == 0, "n is %d and depth %d; expected multiples of 8 of the depth", n,
                  depth);
    const Device* device;
    BATON_TRY(any_device(device));
    const int64_t chunks = static_cast<int64_t>(divide_up(n, 8)) * divide_up(depth, kSlice);
    const int ctas = static_cast<int>(std::min<int64_t>((chunks + 7) / 8, device->sm_count * 8));
    auto* kernel = weight_block == 32 ? widen_kernel<4> : weight_block == 64 ? widen_kernel<2> : widen_kernel<1>;
    return launch("widening of a weight in INT4", kernel, dim3(ctas), dim3(256), 0, as_stream(stream),
                  static_cast<const char*>(weight), n, depth, static_cast<bf16*>(out));
  });
}
