// Distribution of the pages of decode attention over the CTAs: equal pieces of every (row, head group), or equal shares of
// the tile sequence.
#pragma once

#include "device.cuh"

namespace baton {
namespace {

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

}  // namespace
}  // namespace baton
