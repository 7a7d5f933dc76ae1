// Digest of KV blocks: a sum over their words, each mixed with its position.
#include "digest.h"
#include "mix.cuh"

namespace baton {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
// Block ids are passed in the launch arguments, so no list in device memory must outlive the launch.
constexpr int LIST_MAX = 512;

// Sizes in 16-byte words.
struct Digest {
  const char* arena;
  unsigned long long* sum;
  int64_t block;
  int64_t run_stride;
  int64_t first;
  int64_t whole;
  int64_t first_index;  // of the list's first block among all
  int32_t run;
  int32_t run_pieces;
  int32_t block_pieces;
  int32_t pieces;  // of all blocks
  int32_t blocks[LIST_MAX];
};

__global__ void __launch_bounds__(THREADS) digest_kernel(const __grid_constant__ Digest digest) {
  uint64_t sum = 0;
  for (int32_t piece = blockIdx.x * WARPS + threadIdx.x / WARP; piece < digest.pieces; piece += gridDim.x * WARPS) {
    const int32_t index = piece / digest.block_pieces;
    const int32_t in_block = piece - index * digest.block_pieces;
    const int32_t run = in_block / digest.run_pieces;
    const int32_t begin = (in_block - run * digest.run_pieces) * DIGEST_PIECE;
    const ulonglong2* from = reinterpret_cast<const ulonglong2*>(digest.arena) + digest.blocks[index] * digest.block +
                             static_cast<int64_t>(run) * digest.run;
    const int64_t place = (digest.first_index + index) * digest.whole + digest.first + run * digest.run_stride;
    sum += digest_words(from, place, begin, min(begin + DIGEST_PIECE, digest.run), [](const ulonglong2&) {});
  }
  __shared__ uint64_t sums[WARPS];
  add_sums<WARPS>(sum, sums, digest.sum);
}

}  // namespace

int32_t load_digest() { return load(digest_kernel); }

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_digest_blocks(const void* arena, int64_t block_bytes, int64_t run_bytes, int64_t run_stride,
                                      int64_t first_bytes, int64_t whole_bytes, const int32_t* blocks, int32_t count,
                                      uint64_t* sum, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(arena && sum, "arena or sum is null");
    BATON_REQUIRE(count == 0 || blocks, "blocks is null");
    BATON_REQUIRE(count >= 0, "count is %d; expected 0 or more", count);
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
    BATON_TRY(check(cudaMemsetAsync(sum, 0, sizeof(*sum), as_stream(stream)), "clearing a digest"));
    for (int32_t first = 0; first < count; first += LIST_MAX) {
      const int32_t share = count - first < LIST_MAX ? count - first : LIST_MAX;
      Digest digest;
      digest.arena = static_cast<const char*>(arena);
      digest.sum = reinterpret_cast<unsigned long long*>(sum);
      digest.block = block_bytes / 16;
      digest.run_stride = run_stride / 16;
      digest.first = first_bytes / 16;
      digest.whole = whole_bytes / 16;
      digest.first_index = first;
      digest.run = static_cast<int32_t>(run_bytes / 16);
      digest.run_pieces = divide_up(digest.run, DIGEST_PIECE);
      const int64_t block_pieces = block_bytes / run_bytes * digest.run_pieces;
      BATON_REQUIRE(share * block_pieces <= INT32_MAX, "%d blocks of %lld runs are too many", share,
                    static_cast<long long>(block_bytes / run_bytes));
      digest.block_pieces = static_cast<int32_t>(block_pieces);
      digest.pieces = static_cast<int32_t>(share * block_pieces);
      for (int32_t i = 0; i < share; ++i) digest.blocks[i] = blocks[first + i];
      const int32_t grid_max = device.sm_count * 8;
      const int32_t grid = divide_up(digest.pieces, WARPS);
      // Without PDL: the predecessor writes the data, or clears the sum.
      BATON_TRY(launch_as(false, "digest of blocks", digest_kernel, dim3(grid < grid_max ? grid : grid_max),
                          dim3(THREADS), 0, as_stream(stream), digest));
    }
    return static_cast<int32_t>(BATON_OK);
  });
}
