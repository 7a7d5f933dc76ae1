// Gather of KV blocks, or of part of each block, to staging memory, and scatter from it.
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

// Block ids are passed in the launch arguments, so no list in device memory must outlive the launch. A few CTAs process
// one piece after another and leave the other SMs free.
constexpr int LIST_MAX = 512;
constexpr int THREADS = 512;
constexpr int VECTOR = 16;  // bytes that one thread loads at once
constexpr int64_t PIECE = 64 * 1024;  // bytes that one CTA moves at a time

// A copy between part of each block and contiguous staging memory. A block has rows of length `pitch`. The copy moves
// `width` of each row, starting at `first`. All lengths are numbers of vectors.
struct BlockMove {
  uint4* arena;
  uint4* staging;
  int64_t block;   // length of a block
  uint32_t moved;  // length of the moved part of a block
  uint32_t pitch;
  uint32_t first;
  uint32_t width;
  int32_t pieces;  // number of pieces in all blocks
  int32_t gathers;
  int32_t blocks[LIST_MAX];
};

template <bool HAS_GAPS>
__global__ void __launch_bounds__(THREADS) move_kernel(const __grid_constant__ BlockMove move) {
  constexpr uint32_t PIECE_VECTORS = PIECE / VECTOR;
  constexpr int UNROLL = PIECE_VECTORS / THREADS;
  const uint32_t block_pieces = (move.moved + PIECE_VECTORS - 1) / PIECE_VECTORS;
  const auto in_block = [&](uint32_t at) {
    return HAS_GAPS ? int64_t{at / move.width} * move.pitch + move.first + at % move.width : int64_t{at};
  };
  for (uint32_t piece = blockIdx.x; piece < static_cast<uint32_t>(move.pieces); piece += gridDim.x) {
    const uint32_t index = piece / block_pieces;
    uint4* const block = move.arena + move.blocks[index] * move.block;
    uint4* const place = move.staging + int64_t{index} * move.moved;
    const uint32_t begin = piece % block_pieces * PIECE_VECTORS + threadIdx.x;
    uint4 values[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const uint32_t here = begin + i * THREADS;
      if (here < move.moved) values[i] = __ldcs(move.gathers ? block + in_block(here) : place + here);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const uint32_t here = begin + i * THREADS;
      if (here < move.moved) __stcs(move.gathers ? place + here : block + in_block(here), values[i]);
    }
  }
}

}  // namespace

int32_t load_blocks() {
  BATON_TRY(load(move_kernel<false>));
  return load(move_kernel<true>);
}

}  // namespace baton

using namespace baton;

// Loads the kernels of baton_move_rows, for a process that calls no other function of the library.
BATON_API int32_t baton_load_moves(void) {
  return guarded([] { return load_blocks(); });
}

// Gathers part of each block blocks[i] to contiguous staging memory, or scatters it back if `gathers` is 0. A block has
// rows of `pitch` bytes. The copy moves `width` bytes of each row, starting at `first`. `blocks` is in host memory
// and is read before the call returns. `grid` is the maximum number of CTAs.
BATON_API int32_t baton_move_rows(void* arena, int64_t block_bytes, int64_t pitch, int64_t first, int64_t width,
                                  const int32_t* blocks, int32_t count, void* staging, int32_t gathers, int32_t grid,
                                  void* stream) {
  return guarded([&] {
    BATON_REQUIRE(arena && staging, "arena or staging is null");
    for (const int64_t bytes : {block_bytes, pitch, width}) {
      BATON_REQUIRE(bytes > 0 && bytes % VECTOR == 0, "%lld bytes of a block, a row or its part; expected multiples of %d",
                    static_cast<long long>(bytes), VECTOR);
    }
    BATON_REQUIRE(first >= 0 && first % VECTOR == 0 && first + width <= pitch, "first is %lld; expected multiples of %d up to %lld",
                  static_cast<long long>(first), VECTOR, static_cast<long long>(pitch - width));
    BATON_REQUIRE(block_bytes % pitch == 0 && block_bytes / VECTOR <= INT32_MAX, "block_bytes is %lld; expected whole rows",
                  static_cast<long long>(block_bytes));
    BATON_REQUIRE(count >= 0 && grid > 0, "count is %d, grid %d; expected 0 or more, and 1 or more", count, grid);
    const int64_t moved_bytes = block_bytes / pitch * width;
    const auto kernel = width == pitch ? move_kernel<false> : move_kernel<true>;
    for (int32_t begin = 0; begin < count; begin += LIST_MAX) {
      const int32_t share = count - begin < LIST_MAX ? count - begin : LIST_MAX;
      BlockMove move;
      move.arena = static_cast<uint4*>(arena);
      move.staging = static_cast<uint4*>(staging) + begin * (moved_bytes / VECTOR);
      move.block = block_bytes / VECTOR;
      move.moved = static_cast<uint32_t>(moved_bytes / VECTOR);
      move.pitch = static_cast<uint32_t>(pitch / VECTOR);
      move.first = static_cast<uint32_t>(first / VECTOR);
      move.width = static_cast<uint32_t>(width / VECTOR);
      move.pieces = static_cast<int32_t>(share * ((moved_bytes + PIECE - 1) / PIECE));
      move.gathers = gathers;
      for (int32_t i = 0; i < share; ++i) move.blocks[i] = blocks[begin + i];
      // No PDL: the kernel does not call pdl_wait_and_release, and the predecessor may write the data that the kernel
      // reads.
      BATON_TRY(launch_as(false, "block copy", kernel, dim3(grid < move.pieces ? grid : move.pieces),
                          dim3(THREADS), 0, as_stream(stream), move));
    }
    return static_cast<int32_t>(BATON_OK);
  });
}
