// y = x W^T for the rows of each expert, with weights in MXFP4 (sm_90a). wgmma takes its first operand from registers.
// So weight rows are the rows of the result, and rows of x are its columns. A warpgroup widens 64 weight rows to bf16
// in registers, while the tensor cores multiply the previous slice. The widened weights never go to shared memory.
//
// The widened weight is exact: the bits of two e2m1 numbers are moved to their places in two bf16 numbers, which are
// then too small by a factor of 2^126. A multiplication by 2^(scale - 1), where `scale` are the bits of the scale
// (e8m0, value 2^(scale - 127)), corrects this and applies the scale.
//
// A weight is stored in chunks of 64 rows and 64 columns. A chunk is in the order in which the threads read it, so one
// bulk copy loads the chunk. The order of a sum over k does not depend on the tile, so the bits of a row do not depend
// on the other rows. CTAs count their tiles from the lists, so that a captured graph fits any routing. With `pdl`, the
// GEMM of down fills its ring with weights before the preceding kernel has completed.
//
// With few rows, the x of a tile stays in shared memory for the whole depth (mxfp4_held.cuh). Warpgroups then share
// only x: each warpgroup has its own tiles of 64 weight rows, its own ring and its own loading warp. Threads load the
// rows of x by index, as in expert_gemm.cu. With more rows, slices of x go through the ring together with the weights
// (mxfp4_streamed.cuh).
#include "mxfp4_held.cuh"
#include "mxfp4_streamed.cuh"

