// Work items of the experts' GEMMs, counted on the device: tiles of rows of each expert times tiles of its weight.
#pragma once

#include "experts.h"

#include "device.cuh"

namespace baton {

// First position and first tile of rows of each expert. An expert without rows has no tile.
struct ItemTable {
  int32_t position[BATON_EXPERTS_MAX + 1];
  int32_t tile[BATON_EXPERTS_MAX + 1];
};

struct Item {
  int expert;
  int position;  // of the first row
  int rows;      // at most the rows of a tile; 0: there is no such item
  int tile;      // index of the tile of the weight
};

// Fills the table for tiles of TILE rows. One warp calls this function; a lane handles consecutive experts.
template <int TILE>
__device__ __forceinline__ void fill_items(const int32_t* offsets, int experts, ItemTable& table) {
  constexpr int kOwned = BATON_EXPERTS_MAX / WARP;
  const int lane = threadIdx.x % WARP, own = (experts + WARP - 1) / WARP, begin = lane * own;
  int positions[kOwned + 1];
#pragma unroll
  for (int i = 0; i <= kOwned; ++i) positions[i] = i <= own ? offsets[min(begin + i, experts)] : 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    if (i < own) sum += (positions[i + 1] - positions[i] + TILE - 1) / TILE;
  }
  int before = sum;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int other = __shfl_up_sync(FULL, before, distance);
    if (lane >= distance) before += other;
  }
  before -= sum;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    if (i < own && begin + i < experts) {
      table.position[begin + i] = positions[i];
      table.tile[begin + i] = before;
      before += (positions[i + 1] - positions[i] + TILE - 1) / TILE;
    }
  }
  if (lane == WARP - 1) table.tile[experts] = before, table.position[experts] = offsets[experts];
}

// Returns item `index`, where each tile of rows has `tiles` consecutive items, one for each tile of the weight.
template <int TILE>
__device__ __forceinline__ Item item_at(const ItemTable& table, int experts, int tiles, int index) {
  const int block = index / tiles;
  if (block >= table.tile[experts]) return {0, 0, 0, 0};
  int low = 0, high = experts;  // table.tile[low] <= block < table.tile[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.tile[middle] <= block) low = middle;
    else high = middle;
  }
  const int position = table.position[low] + (block - table.tile[low]) * TILE;
  return {low, position, min(TILE, table.position[low + 1] - position), index - block * tiles};
}

}  // namespace baton
