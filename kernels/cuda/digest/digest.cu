// Digests of KV blocks: sums over their words, each mixed with its position.
#include "digest.h"
#include "mix.cuh"

namespace baton {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
// Block ids are passed in the launch arguments, so no list in device memory must outlive the launch.
constexpr int LIST_MAX = 512;

// Sizes in 16-byte words. The grid has a row of CTAs for each digest.
struct Digest {
  const char* arena;
  unsigned long long* sums;     // of the digests, then the number of CTAs that have added their sums
  unsigned long long* results;  // host memory; null if a later launch adds to the sums
  int64_t block;
  int64_t run_stride;
  int64_t first;
  int64_t whole;
  int64_t first_index;  // of the list's first block among all
  int32_t run;
  int32_t run_pieces;
  int32_t block_pieces;
  int32_t pieces;  // of a digest
  int32_t blocks[LIST_MAX];
};

// The last CTA stores the sums into host memory, and clears them for the next call. A copy to the host would queue behind
// other copies.
__device__ inline void publish(const Digest& digest) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    // This thread has added the CTA's sum, which must be visible before the CTA is counted.
    __threadfence();
    is_last = atomicAdd(digest.sums + gridDim.y, 1ull) == gridDim.x * gridDim.y - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  for (uint32_t at = threadIdx.x; at < gridDim.y; at += THREADS) {
    digest.results[at] = __ldcg(digest.sums + at);
    digest.sums[at] = 0;
  }
  if (threadIdx.x == 0) digest.sums[gridDim.y] = 0;
}

__global__ void __launch_bounds__(THREADS) digest_kernel(const __grid_constant__ Digest digest) {
  uint64_t sum = 0;
  for (int32_t piece = blockIdx.x * WARPS + threadIdx.x / WARP; piece < digest.pieces; piece += gridDim.x * WARPS) {
    const int32_t index = piece / digest.block_pieces;
    const int32_t in_block = piece - index * digest.block_pieces;
    const int32_t run = in_block / digest.run_pieces;
    const int32_t begin = (in_block - run * digest.run_pieces) * DIGEST_PIECE;
    const ulonglong2* from = reinterpret_cast<const ulonglong2*>(digest.arena) +
                             digest.blocks[blockIdx.y + index] * digest.block + static_cast<int64_t>(run) * digest.run;
    const int64_t place = (digest.first_index + index) * digest.whole + digest.first + run * digest.run_stride;
    sum += digest_words(from, place, begin, min(begin + DIGEST_PIECE, digest.run), [](const ulonglong2&) {});
  }
  __shared__ uint64_t sums[WARPS];
  add_sums<WARPS>(sum, sums, digest.sums + blockIdx.y);
  if (digest.results) publish(digest);
}

}  // namespace

int32_t load_digest() { return load(digest_kernel); }

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_digest_lists(const void* arena, int64_t block_bytes, int64_t run_bytes, int64_t run_stride,
                                     int64_t first_bytes, int64_t whole_bytes, const int32_t* blocks, int32_t count,
                                     int32_t is_each, uint64_t* sums, uint64_t* results_host, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(arena && sums && results_host, "arena, sums or results_host is null");
    BATON_REQUIRE(count == 0 || blocks, "blocks is null");
    BATON_REQUIRE(count >= 0, "count is %d; expected 0 or more", count);
    BATON_REQUIRE(!is_each || (count > 0 && count <= BATON_DIGESTS_MAX), "%d digests; expected 1 to %d", count,
                  BATON_DIGESTS_MAX);
    BATON_REQUIRE(reinterpret_cast<uintptr_t>(arena) % 16 == 0, "arena is no multiple of 16");
    for (const int64_t bytes : {block_bytes, run_bytes, run_stride, first_bytes, whole_bytes}) {
      BATON_REQUIRE(bytes >= 0 && bytes % 16 == 0, "%lld bytes; expected multiples of 16",
                    static_cast<long long>(bytes));
    }
    BATON_REQUIRE(run_bytes > 0 && block_bytes % run_bytes == 0, "a block of %lld bytes has no whole runs of %lld",
                  static_cast<long long>(block_bytes), static_cast<long long>(run_bytes));
    BATON_REQUIRE(block_bytes > 0 && block_bytes <= int64_t{1} << 30, "block_bytes is %lld; expected 1 to 2^30",
                  static_cast<long long>(block_bytes));
    Device device;
    BATON_TRY(current_device(device));
    const int32_t digests = is_each ? count : 1;
    // A list without blocks takes a launch too, which stores its digest.
    for (int32_t first = 0; first == 0 || first < count; first += LIST_MAX) {
      const int32_t share = count - first < LIST_MAX ? count - first : LIST_MAX;
      Digest digest;
      digest.arena = static_cast<const char*>(arena);
      digest.sums = reinterpret_cast<unsigned long long*>(sums);
      const bool is_last = first + share == count;
      digest.results = is_last ? reinterpret_cast<unsigned long long*>(results_host) : nullptr;
      digest.block = block_bytes / 16;
      digest.run_stride = run_stride / 16;
      digest.first = first_bytes / 16;
      digest.whole = whole_bytes / 16;
      digest.first_index = first;
      digest.run = static_cast<int32_t>(run_bytes / 16);
      digest.run_pieces = divide_up(digest.run, DIGEST_PIECE);
      const int64_t block_pieces = block_bytes / run_bytes * digest.run_pieces;
      const int64_t pieces = is_each ? block_pieces : share * block_pieces;
      BATON_REQUIRE(pieces <= INT32_MAX, "%d blocks of %lld runs are too many", share,
                    static_cast<long long>(block_bytes / run_bytes));
      digest.block_pieces = static_cast<int32_t>(block_pieces);
      digest.pieces = static_cast<int32_t>(pieces);
      for (int32_t i = 0; i < share; ++i) digest.blocks[i] = blocks[first + i];
      const int32_t grid_max = divide_up(device.sm_count * 8, digests);
      const int32_t needed = divide_up(digest.pieces, WARPS);
      const int32_t grid = needed < 1 ? 1 : needed < grid_max ? needed : grid_max;
      // Without PDL: the predecessor writes the data, or uses the sums.
      BATON_TRY(launch_as(false, "digests of blocks", digest_kernel, dim3(grid, digests), dim3(THREADS), 0,
                          as_stream(stream), digest));
    }
    return static_cast<int32_t>(BATON_OK);
  });
}