namespace baton {
namespace {

// For each shape, the maximum average rows of an expert for which this shape is used: it was the fastest.
constexpr int kHeld8Rows = 5, kHeld16Rows = 9, kHeld24Rows = 18, kHeld32Rows = 70;

Encode encode = nullptr;  // function of the driver; set by load_mxfp4_gemm

// Returns whether the x of a tile fits into shared memory.
template <class S>
bool fits(const baton_mxfp4_gemm_args& p) {
  return S::shared_bytes(divide_up(p.depth, kSlice)) <= S::kSharedMost;
}

template <class S>
int32_t run_held(const baton_mxfp4_gemm_args& p, int sms, cudaStream_t stream) {
  const Chunks chunks = {divide_up(p.n, kGroupRows), divide_up(p.depth, kSlice)};
  const int64_t items_max = static_cast<int64_t>(p.rows) * p.count * chunks.tiles;
  const int ctas = items_max < sms ? static_cast<int>(items_max) : sms;
  auto* kernel = p.is_gate_up ? held_gemm_kernel<S, true> : held_gemm_kernel<S, false>;
  return launch_as(p.pdl != 0, "GEMM of experts in MXFP4", kernel, dim3(ctas), dim3(S::kThreads),
                   S::shared_bytes(chunks.steps), stream, p, chunks);
}

int32_t run_streamed(const baton_mxfp4_gemm_args& p, int sms, cudaStream_t stream) {
  const Chunks chunks = {divide_up(p.n, kGroupRows), divide_up(p.depth, kSlice)};
  const int64_t positions = static_cast<int64_t>(p.rows) * p.count;
  const void* x = p.x;
  int64_t x_stride = p.x_stride;
  if (p.is_gate_up) {
    x = p.sorted, x_stride = p.depth;
    BATON_TRY(launch_as(p.pdl != 0, "sort of the experts' rows", sort_rows_kernel, dim3(sms * 4), dim3(512), 0, stream, p));
  }
  CUtensorMap map;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  BATON_TRY(make_map<2>(encode, map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x, {size(p.depth), size(positions)},
                        {size(x_stride) * 2}, {kSlice, Streamed::kBoxRows}));
  const int64_t items_max = positions * divide_up(chunks.tiles, Streamed::kGroups);
  const int ctas = items_max < sms ? static_cast<int>(items_max) : sms;
  auto* kernel = p.is_gate_up ? streamed_gemm_kernel<true> : streamed_gemm_kernel<false>;
  return launch_as(p.pdl != 0, "GEMM of experts in MXFP4", kernel, dim3(ctas), dim3(Streamed::kThreads),
                   Streamed::kShared, stream, p, map, chunks);
}

// Launches the fastest shape for the average rows of an expert.
int32_t run_fastest(const baton_mxfp4_gemm_args& p, int sms, cudaStream_t stream) {
  const int64_t assignments = static_cast<int64_t>(p.rows) * p.count;
  auto is_up_to = [&](int rows) { return assignments <= static_cast<int64_t>(rows) * p.experts; };
  if (is_up_to(kHeld8Rows) && fits<Held8>(p)) return run_held<Held8>(p, sms, stream);
  if (is_up_to(kHeld16Rows) && fits<Held16>(p)) return run_held<Held16>(p, sms, stream);
  if (is_up_to(kHeld24Rows) && fits<Held24>(p)) return run_held<Held24>(p, sms, stream);
  if (is_up_to(kHeld32Rows) && fits<Held32>(p)) return run_held<Held32>(p, sms, stream);
  return run_streamed(p, sms, stream);
}

int32_t check_args(const baton_mxfp4_gemm_args& p) {
  BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 or more", p.rows);
  BATON_REQUIRE(p.experts > 0 && p.experts <= BATON_EXPERTS_MAX, "experts is %d; expected 1 to %d", p.experts,
                BATON_EXPERTS_MAX);
  BATON_REQUIRE(p.count > 0 && p.count <= p.experts, "count is %d; expected 1 to %d", p.count, p.experts);
  BATON_REQUIRE(p.n > 0 && p.n % (p.is_gate_up ? 16 : 8) == 0,
                "n is %d; expected multiples of 8, and of 16 for gate and up", p.n);
  BATON_REQUIRE(p.depth > 0 && p.depth % 32 == 0, "depth is %d; expected multiples of 32", p.depth);
  BATON_REQUIRE(p.x_stride >= p.depth && p.x_stride % 8 == 0,
                "x_stride is %lld; expected multiples of 8 from the depth, %d, on", static_cast<long long>(p.x_stride),
                p.depth);
  const int64_t bytes = int64_t{kChunkBytes} * divide_up(p.n, kGroupRows) * divide_up(p.depth, kSlice);
  BATON_REQUIRE(p.weight_stride >= bytes && p.weight_stride % 16 == 0,
                "weight_stride is %lld; expected multiples of 16 from %lld on", static_cast<long long>(p.weight_stride),
                static_cast<long long>(bytes));
  const int width = p.is_gate_up ? p.n / 2 : p.n;
  BATON_REQUIRE(p.out_stride >= width && p.out_stride % 8 == 0,
                "out_stride is %lld; expected multiples of 8 from %d on", static_cast<long long>(p.out_stride), width);
  BATON_REQUIRE(p.grid >= 0, "grid is %d; expected 0 or more", p.grid);
  BATON_REQUIRE(p.weight && p.x && p.out && p.offsets && p.order, "weight, x, out, offsets or order is null");
  BATON_REQUIRE(p.sorted || !p.is_gate_up, "sorted is null");
  return BATON_OK;
}

}  // namespace

int32_t load_mxfp4_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
  auto load_held = [](auto shape) -> int32_t {
    using S = decltype(shape);
    BATON_TRY(load(held_gemm_kernel<S, true>, S::kSharedMost));
    return load(held_gemm_kernel<S, false>, S::kSharedMost);
  };
  BATON_TRY(load_held(Held8()));
  BATON_TRY(load_held(Held16()));
  BATON_TRY(load_held(Held24()));
  BATON_TRY(load_held(Held32()));
  BATON_TRY(load(sort_rows_kernel));
  BATON_TRY(load(streamed_gemm_kernel<true>, Streamed::kShared));
  BATON_TRY(load(streamed_gemm_kernel<false>, Streamed::kShared));
  return find_encode(encode);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_mxfp4_gemm(const baton_mxfp4_gemm_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_mxfp4_gemm_args& p = *args;
    BATON_TRY(check_args(p));
    if (p.rows == 0) return BATON_OK;
    const Device* device;
    BATON_TRY(any_device(device));
    if (encode == nullptr) {
      return fail(BATON_UNSUPPORTED, "experts need compute capability 9.0; this device has %d.%d", device->major,
                  device->minor);
    }
    const int sms = p.grid > 0 && p.grid < device->sm_count ? p.grid : device->sm_count;
    return run_fastest(p, sms, as_stream(stream));
  });
}
