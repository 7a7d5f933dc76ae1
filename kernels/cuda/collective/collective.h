/* Sums over the GPUs of a group, and what else they tell each other: a part of the C ABI, with the rules of baton_kernels.h.
 *
 * Every rank has an arena: device memory of its own, from the plain allocator, exported by CUDA IPC and mapped by all
 * others, made ready by baton_group_reset before the first call. All ranks make the same calls in the same order.
 * Addresses never change, so graphs need no registration; which of an arena's two halves a call uses is read from
 * device memory.
 */
#ifndef BATON_COLLECTIVE_H
#define BATON_COLLECTIVE_H

#include "baton_kernels.h"

#define BATON_GROUP_RANKS_MAX 8

/* 96 bytes. */
typedef struct {
  void *arenas[BATON_GROUP_RANKS_MAX]; /* of every rank, as mapped here */
  int64_t arena_bytes;                 /* of each: what baton_group_arena_bytes says */
  uint32_t *fault;                     /* host memory that the device can write: not 0 once a wait was given up */
  int64_t timeout_ns;                  /* how long a kernel waits for a peer; above 0 */
  int32_t rank;
  int32_t ranks; /* 2, 4 or 8 */
} baton_group;

/* 80 bytes. */
typedef struct {
  const void *x;      /* [rows][x_stride] of 4 bytes each: this rank's columns */
  int64_t x_stride;
  void *out;          /* [rows][out_stride]: all columns; not x */
  int64_t out_stride;
  int32_t firsts[BATON_GROUP_RANKS_MAX + 1]; /* rank r has the columns from firsts[r] up to firsts[r + 1] */
  int32_t rows;
  int32_t reserved[2];
} baton_gather_args;

typedef enum {
  BATON_ALL_REDUCE_AUTO = 0,
  BATON_ALL_REDUCE_ONE_SHOT = 1, /* everybody sends everything to everybody */
  BATON_ALL_REDUCE_TWO_SHOT = 2  /* everybody sums one part and sends the sum; without a norm */
} baton_all_reduce_way;

/* 64 bytes. */
typedef struct {
  const void *x;       /* T [rows][width] */
  void *out;           /* T [rows][width]; may be x */
  float *residual;     /* null, or [rows][width]: the sum is added to it, and out is its norm */
  const float *weight; /* [width], of the norm */
  float eps;
  int32_t dtype;
  int32_t rows;
  int32_t width; /* a multiple of 8 */
  int32_t way;
  int32_t blocks;  /* 0 chooses */
  int32_t threads; /* a block; 0 chooses */
  int32_t pdl;     /* 1: may be launched before the preceding kernel of the stream has ended; it waits for that */
} baton_all_reduce_args;

/* Bytes of an arena for messages of up to `message_bytes` of x. */
BATON_API int64_t baton_group_arena_bytes(int32_t ranks, int64_t message_bytes);
/* Makes this rank's arena as new: all its words but the first few are filled with 0xff. Sets no `fault` back to 0, which is
 * the caller's to do. Between two points at which all ranks have met with no call under way. Not in a graph. */
BATON_API int32_t baton_group_reset(const baton_group *group, void *stream);
/* Ends the waits of calls under way and of those that follow, up to the next reset. `stream` is another than theirs. */
BATON_API int32_t baton_group_stop(const baton_group *group, void *stream);
/* out = the sum of all ranks' x, in f32 in the order of the ranks: equal in every bit on all of them. Without a norm it
 * is rounded to T once; with one, residual[row] += sum (one shot: not rounded before), out = residual[row] / sqrt(mean of
 * its squares + eps) * weight. BATON_TOO_SMALL for more than the arenas were made for.
 * A wait of more than timeout_ns is given up: `fault` is set, results are worthless, and every later call returns
 * at once until all ranks have reset. */
BATON_API int32_t baton_all_reduce(const baton_group *group, const baton_all_reduce_args *args, void *stream);
/* Every rank's columns of every row, in every bit; in as many rounds as the arenas want, in one kernel. Waits as a sum
 * does. */
BATON_API int32_t baton_group_gather(const baton_group *group, const baton_gather_args *args, void *stream);

/* Bytes of scratch for baton_group_sample. */
BATON_API uint64_t baton_group_sample_scratch_bytes(int32_t ranks, int32_t samples_max, int32_t vocabulary);
/* As baton_sample, by all ranks of a group together: `args->logits` are of this rank's tokens, rank r has those from
 * firsts[r] up to firsts[r + 1] (ranks + 1 numbers in host memory; whole runs of 1,024 but for the end), `args->vocabulary`
 * counts all. Results are equal on all ranks in every bit, and those of baton_sample over the whole rows. `reserved` of a
 * result is 1 where logits were gathered for it. After a wait that was given up results are worthless, and some are
 * those of an earlier call. */
BATON_API int32_t baton_group_sample(const baton_group *group, const baton_pool *pool, const baton_step *step,
                                     const baton_sample_args *args, const int32_t *firsts, void *stream);

#endif
